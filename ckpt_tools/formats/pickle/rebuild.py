"""How stored tensors, DTensors and their meshes are put together from what a pickle hands over.

These are the functions that a pickle of tensors calls in place of torch's. They check everything
that they are given and read no storage. What torch can pickle and we cannot read right becomes an
opaque value with a flaw: it is one entry's trouble, and the rest of the file is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import NotReadError, UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.limits import (
    is_word,
)
from ckpt_tools.formats.pickle.nodes import Function, Global, Instance, Opaque, shown
from ckpt_tools.formats.pickle.torch_stubs import (
    STORAGES,
    Sign,
    Stored,
    StoredDTensor,
    StoredMesh,
    StoredPieces,
    StoredPlacement,
    StoredStorage,
    StoredTensor,
    as_count,
    as_counts,
    dtype_name,
)

_SPEC_MODULES = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed._tensor._dtensor_spec",
)


def _in_specs(*names: str) -> frozenset[str]:
    return frozenset(f"{module}.{name}" for module in _SPEC_MODULES for name in names)


_SHARDS, _ANY_SHARDS = _in_specs("Shard"), _in_specs("Shard", "_StridedShard")
_REPLICATES = _in_specs("Replicate")
_PARTIALS = _in_specs("Partial", "_Partial", "_MaskPartial")
_SPECS, _ORDERS = _in_specs("DTensorSpec"), _in_specs("ShardOrderEntry")
_METAS = _in_specs("TensorMeta") | {"torch.fx.passes.shape_prop.TensorMetadata"}
_MESHES = frozenset({
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed._tensor.device_mesh.DeviceMesh",
})  # fmt: skip
_LAYOUTS = frozenset({
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.distributed._mesh_layout._FlatLayout",
})  # fmt: skip
_PARAMETERS = ("torch.nn.parameter.Parameter", "torch.nn.Parameter")
_DTENSORS = (
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._api.DTensor",
    "torch.distributed._tensor.DTensor",
    "torch.distributed._tensor.api.DTensor",
)
# Quantized elements mean nothing without their scales: a tensor of them is refused by name.
_QUANTIZED = {
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
# The classes of storages and their element types, None for bytes. torch before 2.0 had the same
# names again under torch.cuda.
_STORAGES: dict[str, str | None] = {
    **dict.fromkeys(("torch.storage.UntypedStorage", "torch.storage._UntypedStorage")),
    "torch.UntypedStorage": None,
    **{
        f"{module}.{name}": dtype
        for name, dtype in ({name: dtype for dtype, name in STORAGES.items()} | _QUANTIZED).items()
        for module in ("torch", "torch.cuda")
    },
}
# The classes that these functions ask for.
TENSOR_CLASSES = frozenset().union(
    *(_ANY_SHARDS, _REPLICATES, _PARTIALS, _SPECS, _ORDERS, _METAS, _MESHES, _LAYOUTS),
    *(_STORAGES, _PARAMETERS, _DTENSORS, ("torch.Tensor",)),
)

RESAVE = (
    "Load it where it was saved, make plain dense tensors of it, and save it again; -x leaves the "
    "entry out."
)


def module_class(pid: object) -> Global | None:
    """The class of a module, which the older format names by an id with its source, or None."""
    kind = pid[1] if type(pid) is tuple and len(pid) == 4 and pid[0] == "module" else None
    return kind if isinstance(kind, Global) else None


def _asked(kind: object) -> str:
    return kind.name if isinstance(kind, Global) else ""


def _of(value: object, names: frozenset[str]) -> Instance | None:
    """The value when it is an object of a class of one of these names."""
    return value if isinstance(value, Instance) and value.cls.name in names else None


def storage_from_id(pid: object) -> StoredStorage:
    """The storage that a persistent id names, in torch.save's zip and in older formats.

    The id is ("storage", class, key, location, numel), and in the older format one item more: None,
    or the part of the storage that is meant, which only files of torch 0.3 and before have.
    """
    if type(pid) is not tuple or not 5 <= len(pid) <= 6 or pid[0] != "storage":
        if type(pid) is tuple and pid[:1] == ("module",):
            raise UnsupportedError(
                "a whole module was pickled, with its code; only state dicts are read.",
                hint="Load it where its code is, and save model.state_dict() instead.",
            )
        raise UnreadableError(f"a persistent id that torch.save does not write: {shown(pid)}.")
    _, kind, key, location, numel = pid[:5]
    name = _asked(kind)
    if name not in _STORAGES or not is_word(key) or not is_word(location):
        raise UnreadableError("a storage without a class, a key or a location.")
    if len(pid) == 6 and pid[5] is not None:
        raise UnsupportedError("a storage that is a view of another one.", hint=RESAVE)
    return StoredStorage(key, _STORAGES[name], location, as_count(numel, "the size of a storage"))


def _rebuild_tensor(args: tuple[object, ...]) -> StoredTensor:
    """``(storage, storage_offset, size, stride[, requires_grad[, hooks[, metadata]]])``."""
    if not 4 <= len(args) <= 7:
        raise UnreadableError(f"a tensor made of {len(args)} values.")
    return _tensor(args, None, sign=_sign(args[6] if len(args) == 7 else None))


def _rebuild_npu_tensor(args: tuple[object, ...]) -> StoredTensor:
    """As `_rebuild_tensor`, and the format that it had in an Ascend NPU: the CPU's is stored."""
    return _rebuild_tensor(args[:6])


def _rebuild_tensor_v3(args: tuple[object, ...]) -> StoredTensor:
    """``(storage, storage_offset, size, stride, requires_grad, hooks, dtype[, metadata])``."""
    dtype = dtype_name(args[6]) if 7 <= len(args) <= 8 else None
    if dtype is None:
        raise UnreadableError("a tensor without an element type.")
    return _tensor(args, dtype, sign=_sign(args[7] if len(args) == 8 else None))


def _tensor(args: tuple[object, ...], dtype: str | None, *, sign: Sign | None) -> StoredTensor:
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
        requires_grad=len(args) > 4 and args[4] is True,
        sign=sign,
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


def _rebuild_parameter(args: tuple[object, ...]) -> Stored | Opaque:
    """``(data, requires_grad, hooks[, state])``."""
    if 3 <= len(args) <= 4 and isinstance(args[0], Opaque) and args[0].is_tensor:
        return args[0]
    if not 3 <= len(args) <= 4 or not isinstance(args[0], Stored):
        raise UnreadableError("a parameter without a tensor.")
    if isinstance(args[0], StoredTensor):
        made = replace(args[0], requires_grad=args[1] is True, is_parameter=True)
        return _with_attributes(made, args[3] if len(args) == 4 else None)
    if isinstance(args[0], StoredPieces):
        return args[0]
    return replace(args[0], requires_grad=args[1] is True)


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
    pieces = [_list(state[name]) for name in _PIECES[1:]]
    return StoredPieces(tensor, shape, *pieces) if shape or tensor.shape else tensor


def _list(value: object) -> Sequence[object]:
    if not isinstance(value, tuple | list):
        raise UnreadableError(f"a CheckpointableTensor with {shown(value)} in place of a list.")
    return value


_PIECES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def _rebuild_wrapper_subclass(_args: tuple[object, ...]) -> object:
    """Never called by itself: `_rebuild_from_type` gives it the state that it needs."""
    raise UnreadableError("a distributed tensor without its state.")


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


_REBUILD_TENSOR = _unless_flawed(_rebuild_tensor)
_REBUILD_TENSOR_V3 = _unless_flawed(_rebuild_tensor_v3)
_REBUILD_NPU_TENSOR = _unless_flawed(_rebuild_npu_tensor)
_REBUILD_PARAMETER = _unless_flawed(_rebuild_parameter)
_REBUILD_WRAPPER = Function(_rebuild_wrapper_subclass)
_REBUILDS = (_REBUILD_TENSOR, _REBUILD_TENSOR_V3, _REBUILD_NPU_TENSOR, _REBUILD_PARAMETER)
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


def _rebuild_from_type(args: tuple[object, ...]) -> object:
    """``(function, class, its arguments, state of the subclass)``."""
    function, kind, inner, state = args if len(args) == 4 else (None,) * 4
    if not isinstance(inner, tuple):
        raise UnreadableError(f"a tensor subclass made of {len(args)} values.")
    if function is _REBUILD_WRAPPER and _asked(kind) in _DTENSORS:
        return _dtensor(inner, state)
    if function is _REBUILD_WRAPPER and type(state) is dict and len(inner) > 2:
        weight = state.get(_WEIGHT_OF.get(_class_of(args), ""))
        if type(weight) is StoredTensor and _is_as_stated(weight, inner):
            return weight
    if _asked(kind) not in ("torch.Tensor", *_PARAMETERS) or not isinstance(function, Function):
        name = getattr(kind, "qualname", None) or shown(kind)
        raise NotReadError(f"a tensor of class {name}, which is not read.", hint=RESAVE)
    if function not in _REBUILDS and not isinstance(function, _Refused):
        raise UnsupportedError(f"a tensor made by {shown(function)}.", hint=RESAVE)
    made = function.run(inner)
    return _with_attributes(made, state) if isinstance(made, StoredTensor) else made


def _is_as_stated(weight: StoredTensor, inner: tuple[object, ...]) -> bool:
    """Whether a weight has the element type and the shape that its class says of itself."""
    dtype, shape = inner[1:3]
    return (
        dtype_name(dtype) == weight.dtype
        and as_counts(shape, "the shape of a tensor") == weight.shape
    )


_REBUILD_FROM_TYPE = _unless_flawed(_rebuild_from_type)
_FROM_TYPE = ("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2")
TENSOR_FUNCTIONS: Mapping[str, Function] = {
    "torch._utils._rebuild_tensor": _REBUILD_TENSOR,
    "torch._utils._rebuild_tensor_v2": _REBUILD_TENSOR,
    "torch._utils._rebuild_tensor_v3": _REBUILD_TENSOR_V3,
    "torch_npu.utils.storage._rebuild_npu_tensor": _REBUILD_NPU_TENSOR,
    "torch._utils._rebuild_parameter": _REBUILD_PARAMETER,
    "torch._utils._rebuild_parameter_with_state": _REBUILD_PARAMETER,
    "torch._utils._rebuild_wrapper_subclass": _REBUILD_WRAPPER,
    **dict.fromkeys(_FROM_TYPE, _REBUILD_FROM_TYPE),
}
# Where tensors are not read, and only what they are is wanted.
NAMING_FUNCTIONS: Mapping[str, Function] = dict.fromkeys(
    _FROM_TYPE, Function(lambda args: Opaque(_class_of(args)), "torch.Tensor")
)


def refused_function(qualname: str) -> Function:
    """A function that stands for one of torch's that makes tensors we cannot read."""
    what, way = _REFUSED.get(qualname.rpartition(".")[2], ("tensor", "make plain dense tensors"))
    kind = UnsupportedError if what == _META else NotReadError  # its values are nowhere
    flaw = kind(
        f"a {what} (made by {qualname}), which is not read.",
        hint=f"Load it where it was saved, {way} of it, and save it again; -x leaves the entry "
        "out.",
    )
    return _Refused(lambda _args: Opaque(what, flaw=flaw), qualname)


class _Refused(Function):
    """One of torch's functions that make tensors we cannot read."""

    __slots__ = ()


_SPARSE = ("sparse tensor", "make plain tensors (.to_dense())")
_NESTED = ("nested tensor", "make plain tensors (.unbind())")
_ELSEWHERE = ("tensor of another device (XLA, MAIA, MTIA)", "make CPU tensors (.cpu())")
_META = "meta tensor without values"
_REFUSED = {
    "_rebuild_device_tensor_from_cpu_tensor": _ELSEWHERE,
    "_rebuild_device_tensor_from_numpy": _ELSEWHERE,
    "_rebuild_meta_tensor_no_storage": (
        _META,
        "make real tensors (.to_empty(), then their values)",
    ),
    "_rebuild_nested_tensor": _NESTED,
    "_rebuild_qtensor": ("quantized tensor", "make plain tensors (.dequantize())"),
    "_rebuild_sparse_csr_tensor": _SPARSE,
    "_rebuild_sparse_tensor": _SPARSE,
    "_rebuild_xla_tensor": _ELSEWHERE,
}


def _dtensor(args: tuple[object, ...], state: object) -> StoredDTensor | Opaque:
    """A DTensor: (class, dtype, global size, stride, …) and its local tensor and spec."""
    if type(state) is tuple and len(state) == 2:
        state = state[1]
    spec = _of(state.get("_spec"), _SPECS) if type(state) is dict else None
    if type(state) is not dict or spec is None or len(args) != 8:
        raise UnreadableError("a DTensor without its spec.")
    local = state.get("_local_tensor")
    if isinstance(local, Opaque) and local.is_tensor:
        return local
    dtype = dtype_name(args[1])
    if type(local) is not StoredTensor or dtype is None:
        raise UnreadableError(f"a DTensor whose local part is {shown(local)}.")
    shape = as_counts(args[2], "the shape of a DTensor")
    says = spec.fields
    if dtype != local.dtype or _meta_shape(says.get("tensor_meta")) not in {None, shape}:
        raise UnreadableError(
            f"a DTensor of shape {list(shape)} whose spec or local tensor says something else."
        )
    mesh = _mesh(says.get("mesh"))
    return StoredDTensor(
        local,
        shape=shape,
        strides=as_counts(args[3], "the strides of a DTensor"),
        dtype=dtype,
        mesh=mesh,
        placements=_placements(says.get("placements"), mesh),
        shard_order=_shard_order(says.get("shard_order")),
        requires_grad=args[7] is True,
    )


def _meta_shape(value: object) -> tuple[int, ...] | None:
    """The global shape that the spec states, None when it states none."""
    meta = _of(value, _METAS)
    if meta is None:
        return None
    shape = meta.args[0] if meta.args else meta.fields.get("shape")
    return None if shape is None else as_counts(shape, "the shape in a DTensor's spec")


def _placements(value: object, mesh: StoredMesh) -> tuple[StoredPlacement, ...]:
    """One placement for each dimension of the mesh."""
    if not isinstance(value, tuple | list) or len(value) != len(mesh.shape):
        raise UnreadableError(f"a mesh of {len(mesh.shape)} dimensions, placements {shown(value)}.")
    return tuple(_placement(item) for item in value)


def _placement(value: object) -> StoredPlacement:
    """What a pickled placement says."""
    if _of(value, _REPLICATES):
        return StoredPlacement("R")
    if partial := _of(value, _PARTIALS):
        op = partial.fields.get("reduce_op")
        return StoredPlacement("P", op=op if is_word(op) else shown(op))
    shard = _of(value, _ANY_SHARDS)
    if shard is None:
        raise UnsupportedError(f"a placement of kind {shown(value)}.")
    dim = as_count(shard.fields.get("dim"), "the dimension of a Shard")
    if shard.cls.name in _SHARDS:
        return StoredPlacement("S", dim)
    factor = as_count(shard.fields.get("split_factor"), "the split factor of a strided Shard")
    return StoredPlacement("SS", dim, factor)


def _shard_order(value: object) -> tuple[tuple[int, tuple[int, ...]], ...] | None:
    """The mesh dimensions that cut each tensor dimension, in order, or None."""
    if not isinstance(value, tuple) or len(value) > 64:
        return None
    order = []
    for item in value:
        entry = _of(item, _ORDERS)
        if entry is None or len(entry.args) != 2:
            raise UnreadableError(f"a shard order of {shown(item)}.")
        tensor_dim, mesh_dims = entry.args
        order.append((as_count(tensor_dim, "a dimension"), as_counts(mesh_dims, "a shard order")))
    return tuple(order)


def _mesh(value: object) -> StoredMesh:
    """The mesh that a pickled DeviceMesh states, whichever torch wrote it; it is read once."""
    mesh = _of(value, _MESHES)
    if mesh is None:
        raise UnreadableError(f"a DTensor whose mesh is {shown(value)}.")
    if not isinstance(mesh.state, StoredMesh):
        mesh.state = _read_mesh(mesh.fields)
    return mesh.state


def _read_mesh(state: dict[object, object]) -> StoredMesh:
    layout = _of(state.get("_layout"), _LAYOUTS)
    grid = state.get("mesh")
    attributes: list[object] = [*state]
    if layout is not None:
        attributes += layout.fields
        shape, strides = _layout_grid(layout.fields)
        rank_map = state.get("_flatten_rank_map")
    elif isinstance(grid, StoredTensor):
        shape = grid.shape
        strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
        rank_map = state.get("_flatten_mesh_list")
    else:
        raise UnreadableError("a mesh without its shape.")
    coordinate = state.get("_coordinate_on_dim")
    rank = state.get("_rank")
    device = state.get("_device_type", state.get("device_type"))
    return StoredMesh(
        shape,
        dim_names=_dim_names(state.get("_mesh_dim_names", state.get("mesh_dim_names")), shape),
        coordinate=None if coordinate is None else _coordinate(coordinate, shape),
        rank=rank if type(rank) is int else None,
        device_type=device if is_word(device) else "cpu",
        rank_map=rank_map if isinstance(rank_map, tuple) else None,
        strides=strides,
        attributes=frozenset(one for one in attributes if is_word(one)),
    )


def _layout_grid(layout: dict[object, object]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Sizes and strides of the mesh dimensions.

    torch 2.13 keeps one flat layout per dimension; from 2.10 to then one layout had them all, with
    a nested tuple where a dimension was flattened from several.
    """
    axes = layout.get("axes")
    if axes is None:
        pairs = [(layout.get("shape"), layout.get("stride"))]
        if all(isinstance(part, tuple) for part in pairs[0]):
            pairs = list(zip(*map(_items, pairs[0]), strict=True))
    else:
        flats = [axis.fields for axis in (_of(one, _LAYOUTS) for one in _items(axes)) if axis]
        pairs = [(flat.get("shape"), flat.get("stride")) for flat in flats]
    shape = tuple(prod(as_counts(size, "the shape of a mesh")) for size, _ in pairs)
    steps = [as_counts(stride, "the strides of a mesh") for _, stride in pairs]
    single = all(len(step) == 1 for step in steps)
    return shape, tuple(step[0] for step in steps) if single else None


def _items(value: object) -> tuple[object, ...]:
    if not isinstance(value, tuple) or len(value) > 64:
        raise UnreadableError(f"a mesh layout of {shown(value)}.")
    return value


def _coordinate(value: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    coordinate = as_counts(value, "the coordinate of a rank")
    inside = all(index < size for index, size in zip(coordinate, shape, strict=False))
    if len(coordinate) != len(shape) or not inside:
        raise UnreadableError(f"a rank at {coordinate} of a mesh of shape {shape}.")
    return coordinate


def _dim_names(value: object, shape: tuple[int, ...]) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = value if isinstance(value, tuple | list) and len(value) == len(shape) else ()
    words = tuple(filter(is_word, names))
    if len(words) != len(shape):
        raise UnreadableError(f"a mesh of shape {shape} with names {shown(value)}.")
    return words
