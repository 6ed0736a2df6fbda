"""Which globals a pickle may ask for, and what it gets in place of each.

Only names are looked at: nothing is imported, and no name gives the thing that it means. Names are
written ``module.name`` with the module of Python 3 (``builtins``, not ``__builtin__``).
"""

from __future__ import annotations

import builtins
import shlex
from collections.abc import Collection

from ckpt_tools.core.text import some
from ckpt_tools.errors import UnsafePickleError, UnsupportedError
from ckpt_tools.formats.pickle.rebuild import TENSOR_CLASSES
from ckpt_tools.formats.pickle.stored import is_dtype

SHARDED_TENSOR_MODULES = ("torch.distributed._shard.", "torch.distributed._sharded_tensor.")

# fmt: off
# Configs, of which it is shown what they hold; and what else may be written into other pickles, as
# it holds data and does nothing else.
_CONFIG_CLASSES = frozenset({
    "argparse.Namespace", "lightning.fabric.utilities.data.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict", "types.SimpleNamespace",
})
_SCALARS = "bool bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64"
_PATHS = "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath"
_WRITTEN = {
    "__builtin__": "complex frozenset set", "_codecs": "encode", "_io": "BytesIO",
    "builtins": "NoneType bool bytearray bytes complex dict float frozenset int list object range "
    "set slice str tuple",
    "collections": "Counter OrderedDict defaultdict deque", "copyreg": "__newobj__",
    "datetime": "date datetime time timedelta timezone", "decimal": "Decimal",
    "fractions": "Fraction", "pathlib": _PATHS, "random": "Random", "uuid": "SafeUUID UUID",
    "typing": "Any Dict List Optional Tuple Union",
    "numpy": f"{_SCALARS} dtype ndarray", "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer", "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64 PCG64DXSM", "numpy.random._philox": "Philox",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random._sfc64": "SFC64",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "omegaconf.base": "ContainerMetadata Metadata", "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode BytesNode EnumNode FloatNode IntegerNode PathNode "
    "StringNode",
    "torch": "Size device", "torch.serialization": "_get_layout",
}
_WRITTEN_NAMES = _CONFIG_CLASSES | {
    f"{module}.{name}" for module, names in _WRITTEN.items() for name in names.split()
}

# Data of Python and numpy, and the constants of torch, that training states are full of. They are
# never opened. A module stands for every name in it.
_OPAQUE_MODULES = frozenset({
    "argparse", "array", "collections", "datetime", "decimal", "enum", "fractions", "ipaddress",
    "numpy", "numpy._core.multiarray", "numpy._core.numeric", "numpy.dtypes", "numpy.random",
    "numpy.random._generator", "numpy.random._mt19937", "numpy.random._pcg64",
    "numpy.random._philox", "numpy.random._pickle", "numpy.random._sfc64",
    "numpy.random.bit_generator", "numpy.random.mtrand", "omegaconf.base", "omegaconf.dictconfig",
    "omegaconf.listconfig", "omegaconf.nodes", "pathlib", "random", "re", "uuid", "zoneinfo",
})
_OPAQUE_NAMES = _WRITTEN_NAMES | {
    "copyreg.__newobj_ex__", "torch.Generator", "torch._C.Generator",
    "torch._C._distributed_c10d.RedOpType", "torch._C._distributed_c10d.ReduceOp",
    "torch._dynamo.decorators._DimRange", "torch.torch_version.TorchVersion",
    "torch.utils._get_qscheme",
    # Enums of modules that are refused otherwise.
    "http.HTTPMethod", "http.HTTPStatus", "inspect._ParameterKind", "signal.Handlers",
    "signal.Signals", "socket.AddressFamily", "socket.SocketKind",
}
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
_OMEGACONF = ("omegaconf.dictconfig.", "omegaconf.listconfig.", "omegaconf.nodes.")
_NUMPY_RUNNERS = ("numpy.testing", "numpy.load", "numpy.f2py", "numpy.distutils")
_TORCH_RUNNERS = (
    "torch._C", "torch._dynamo", "torch._inductor", "torch.fx", "torch.hub", "torch.jit",
    "torch.load", "torch.package", "torch.serialization.load", "torch.storage._load_from_bytes",
    "torch.utils.cpp_extension", "torch.utils.data.datapipes",
)
# fmt: on

_MAX_NAMED = 20


def is_config(name: str) -> bool:
    """Whether a global is the class of a config."""
    return name in _CONFIG_CLASSES or name.startswith(_OMEGACONF)


def is_written(name: str) -> bool:
    """Whether a global may be asked for by the pickles that are written."""
    return name in _WRITTEN_NAMES or is_dtype(name)


def is_harmless(name: str) -> bool:
    """Whether a global is known to be data, which is kept as an opaque value."""
    module, _, last = name.rpartition(".")
    if module == "builtins":
        return last in _BUILTIN_TYPES
    if module == "torch" and last in _TORCH_CONSTANTS:
        return True
    if module in _OPAQUE_MODULES and not name.startswith(_NUMPY_RUNNERS):
        return True
    if name in _OPAQUE_NAMES | TENSOR_CLASSES or is_config(name):
        return True
    from ckpt_tools.formats.pickle.dtensor_spec import SPEC_CLASSES  # late: most name none

    return name in SPEC_CLASSES


def is_runner(name: str) -> bool:
    """Whether a global is known to run code or reach the system; it can never be allowed."""
    if is_harmless(name):
        return False
    if name.rpartition(".")[0] == "builtins" or name.partition(".")[0] in _RUNNERS:
        return True
    return name.startswith(_TORCH_RUNNERS + _NUMPY_RUNNERS)


def runner_error(name: str) -> UnsafePickleError:
    """What to raise for a global that can run code."""
    hint = "Do not open this file with torch.load(weights_only=False) or pickle.load."
    if name == "torch.storage._load_from_bytes":
        hint = (
            "Tensors are in a pickle so when pickle.dump wrote it. If you trust it, load it where "
            "it was made, and save its state dict with torch.save."
        )
    return UnsafePickleError(
        f"asks for {name}, which can run code; it was not run, and it cannot be allowed.", hint=hint
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
