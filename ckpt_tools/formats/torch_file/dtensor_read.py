"""What a pickled DTensor means: its layout on its mesh, and the box that its rank holds.

It knows records of DTensors and our own layouts, neither files nor names.
"""

from __future__ import annotations

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.layout import (
    Layout,
    Mesh,
    Placement,
    Replicate,
    Shard,
    strided_order,
)
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.torch_stubs import (
    StoredDTensor,
    StoredMesh,
    StoredPlacement,
)


def layout_of(stored: StoredDTensor) -> Layout:
    """The layout that a DTensor states.

    Raises UnsupportedError for partial sums, and for strided shards that no order of cuts gives.
    """
    mesh = mesh_of(stored.mesh)
    placements = tuple(map(_placement, stored.placements))
    cut = [p.dim if isinstance(p, Shard) else None for p in placements]
    factors = [p.split_factor or 1 for p in stored.placements]
    order = strided_order(mesh.shape, cut, factors)
    if not any(p.kind == "SS" for p in stored.placements) and stored.shard_order:
        order = _stated_order(stored.shard_order, ndim=len(placements))
    return Layout(mesh, placements, order)


def mesh_of(stored: StoredMesh) -> Mesh:
    """The mesh without what only its ranks know. Raises UnreadableError for an empty one."""
    if 0 in stored.shape:
        raise UnreadableError(f"A mesh of shape {list(stored.shape)} has no rank.")
    return Mesh(stored.shape, stored.dim_names)


def held_box(stored: StoredDTensor, layout: Layout) -> Box:
    """The elements of the whole tensor that the local tensor holds.

    Raises UnsupportedError when the rank is not on the mesh, or when the local tensor does not have
    the shape that the layout gives it.
    """
    if stored.mesh.coordinate is None:
        raise UnsupportedError("the rank that saved it is not on the tensor's mesh")
    box = layout.box(stored.shape, stored.mesh.coordinate)
    local = stored.local.shape
    empty = 0 in local and 0 in box.sizes
    if local != box.sizes and not empty:
        raise UnsupportedError(
            f"its local tensor is {list(local)}, but ({layout}) of {list(stored.shape)} on mesh "
            f"{layout.mesh} gives {list(box.sizes)} at {list(stored.mesh.coordinate)}"
        )
    return box


def _placement(stored: StoredPlacement) -> Placement:
    if stored.kind == "R":
        return Replicate()
    if stored.kind == "P" or stored.dim is None:
        raise UnsupportedError(
            f"it is Partial({stored.op}): each rank holds a summand, and none of them the values",
            hint="Redistribute it to Replicate or Shard in the job before saving.",
        )
    return Shard(stored.dim)


def _stated_order(
    shard_order: tuple[tuple[int, tuple[int, ...]], ...], *, ndim: int
) -> tuple[int, ...]:
    """The mesh dimensions from the first cut to the last; left to right when nothing else is said.

    Only the order among mesh dimensions that cut the same tensor dimension means anything.
    """
    cuts = [mesh_dim for _, mesh_dims in shard_order for mesh_dim in mesh_dims]
    if len(set(cuts)) != len(cuts) or any(mesh_dim >= ndim for mesh_dim in cuts):
        raise UnsupportedError(f"its shard order {shard_order} does not fit {ndim} mesh dimensions")
    if all(list(mesh_dims) == sorted(mesh_dims) for _, mesh_dims in shard_order):
        return tuple(range(ndim))
    return (*cuts, *(mesh_dim for mesh_dim in range(ndim) if mesh_dim not in cuts))
