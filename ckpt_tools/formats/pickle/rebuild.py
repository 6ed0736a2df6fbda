"""How stored tensors, DTensors and their meshes are put together from what a pickle hands over.

These are the functions that a pickle of tensors calls in place of torch's. They check everything
that they are given and read no storage. What torch can pickle and we cannot read right becomes an
opaque value with a flaw: it is one entry's trouble, and the rest of the file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import NotReadError, UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.limits import is_word
from ckpt_tools.formats.pickle.nodes import Function, Global, Opaque, shown
from ckpt_tools.formats.pickle.stored import (
    STORAGES,
    Sign,
    Stored,
    StoredPieces,
    StoredStorage,
    StoredTensor,
    as_count,
    as_counts,
    dtype_name,
)

_PARAMETERS = ("torch.nn.parameter.Parameter", "torch.nn.Parameter")
_DTENSORS = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._api.DTensor",
    "torch.distributed._tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
)
# Quantized elements mean nothing without their scales: a tensor of them is refused by name.
_QUANTIZED = {
    f"q{name.lower()}": f"Q{name}Storage"
    for name in ("Int8", "UInt8", "Int32", "UInt4x2", "UInt2x4")
}
# The classes of storages and their element types, None for bytes. torch before 2.0 had the same
# names again under torch.cuda.
_UNTYPED = ("storage.UntypedStorage", "storage._UntypedStorage", "UntypedStorage")
_STORAGES: dict[str, str | None] = {
    **dict.fromkeys(f"torch.{name}" for name in _UNTYPED),
    **{f"torch.{name}": dtype for dtype, name in (STORAGES | _QUANTIZED).items()},
    **{f"torch.cuda.{name}": dtype for dtype, name in (STORAGES | _QUANTIZED).items()},
}
# The classes that these functions ask for, beside those of a DTensor's spec.
TENSOR_CLASSES = frozenset({*_STORAGES, *_PARAMETERS, *_DTENSORS, "torch.Tensor"})

RESAVE = (
    "Load it where it was saved, make plain dense tensors of it, and save it again; -x leaves the "
    "entry out."
)


def _asked(kind: object) -> str:
    return kind.name if isinstance(kind, Global) else ""


def storage_from_id(pid: object) -> StoredStorage | Global:
    """The storage that a persistent id names, in torch.save's zip and in older formats.

    The id is ("storage", class, key, location, numel), and in the older format one item more: None,
    or the part of the storage that is meant, which only files of torch 0.3 and before have. That
    format also names the class of a module so, with its source: then it is the class.
    """
    if type(pid) is tuple and pid[:1] == ("module",):
        if len(pid) == 4 and isinstance(pid[1], Global):
            return pid[1]
        raise UnsupportedError(
            "a whole module was pickled, with its code; only state dicts are read.",
            hint="Load it where its code is, and save model.state_dict() instead.",
        )
    if type(pid) is not tuple or not 5 <= len(pid) <= 6 or pid[0] != "storage":
        raise UnreadableError(f"a persistent id that torch.save does not write: {shown(pid)}.")
    _, kind, key, location, numel = pid[:5]
    name = _asked(kind)
    if name not in _STORAGES or not is_word(key) or not is_word(location):
        raise UnreadableError("a storage without a class, a key or a location.")
    if len(pid) == 6 and pid[5] is not None:
        raise UnsupportedError("a storage that is a view of another one.", hint=RESAVE)
    return StoredStorage(key, _STORAGES[name], as_count(numel, "the size of a storage"))


def _unless_flawed(run: Callable[[tuple[object, ...]], object]) -> Function:
    """The function; a tensor that it refuses becomes an opaque value with that flaw."""

    def guarded(args: tuple[object, ...]) -> object:
        try:
            return run(args)
        except UnsupportedError as error:
            return Opaque(_class_of(args), flaw=error.with_traceback(None))  # it holds frames

    return Function(guarded)


def _class_of(args: tuple[object, ...]) -> str:
    """The class of a tensor, of whose making these are the arguments."""
    kind = args[1] if len(args) == 4 else None
    return kind.qualname if isinstance(kind, Global) else "torch.Tensor"


@_unless_flawed
def _rebuild_tensor(args: tuple[object, ...]) -> StoredTensor:
    """``(storage, storage_offset, size, stride[, requires_grad[, hooks[, metadata]]])``."""
    if not 4 <= len(args) <= 7:
        raise UnreadableError(f"a tensor made of {len(args)} values.")
    return _tensor(args, None, *args[6:])


@_unless_flawed
def _rebuild_npu_tensor(args: tuple[object, ...]) -> object:
    """As `_rebuild_tensor`, and the format that it had in an Ascend NPU: the CPU's is stored."""
    return _rebuild_tensor.run(args[:6])


@_unless_flawed
def _rebuild_tensor_v3(args: tuple[object, ...]) -> StoredTensor:
    """``(storage, storage_offset, size, stride, requires_grad, hooks, dtype[, metadata])``."""
    dtype = dtype_name(args[6]) if 7 <= len(args) <= 8 else None
    if dtype is None:
        raise UnreadableError("a tensor without an element type.")
    return _tensor(args, dtype, *args[7:])


def _tensor(args: tuple[object, ...], dtype: str | None, metadata: object = None) -> StoredTensor:
    """The view of a storage, checked to lie inside of it."""
    storage = args[0]
    if type(storage) is not StoredStorage:
        raise UnreadableError(f"a tensor without a storage, but {shown(storage)}.")
    name = dtype or storage.dtype
    if name is None or name not in BY_NAME:
        raise NotReadError(f"a tensor of element type {name}, which is not read here.")
    tensor = StoredTensor(
        storage,
        dtype=name,
        storage_offset=as_count(args[1], "the storage offset of a tensor"),
        shape=as_counts(args[2], "the shape of a tensor"),
        strides=as_counts(args[3], "the strides of a tensor"),
        sign=_sign(metadata),
    )
    if len(tensor.shape) != len(tensor.strides):
        raise UnreadableError(f"a tensor of shape {tensor.shape} with strides {tensor.strides}.")
    numel = storage.numel if storage.dtype else storage.numel // BY_NAME[name].itemsize
    if tensor.end > numel and 0 not in tensor.shape:
        raise UnreadableError(
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.strides)} ends at "
            f"element {tensor.end:,} of storage {shown(storage.key)}, which has {numel:,}."
        )
    return tensor


def _sign(metadata: object) -> Sign | None:
    """How the values of a tensor differ from its stored elements: torch may negate lazily."""
    if type(metadata) is not dict:
        return None
    bits = [bit for bit in ("conj", "neg") if metadata.get(bit)]
    if len(bits) == 2:
        raise NotReadError(
            "a lazily conjugated and negated tensor.",
            hint="Call .resolve_conj() and .resolve_neg() on it before saving.",
        )
    return None if not bits else "negated" if bits == ["neg"] else "conjugated"


@_unless_flawed
def _rebuild_parameter(args: tuple[object, ...]) -> Stored | Opaque:
    """``(data, requires_grad, hooks[, state])``."""
    made = args[0] if 3 <= len(args) <= 4 else None
    if isinstance(made, StoredTensor) and len(args) == 4:
        return _with_attributes(made, args[3])
    if not isinstance(made, Stored) and not (isinstance(made, Opaque) and made.is_tensor):
        raise UnreadableError("a parameter without a tensor.")
    return made


def _with_attributes(tensor: StoredTensor, state: object) -> StoredTensor | StoredPieces:
    """The tensor, or the pieces of a larger one that its attributes say it is.

    A torch.Tensor with these four is a CheckpointableTensor; no value depends on others that a
    program hung on it. One without dimensions is whole.
    """
    if type(state) is tuple and len(state) == 2:  # the second are those of __slots__
        state = state[0]
    if type(state) is not dict or not all(name in state for name in _PIECES):
        return tensor
    shape = as_counts(state["global_shape"], "the global shape of a tensor")
    pieces = [state[name] for name in _PIECES[1:]]
    for piece in pieces:
        if not isinstance(piece, tuple | list):
            raise UnreadableError(f"a CheckpointableTensor with {shown(piece)} in place of a list.")
    return StoredPieces(tensor, shape, *pieces) if shape or tensor.shape else tensor


_PIECES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@Function
def _rebuild_wrapper(_args: tuple[object, ...]) -> object:
    """Never called by itself: `_rebuild_from_type` gives it the state that it needs."""
    raise UnreadableError("a distributed tensor without its state.")


_TENSOR_MAKERS = (_rebuild_tensor, _rebuild_tensor_v3, _rebuild_npu_tensor, _rebuild_parameter)
# torchao's classes of weights that are trained in low precision: each keeps its weight as it is in
# this attribute, and converts it when it is used.
_FLOAT8 = "torchao.float8.fsdp_utils.WeightWith{}Float8CastTensor"
_MOE = "torchao.prototype.moe_training.tensor.{}"
_INT8 = "torchao.prototype.quantized_training.int8_mixed_precision.{}"
_WEIGHT_OF = {
    _FLOAT8.format("Dynamic"): "_tensor",
    _FLOAT8.format("Delayed"): "_tensor",
    _FLOAT8.format("Static"): "_tensor",
    _MOE.format("ScaledGroupedMMTensor"): "_data",
    _MOE.format("Float8TrainingWeightWrapperTensor"): "_data",
    _MOE.format("MXFP8TrainingWeightWrapperTensor"): "_data",
    _INT8.format("Int8MixedPrecisionTrainingLinearWeight"): "_data",
}


@_unless_flawed
def _rebuild_from_type(args: tuple[object, ...]) -> object:
    """``(function, class, its arguments, state of the subclass)``."""
    function, kind, inner, state = args if len(args) == 4 else (None,) * 4
    if not isinstance(inner, tuple):
        raise UnreadableError(f"a tensor subclass made of {len(args)} values.")
    if function is _rebuild_wrapper and _asked(kind) in _DTENSORS:
        from ckpt_tools.formats.pickle.dtensor_spec import dtensor_of  # late: most are plain

        return dtensor_of(inner, state)
    if function is _rebuild_wrapper and type(state) is dict and len(inner) > 2:
        weight = state.get(_WEIGHT_OF.get(_class_of(args), ""))
        says = dtype_name(inner[1]), as_counts(inner[2], "the shape of a tensor")
        if type(weight) is StoredTensor and (weight.dtype, weight.shape) == says:
            return weight
    if _asked(kind) not in ("torch.Tensor", *_PARAMETERS) or not isinstance(function, Function):
        name = getattr(kind, "qualname", None) or shown(kind)
        raise NotReadError(f"a tensor of class {name}, which is not read.", hint=RESAVE)
    if function not in _TENSOR_MAKERS and not isinstance(function, _Refused):
        raise UnsupportedError(f"a tensor made by {shown(function)}.", hint=RESAVE)
    made = function.run(inner)
    return _with_attributes(made, state) if isinstance(made, StoredTensor) else made


_FROM_TYPE = ("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2")
TENSOR_FUNCTIONS: Mapping[str, Function] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch_npu.utils.storage._rebuild_npu_tensor": _rebuild_npu_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper,
    **dict.fromkeys(_FROM_TYPE, _rebuild_from_type),
}
# Where tensors are not read, and only what they are is wanted.
NAMING_FUNCTIONS: Mapping[str, Function] = dict.fromkeys(
    _FROM_TYPE, Function(lambda args: Opaque(_class_of(args)), "torch.Tensor")
)


def refused_function(qualname: str) -> Function:
    """A function that stands for one of torch's that makes tensors we cannot read."""
    what = _REFUSED.get(qualname.rpartition(".")[2], "tensor")
    message = f"a {what} (made by {qualname}), which is not read."
    flaw: UnsupportedError = NotReadError(message, hint=RESAVE)
    if what == _META:
        flaw = UnsupportedError(message, hint="-x leaves the entry out.")
    return _Refused(lambda _args: Opaque(what, flaw=flaw), qualname)


class _Refused(Function):
    """One of torch's functions that make tensors we cannot read."""

    __slots__ = ()


_META, _OTHER_DEVICE = "meta tensor without values", "tensor of another device (XLA, MAIA, MTIA)"
_REFUSED = {
    "_rebuild_device_tensor_from_cpu_tensor": _OTHER_DEVICE,
    "_rebuild_device_tensor_from_numpy": _OTHER_DEVICE,
    "_rebuild_xla_tensor": _OTHER_DEVICE,
    "_rebuild_meta_tensor_no_storage": _META,
    "_rebuild_nested_tensor": "nested tensor",
    "_rebuild_qtensor": "quantized tensor",
    "_rebuild_sparse_csr_tensor": "sparse tensor",
    "_rebuild_sparse_tensor": "sparse tensor",
}
