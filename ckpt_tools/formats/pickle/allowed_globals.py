"""Which globals a pickle may ask for, and what it gets in place of each.

Only names are looked at: nothing is imported, and no name gives the thing that it means. Names are
written ``module.name`` with the module of Python 3 (``builtins``, not ``__builtin__``).
"""

from __future__ import annotations

import builtins
import re
import shlex
from collections.abc import Collection

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.text import some
from ckpt_tools.errors import UnsafePickleError, UnsupportedError
from ckpt_tools.formats.pickle.configs import is_config
from ckpt_tools.formats.pickle.rebuild import (
    DTENSOR,
    PARAMETER,
    REBUILD_FROM_TYPE,
    REBUILD_NPU_TENSOR,
    REBUILD_PARAMETER,
    REBUILD_TENSOR,
    REBUILD_TENSOR_V3,
    REBUILD_WRAPPER,
    TENSOR,
)
from ckpt_tools.formats.pickle.torch_stubs import (
    STORAGES,
    DeviceMeshRecord,
    MeshLayoutRecord,
    PartialRecord,
    ReplicateRecord,
    ShardOrderRecord,
    ShardRecord,
    SpecRecord,
    StorageClass,
    StridedShardRecord,
    TensorMetaRecord,
    TorchDType,
)

SHARDED_TENSOR_MODULES = ("torch.distributed._shard.", "torch.distributed._sharded_tensor.")

DTYPES: dict[str, TorchDType] = {f"torch.{name}": TorchDType(f"torch.{name}") for name in BY_NAME}

_DTYPE_NAME = re.compile(
    r"torch\.(?:q?u?int\d+(?:x\d+)?|b?float\d+(?:_e\d+m\d+\w*)?|complex\d+|bits\d+(?:x\d+)?|bool)"
)

# Quantized elements mean nothing without their scales: a tensor of them is refused by name.
_QUANTIZED_STORAGES = {
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
_UNTYPED_STORAGES = (
    "torch.storage.UntypedStorage",
    "torch.storage._UntypedStorage",
    "torch.UntypedStorage",
)


def _storages() -> dict[str, StorageClass]:
    """The storage classes; torch before 2.0 had the same names again under ``torch.cuda``."""
    table = {name: StorageClass(name, None) for name in _UNTYPED_STORAGES}
    dtypes = {name: dtype for dtype, name in STORAGES.items()} | _QUANTIZED_STORAGES
    for last, dtype in dtypes.items():
        for name in (f"torch.{last}", f"torch.cuda.{last}"):
            table[name] = StorageClass(name, dtype)
    return table


_PLACEMENT_MODULES = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed._tensor._dtensor_spec",
)
_PLACEMENT_CLASSES: dict[str, type] = {
    "Shard": ShardRecord,
    "_StridedShard": StridedShardRecord,
    "Replicate": ReplicateRecord,
    "Partial": PartialRecord,
    "_Partial": PartialRecord,
    "_MaskPartial": PartialRecord,
    "DTensorSpec": SpecRecord,
    "TensorMeta": TensorMetaRecord,
    "ShardOrderEntry": ShardOrderRecord,
}

TENSOR_GLOBALS: dict[str, object] = {
    **DTYPES,
    **_storages(),
    **{
        f"{module}.{name}": stand_in
        for module in _PLACEMENT_MODULES
        for name, stand_in in _PLACEMENT_CLASSES.items()
    },
    "torch.Tensor": TENSOR,
    "torch.nn.parameter.Parameter": PARAMETER,
    "torch.nn.Parameter": PARAMETER,
    "torch.distributed.tensor.DTensor": DTENSOR,
    "torch.distributed.tensor._api.DTensor": DTENSOR,
    "torch.distributed._tensor.DTensor": DTENSOR,
    "torch.distributed._tensor.api.DTensor": DTENSOR,
    "torch.distributed.device_mesh.DeviceMesh": DeviceMeshRecord,
    "torch.distributed._tensor.device_mesh.DeviceMesh": DeviceMeshRecord,
    "torch.distributed._mesh_layout._MeshLayout": MeshLayoutRecord,
    "torch.distributed._mesh_layout._FlatLayout": MeshLayoutRecord,
    "torch.fx.passes.shape_prop.TensorMetadata": TensorMetaRecord,
    "torch._utils._rebuild_tensor": REBUILD_TENSOR,
    "torch._utils._rebuild_tensor_v2": REBUILD_TENSOR,
    "torch._utils._rebuild_tensor_v3": REBUILD_TENSOR_V3,
    "torch_npu.utils.storage._rebuild_npu_tensor": REBUILD_NPU_TENSOR,
    "torch._utils._rebuild_parameter": REBUILD_PARAMETER,
    "torch._utils._rebuild_parameter_with_state": REBUILD_PARAMETER,
    "torch._utils._rebuild_wrapper_subclass": REBUILD_WRAPPER,
    "torch._tensor._rebuild_from_type_v2": REBUILD_FROM_TYPE,
    "torch._tensor._rebuild_from_type": REBUILD_FROM_TYPE,
}

# Data of Python and numpy, and the constants of torch, that training states are full of. They are
# never opened. A module stands for every name in it.
# fmt: off
_OPAQUE_MODULES = frozenset({
    "argparse", "array", "collections", "datetime", "decimal", "enum", "fractions", "ipaddress",
    "numpy", "numpy._core.multiarray", "numpy._core.numeric", "numpy.core.multiarray",
    "numpy.core.numeric", "numpy.dtypes", "numpy.random", "numpy.random._generator",
    "numpy.random._mt19937", "numpy.random._pcg64", "numpy.random._philox", "numpy.random._pickle",
    "numpy.random._sfc64", "numpy.random.bit_generator", "numpy.random.mtrand", "omegaconf.base",
    "omegaconf.dictconfig", "omegaconf.listconfig", "omegaconf.nodes", "pathlib", "pathlib._local",
    "random", "re", "uuid", "zoneinfo",
})
_OPAQUE_NAMES = frozenset({
    "_codecs.encode", "_io.BytesIO", "copyreg.__newobj__", "copyreg.__newobj_ex__",
    "torch.Generator", "torch._C.Generator", "torch._C._distributed_c10d.RedOpType",
    "torch._C._distributed_c10d.ReduceOp", "torch._dynamo.decorators._DimRange", "torch.device",
    "torch.serialization._get_layout", "torch.torch_version.TorchVersion",
    "torch.utils._get_qscheme", "types.SimpleNamespace", "typing.Any", "typing.Dict", "typing.List",
    "typing.Optional", "typing.Tuple", "typing.Union",
    # Enums of modules that are refused otherwise.
    "http.HTTPMethod", "http.HTTPStatus", "inspect._ParameterKind", "signal.Handlers",
    "signal.Signals", "socket.AddressFamily", "socket.SocketKind",
})
_TORCH_CONSTANTS = frozenset({
    "channels_last", "channels_last_3d", "contiguous_format", "preserve_format", "strided",
    "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged",
    "per_channel_affine", "per_channel_affine_float_qparams", "per_channel_symmetric",
    "per_tensor_affine", "per_tensor_symmetric",
})
_EXCEPTIONS = frozenset(
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
)
_BUILTIN_TYPES = _EXCEPTIONS | frozenset({
    "Ellipsis", "NoneType", "NotImplemented", "NotImplementedType", "bool", "bytearray", "bytes",
    "complex", "dict", "ellipsis", "float", "frozenset", "int", "list", "object", "range", "set",
    "slice", "str", "tuple",
})

# What can run code, reach the system, or open the way to either. They would be harmless here, where
# nothing is run, but a checkpoint that asks for one is hostile, and says so when it is refused.
_RUNNERS = frozenset({
    "_ctypes", "_imp", "_io", "_pickle", "_posixsubprocess", "_socket", "_sqlite3", "_thread",
    "_winapi", "aiohttp", "ast", "asyncio", "atexit", "bdb", "bz2", "cProfile", "cffi",
    "cloudpickle", "code", "codecs", "codeop", "commands", "concurrent", "copyreg", "ctypes",
    "dill", "dis", "distutils", "doctest", "ensurepip", "faulthandler", "ftplib", "functools",
    "gc", "gzip", "http", "httplib", "idlelib", "imp", "importlib", "inspect", "io", "joblib",
    "lib2to3", "linecache", "lzma", "mailcap", "marshal", "mmap", "multiprocessing", "nt",
    "ntpath", "nturl2path", "operator", "os", "pdb", "pickle", "pip", "pkg_resources", "pkgutil",
    "platform", "posix", "posixpath", "profile", "pstats", "pty", "pydoc", "requests", "resource",
    "runpy", "select", "setuptools", "shelve", "shutil", "signal", "site", "smtplib", "socket",
    "socketserver", "sqlite3", "ssl", "subprocess", "sys", "sysconfig", "tarfile", "telnetlib",
    "tempfile", "threading", "timeit", "trace", "types", "urllib", "urllib2", "venv", "weakref",
    "webbrowser", "xmlrpc", "zipapp", "zipfile", "zipimport",
})
# fmt: on
_TORCH_RUNNERS = (
    "torch._C",
    "torch._dynamo",
    "torch._inductor",
    "torch.fx",
    "torch.hub",
    "torch.jit",
    "torch.load",
    "torch.package",
    "torch.serialization.load",
    "torch.storage._load_from_bytes",
    "torch.utils.cpp_extension",
    "torch.utils.data.datapipes",
)
_NUMPY_RUNNERS = ("numpy.testing", "numpy.load", "numpy.f2py", "numpy.distutils")


# What an object is, where a pickle asks for the function that makes it.
_MADE_BY = {
    "numpy._core.multiarray._reconstruct": "numpy.ndarray",
    "numpy._core.multiarray.scalar": "numpy.generic",
    "numpy._core.numeric._frombuffer": "numpy.ndarray",
    "numpy.core.multiarray._reconstruct": "numpy.ndarray",
    "numpy.core.numeric._frombuffer": "numpy.ndarray",
    "numpy.core.multiarray.scalar": "numpy.generic",
    "numpy.random._pickle.__bit_generator_ctor": "numpy.random.BitGenerator",
    "numpy.random._pickle.__generator_ctor": "numpy.random.Generator",
    "numpy.random._pickle.__randomstate_ctor": "numpy.random.RandomState",
    "torch._tensor._rebuild_from_type": "torch.Tensor",
    "torch._tensor._rebuild_from_type_v2": "torch.Tensor",
}


_MAX_NAMED = 20


def made_by(name: str) -> str:
    """The class of what a global makes, as far as it is known; else the global itself."""
    if name.startswith("torch._utils._rebuild"):
        return "torch.Tensor"
    return _MADE_BY.get(name, name.replace("pathlib._local.", "pathlib."))


def is_harmless(name: str) -> bool:
    """Whether a global is known to be data, which is kept as an opaque value."""
    module, _, last = name.rpartition(".")
    if module == "builtins":
        return last in _BUILTIN_TYPES
    if is_config(name) or (module == "torch" and last in _TORCH_CONSTANTS):
        return True
    return name in _OPAQUE_NAMES or (module in _OPAQUE_MODULES and not is_runner(name))


def is_runner(name: str) -> bool:
    """Whether a global is known to run code or reach the system; it can never be allowed."""
    module, _, last = name.rpartition(".")
    if name in _OPAQUE_NAMES or is_config(name) or module in _OPAQUE_MODULES:
        return name.startswith(_NUMPY_RUNNERS)
    if module == "builtins":
        return last not in _BUILTIN_TYPES
    return name.partition(".")[0] in _RUNNERS or name.startswith(_TORCH_RUNNERS + _NUMPY_RUNNERS)


def is_torch_dtype(name: str) -> bool:
    """Whether a global is an element type of torch, those included that we cannot read."""
    return _DTYPE_NAME.fullmatch(name) is not None


def runner_error(name: str) -> UnsafePickleError:
    """What to raise for a global that can run code."""
    hint = "Do not open this file with torch.load(weights_only=False) or pickle.load."
    if name == "torch.storage._load_from_bytes":
        hint = (
            "Tensors are in a pickle so when pickle.dump wrote it. If you trust it, load it where "
            "it was made, and save its state dict with torch.save."
        )
    return UnsafePickleError(
        f"asks for {name}, which can run code; it was not run, and it cannot be allowed.",
        hint=hint,
    )


def unknown_error(asked: Collection[str]) -> UnsafePickleError:
    """What is wrong with a value of an unknown global: all that its pickle asks for."""
    names = sorted(asked)
    known = "is" if len(names) == 1 else "are"
    options = " ".join(f"--allow-global {shlex.quote(name)}" for name in names)
    return UnsafePickleError(
        f"asks for {some(names, _MAX_NAMED)}, which {known} not on the list of what is read; it "
        "was not run.",
        hint=f"{options} keeps such values closed, and never runs them; -x leaves them out.",
    )


def module_error(name: str) -> UnsupportedError:
    """What is wrong with a model that was pickled as an object."""
    return UnsupportedError(
        f"a whole module of class {name}, pickled with its code (torch.save(model)); only state "
        "dicts are read.",
        hint="Load it where its code is, with torch.load(…, weights_only=False), and save "
        "model.state_dict() instead; -x leaves the entry out.",
    )
