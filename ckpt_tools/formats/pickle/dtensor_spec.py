"""What a pickled DTensor says of itself: its spec, its placements, and the mesh of its ranks.

Each torch has its own attributes for them; here they become the records of `stored`.
"""

from __future__ import annotations

from math import prod

from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.limits import MAX_NDIM, is_word
from ckpt_tools.formats.pickle.nodes import Instance, Opaque, shown
from ckpt_tools.formats.pickle.stored import (
    StoredDTensor,
    StoredMesh,
    StoredPlacement,
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
# The classes that are asked for here.
SPEC_CLASSES = frozenset().union(
    *(_ANY_SHARDS, _REPLICATES, _PARTIALS, _SPECS, _ORDERS, _METAS, _MESHES, _LAYOUTS)
)


def _of(value: object, names: frozenset[str]) -> Instance | None:
    """The value when it is an object of a class of one of these names."""
    return value if isinstance(value, Instance) and value.cls.name in names else None


def dtensor_of(args: tuple[object, ...], state: object) -> StoredDTensor | Opaque:
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
    if type(local) is not StoredTensor:
        raise UnreadableError(f"a DTensor whose local part is {shown(local)}.")
    if dtype is None:
        raise UnreadableError(f"a DTensor whose element type is {shown(args[1])}.")
    shape = as_counts(args[2], "the shape of a DTensor")
    says = spec.fields
    stated = None
    if meta := _of(says.get("tensor_meta"), _METAS):
        stated = meta.args[0] if meta.args else meta.fields.get("shape")
    if stated is not None:
        stated = as_counts(stated, "the shape in a DTensor's spec")
    if dtype != local.dtype or stated not in (None, shape):
        raise UnreadableError(
            f"a DTensor of shape {list(shape)} whose spec or local tensor says something else."
        )
    mesh, placements = _mesh(says.get("mesh")), says.get("placements")
    if not isinstance(placements, tuple | list) or len(placements) != len(mesh.shape):
        raise UnreadableError(
            f"a mesh of {len(mesh.shape)} dimensions, placements {shown(placements)}."
        )
    placed = tuple(map(_placement, placements))
    return StoredDTensor(local, shape, dtype, mesh, placed, _shard_order(says.get("shard_order")))


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
    if not isinstance(value, tuple) or len(value) > MAX_NDIM:
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
    grid, names = state.get("mesh"), state.get("_mesh_dim_names", state.get("mesh_dim_names"))
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
    rank, coordinate = state.get("_rank"), None
    if state.get("_coordinate_on_dim") is not None:
        coordinate = as_counts(state["_coordinate_on_dim"], "the coordinate of a rank")
        inside = all(index < size for index, size in zip(coordinate, shape, strict=False))
        if len(coordinate) != len(shape) or not inside:
            raise UnreadableError(f"a rank at {coordinate} of a mesh of shape {shape}.")
    dim_names = None
    if names is not None:
        listed = names if isinstance(names, tuple | list) else ()
        dim_names = tuple(filter(is_word, listed))
        if not len(dim_names) == len(listed) == len(shape):
            raise UnreadableError(f"a mesh of shape {shape} with names {shown(names)}.")
    return StoredMesh(
        shape,
        dim_names=dim_names,
        coordinate=coordinate,
        rank=rank if type(rank) is int else None,
        rank_map=rank_map if isinstance(rank_map, tuple) else None,
        strides=strides,
        attributes=frozenset(filter(is_word, attributes)),
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
    if not isinstance(value, tuple) or len(value) > MAX_NDIM:
        raise UnreadableError(f"a mesh layout of {shown(value)}.")
    return value
