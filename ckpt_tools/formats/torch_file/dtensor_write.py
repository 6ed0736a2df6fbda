"""What a pickle says of a DTensor: mesh, placements and local tensor, as each torch has them.

Each torch reads its own DeviceMesh only, so a pickle is made for one of `generations`. The nodes
are for `pickle.dump`; files are not known here.
"""

from __future__ import annotations

import struct

from ckpt_tools.core.dtypes import DType, dtype_named
from ckpt_tools.core.geometry import row_major_strides
from ckpt_tools.core.layout import Layout, Mesh, Replicate
from ckpt_tools.formats.pickle.dump import Blank, tensor_node
from ckpt_tools.formats.pickle.nodes import Global, Instance, call
from ckpt_tools.formats.torch_file.generations import Generation

_PLACEMENTS = "torch.distributed.tensor.placement_types"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_LAYOUT = "torch.distributed._mesh_layout"

_REBUILD_TYPE = Global("torch._tensor._rebuild_from_type_v2")
_REBUILD_WRAPPER = Global("torch._utils._rebuild_wrapper_subclass")
_DTENSOR = Global("torch.distributed.tensor.DTensor")
_DEVICE_MESH = Global("torch.distributed.device_mesh.DeviceMesh")
_STRIDED = call(Global("torch.serialization._get_layout"), "torch.strided")
_INT32 = dtype_named("int32")


def mesh_ranks(mesh: Mesh) -> bytes:
    """What the storage of a pickled mesh holds: its ranks, as 32-bit integers."""
    return struct.pack(f"<{mesh.size}i", *range(mesh.size))


def rank_mesh(
    mesh: Mesh,
    *,
    rank: Blank,
    coordinate: tuple[Blank, ...],
    device_type: str,
    key: int,
    generation: Generation,
) -> Instance:
    """The DeviceMesh as one process has it, whose place is blanks of a pickle: all ranks share the
    rest of it. ``key`` is that of its storage of ranks.
    """
    ranks = tuple(range(mesh.size))
    # It is a tuple since torch keeps the rank as well.
    place = coordinate if "_rank" in generation.mesh else [*coordinate]
    values: dict[str, object] = {
        "device_type": device_type,
        "_device_type": device_type,
        "mesh": tensor_node(_INT32, mesh.shape, key=key),
        "_layout": _layout_node(mesh, generation),
        "_rank_map": tensor_node(_INT32, (mesh.size,), key=key),
        "mesh_dim_names": mesh.dim_names,
        "_mesh_dim_names": mesh.dim_names,
        "_root_mesh": None,
        "_preserve_rank_order": False,
        "_flatten_mesh_list": ranks,
        "_flatten_rank_map": ranks,
        "_thread_id": None,
        "_flatten_mapping": {},
        "_rank": rank,
        "_coordinate_on_dim": place,
        "_hash": None,
    }
    if len(mesh.shape) == 1:  # the group of the whole world; of other meshes a job makes up names
        values["_dim_group_infos"] = [("ptd:0", [*ranks], "0")]
        values["_dim_group_names"] = ["0"]
    state = {name: values[name] for name in generation.mesh if name in values}
    return Instance(_DEVICE_MESH, state=state)


def _layout_node(mesh: Mesh, generation: Generation) -> Instance:
    """Sizes and strides of the mesh's dimensions, in the form of this torch."""
    cls = Global(f"{_LAYOUT}._MeshLayout")
    strides = row_major_strides(mesh.shape)
    if "axes" not in generation.layout:
        return Instance(cls, state={"shape": (*mesh.shape,), "stride": strides})
    axes = []
    for size, stride in zip(mesh.shape, strides, strict=True):
        # torch leaves dimensions of size 1 out of a layout.
        state = {"shape": (size,), "stride": (stride,)} if size > 1 else {"shape": (), "stride": ()}
        axes.append(Instance(Global(f"{_LAYOUT}._FlatLayout"), state=state))
    return Instance(cls, state={"axes": tuple(axes)})


def dtensor_node(
    dtype: DType,
    shape: tuple[int, ...],
    *,
    local: Instance,
    layout: Layout,
    mesh: Instance,
    device_type: str,
    generation: Generation,
) -> Instance:
    """A DTensor of this type and global shape, whose shard is ``local``, on the mesh of a rank."""
    kind = Global(f"torch.{dtype.name}")
    strides = row_major_strides([max(1, size) for size in shape])
    device = call(Global("torch.device"), device_type)
    wrapper = (_DTENSOR, kind, (*shape,), (*strides,), 0, _STRIDED, device, False)
    size = call(Global("torch.Size"), (*shape,))
    placements = enumerate(layout.placements)
    cut = {mesh_dim: p.dim for mesh_dim, p in placements if not isinstance(p, Replicate)}
    strided = any(layout.split_factor(mesh_dim) > 1 for mesh_dim in cut)
    # Which mesh dimensions cut each tensor dimension, from the first cut to the last.
    orders: dict[int, list[int]] = {}
    for mesh_dim in sorted(cut, key=layout.order.index):
        orders.setdefault(cut[mesh_dim], []).append(mesh_dim)
    entry = Global(f"{_SPEC}.ShardOrderEntry")
    order = tuple(Instance(entry, (dim, tuple(orders[dim]))) for dim in sorted(orders))
    says_strided = strided and "use_strided_shard_as_shard_order" in generation.spec
    values: dict[str, object] = {
        "mesh": mesh,
        "placements": tuple(_placement_node(layout, dim) for dim in range(len(layout.placements))),
        "tensor_meta": Instance(Global(f"{_SPEC}.TensorMeta"), (size, (*strides,), kind)),
        "shard_order": None if says_strided else order,
        "use_strided_shard_as_shard_order": strided,
        "_hash": None,
    }
    state = {name: values[name] for name in generation.spec}
    spec = Instance(Global(f"{_SPEC}.DTensorSpec"), state=state)
    inner: dict[str, object] = {"_local_tensor": local, "_spec": spec}
    return call(_REBUILD_TYPE, _REBUILD_WRAPPER, _DTENSOR, wrapper, (None, inner))


def _placement_node(layout: Layout, mesh_dim: int) -> Instance:
    placement = layout.placements[mesh_dim]
    if isinstance(placement, Replicate):
        return Instance(Global(f"{_PLACEMENTS}.Replicate"), state={})
    factor = layout.split_factor(mesh_dim)
    if factor == 1:
        return Instance(Global(f"{_PLACEMENTS}.Shard"), state={"dim": placement.dim})
    state: dict[str, object] = {"dim": placement.dim, "split_factor": factor}
    return Instance(Global(f"{_PLACEMENTS}._StridedShard"), state=state)
