"""What a pickle says of a DTensor: mesh, placements and local tensor, as each torch has them.

A pickled DeviceMesh is the inside of a class that torch changes: up to 2.9 an int tensor of ranks,
then a layout with one shape and one stride, from 2.13 on a layout of axes. Each torch reads its own
only, so a pickle is made for one. What 2.5 to 2.9 and 2.10 to 2.12 read is taken from files that
2.9.1 and 2.11 wrote.

The nodes are for `pickle.dump`; files are not known here.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType, dtype_named
from ckpt_tools.core.geometry import row_major_strides
from ckpt_tools.core.layout import Layout, Mesh, Replicate
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.pickle.dump import (
    Blank,
    Call,
    Global,
    Instance,
    Node,
    tensor_node,
)

_PLACEMENTS = "torch.distributed.tensor.placement_types"
_SPEC = "torch.distributed.tensor._dtensor_spec"
_LAYOUT = "torch.distributed._mesh_layout"

_REBUILD_TYPE = Global("torch._tensor", "_rebuild_from_type_v2")
_REBUILD_WRAPPER = Global("torch._utils", "_rebuild_wrapper_subclass")
_DTENSOR = Global("torch.distributed.tensor", "DTensor")
_DEVICE_MESH = Global("torch.distributed.device_mesh", "DeviceMesh")
_STRIDED = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_INT32 = dtype_named("int32")

TorchVersion = tuple[int, int]
NEWEST: TorchVersion = (2, 13)
_OLDEST: TorchVersion = (2, 5)  # the first that has DTensor under its public name
_FIRST_LAYOUT: TorchVersion = (2, 10)
_FIRST_AXES: TorchVersion = (2, 13)


def parse_version(text: str) -> TorchVersion:
    """The two numbers that a torch version starts with: ``2.11.0+cu130`` gives (2, 11).

    Raises UsageError for a text that does not start so.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise UsageError(f"{text!r} is not a version of torch, which looks like 2.13.")
    return int(match[1]), int(match[2])


def check_version(version: TorchVersion) -> None:
    """Raises UsageError for a torch whose DTensors cannot be written."""
    if version < _OLDEST:
        text = ".".join(map(str, version))
        raise UsageError(f"Rank files can be written for torch 2.5 and newer, not for {text}.")


class RankMesh(NamedTuple):
    """A DeviceMesh as one process of one version of torch has it."""

    node: Instance
    device_type: str
    torch_version: TorchVersion


class MeshPlace(NamedTuple):
    """Where a process is on its mesh, as blanks of a pickle: all ranks share the rest of it."""

    rank: Blank
    coordinate: tuple[Blank, ...]


def mesh_ranks(mesh: Mesh) -> bytes:
    """What the storage of a pickled mesh holds: its ranks, as 32-bit integers."""
    return struct.pack(f"<{mesh.size}i", *range(mesh.size))


def rank_mesh(
    mesh: Mesh, place: MeshPlace, *, device_type: str, key: int, torch_version: TorchVersion
) -> RankMesh:
    """The DeviceMesh as one process has it; ``key`` is that of its storage of ranks."""
    ranks = tuple(range(mesh.size))
    state: dict[str, Node]
    if torch_version < _FIRST_LAYOUT:
        state = {
            "device_type": device_type,
            "mesh": tensor_node(_INT32, mesh.shape, key=key),
            "mesh_dim_names": mesh.dim_names,
            "_flatten_mesh_list": ranks,
            "_thread_id": None,
            **_groups(mesh),
            "_coordinate_on_dim": list(place.coordinate),
            "_hash": None,
        }
    else:
        state = {
            "_device_type": device_type,
            "_layout": _layout_node(mesh, torch_version),
            "_rank_map": tensor_node(_INT32, (mesh.size,), key=key),
            "_mesh_dim_names": mesh.dim_names,
            "_root_mesh": None,
            "_flatten_rank_map": ranks,
            "_thread_id": None,
            "_flatten_mapping": {},
            **_groups(mesh),
            "_rank": place.rank,
            "_coordinate_on_dim": place.coordinate,
            "_hash": None,
        }
    return RankMesh(Instance(_DEVICE_MESH, state=state), device_type, torch_version)


def _groups(mesh: Mesh) -> dict[str, Node]:
    """The process groups of the mesh's dimensions, as far as their names can be known.

    A 1-D mesh uses the group of the whole world, "0"; of others a job makes up the names.
    """
    return {"_dim_group_names": ["0"]} if len(mesh.shape) == 1 else {}


def _layout_node(mesh: Mesh, torch_version: TorchVersion) -> Instance:
    """Sizes and strides of the mesh's dimensions, in the form of this torch."""
    cls = Global(_LAYOUT, "_MeshLayout")
    strides = row_major_strides(mesh.shape)
    if torch_version < _FIRST_AXES:
        return Instance(cls, state={"shape": (*mesh.shape,), "stride": strides})
    axes = tuple(
        Instance(
            Global(_LAYOUT, "_FlatLayout"),
            # torch leaves dimensions of size 1 out of a layout.
            state={"shape": (size,), "stride": (stride,)}
            if size > 1
            else {"shape": (), "stride": ()},
        )
        for size, stride in zip(mesh.shape, strides, strict=True)
    )
    return Instance(cls, state={"axes": axes})


def dtensor_node(
    dtype: DType, shape: tuple[int, ...], *, local: Call, layout: Layout, mesh: RankMesh
) -> Call:
    """A DTensor of this type and global shape, whose shard is ``local``."""
    kind = Global("torch", dtype.name)
    strides = row_major_strides([max(1, size) for size in shape])
    device = Call(Global("torch", "device"), (mesh.device_type,))
    wrapper = (_DTENSOR, kind, (*shape,), (*strides,), 0, _STRIDED, device, False)
    size = Call(Global("torch", "Size"), ((*shape,),))
    state: dict[str, Node] = {
        "mesh": mesh.node,
        "placements": tuple(_placement_node(layout, dim) for dim in range(len(layout.placements))),
        "tensor_meta": Instance(Global(_SPEC, "TensorMeta"), (size, (*strides,), kind)),
    }
    if mesh.torch_version >= _FIRST_LAYOUT:
        strided = any(
            layout.split_factor(mesh_dim) > 1
            for mesh_dim, placement in enumerate(layout.placements)
            if not isinstance(placement, Replicate)
        )
        state["shard_order"] = None if strided else _order_node(layout)
        state["use_strided_shard_as_shard_order"] = strided
    state["_hash"] = None
    spec = Instance(Global(_SPEC, "DTensorSpec"), state=state)
    inner: dict[str, Node] = {"_local_tensor": local, "_spec": spec}
    return Call(_REBUILD_TYPE, (_REBUILD_WRAPPER, _DTENSOR, wrapper, (None, inner)))


def _placement_node(layout: Layout, mesh_dim: int) -> Instance:
    placement = layout.placements[mesh_dim]
    if isinstance(placement, Replicate):
        return Instance(Global(_PLACEMENTS, "Replicate"), state={})
    factor = layout.split_factor(mesh_dim)
    if factor == 1:
        return Instance(Global(_PLACEMENTS, "Shard"), state={"dim": placement.dim})
    state: dict[str, Node] = {"dim": placement.dim, "split_factor": factor}
    return Instance(Global(_PLACEMENTS, "_StridedShard"), state=state)


def _order_node(layout: Layout) -> tuple[Node, ...]:
    """Which mesh dimensions cut each tensor dimension, from left to right."""
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(layout.placements):
        if not isinstance(placement, Replicate):
            cuts.setdefault(placement.dim, []).append(mesh_dim)
    return tuple(
        Instance(Global(_SPEC, "ShardOrderEntry"), (dim, tuple(cuts[dim]))) for dim in sorted(cuts)
    )
