"""What a pickled DTensor means: its layout on its mesh, and the box that its rank holds; and the
boxes of a CheckpointableTensor.

It knows their records and our own layouts, neither files nor names.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from operator import mul
from typing import TypeAlias

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.layout import Layout, Mesh, Placement, Replicate, Shard, strided_order
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.stored import (
    StoredDTensor,
    StoredMesh,
    StoredPieces,
    StoredPlacement,
    StoredTensor,
    as_counts,
)

_ShardOrder: TypeAlias = "tuple[tuple[int, tuple[int, ...]], ...]"


def layout_of(stored: StoredDTensor) -> Layout:
    """The layout that a DTensor states.

    Raises UnsupportedError for partial sums, and for strided shards that no order of cuts gives.
    """
    return _layout(mesh_of(stored.mesh), stored.placements, stored.shard_order)


@lru_cache  # tensors that lie alike share it
def _layout(
    mesh: Mesh, stated: tuple[StoredPlacement, ...], shard_order: _ShardOrder | None
) -> Layout:
    placements: list[Placement] = []
    for one in stated:
        if one.kind == "R":
            placements.append(Replicate())
        elif one.kind == "P" or one.dim is None:
            raise UnsupportedError(
                f"it is Partial({one.op}): each rank holds a summand, and none of them the values",
                hint="Redistribute it to Replicate or Shard in the job before saving.",
            )
        else:
            placements.append(Shard(one.dim))
    cut = [p.dim if isinstance(p, Shard) else None for p in placements]
    order = strided_order(mesh.shape, cut, [p.split_factor or 1 for p in stated])
    if not any(p.kind == "SS" for p in stated) and shard_order:
        order = _stated_order(shard_order, ndim=len(placements))
    return Layout(mesh, tuple(placements), order)


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
    box = _box(layout, stored.shape, stored.mesh.coordinate)
    local = stored.local.shape
    empty = 0 in local and 0 in box.sizes
    if local != box.sizes and not empty:
        raise UnsupportedError(
            f"its local tensor is {list(local)}, but ({layout}) of {list(stored.shape)} on mesh "
            f"{layout.mesh} gives {list(box.sizes)} at {list(stored.mesh.coordinate)}"
        )
    return box


@lru_cache(maxsize=4096)
def _box(layout: Layout, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Box:
    return layout.box(shape, coordinate)


def pieces_of(stored: StoredPieces) -> list[tuple[Box, StoredTensor]]:
    """The box of each piece, and the view of the local tensor that it is; an empty one for none.

    Of a local (7, 4) that begins with two rows of padding, ``global_offsets=((8, 0),)``,
    ``local_offsets=((2, 0),)`` and ``local_sizes=((5, 4),)`` give rows 8 to 13, from element 8 on.

    Raises UnsupportedError for a piece that is not inside of both.
    """
    local, whole = stored.local, Box.whole(stored.shape)
    rows = [stored.global_offsets, stored.local_offsets, stored.sizes]
    starts, begins, sizes = ([as_counts(one, "a piece of a tensor") for one in row] for row in rows)
    if not len(starts) == len(begins) == len(sizes):
        raise UnsupportedError(f"its pieces have {len(starts)} offsets and {len(sizes)} sizes")
    held = []
    for start, begin, size in zip(starts, begins, sizes, strict=True):
        box, view = Box(start, size), Box(begin, size)
        alike = len(start) == len(begin) == len(size) == len(local.shape) == len(stored.shape)
        if not (alike and whole.contains(box) and Box.whole(local.shape).contains(view)):
            raise UnsupportedError(
                f"its piece of {list(size)} at {list(start)} of {list(stored.shape)} is not inside "
                f"of that, or of its local tensor {list(local.shape)} at {list(begin)}"
            )
        first = sum(map(mul, begin, local.strides))
        offset = local.storage_offset + first
        held.append((box, replace(local, storage_offset=offset, shape=size)))
    nothing = (0,) * len(stored.shape)
    return held or [(Box(nothing, nothing), replace(local, shape=nothing))]


def _stated_order(shard_order: _ShardOrder, *, ndim: int) -> tuple[int, ...]:
    """The mesh dimensions from the first cut to the last; left to right when nothing else is said.

    Only the order among mesh dimensions that cut the same tensor dimension means anything.
    """
    cuts = [mesh_dim for _, mesh_dims in shard_order for mesh_dim in mesh_dims]
    if len(set(cuts)) != len(cuts) or any(mesh_dim >= ndim for mesh_dim in cuts):
        raise UnsupportedError(f"its shard order {shard_order} does not fit {ndim} mesh dimensions")
    if all(list(mesh_dims) == sorted(mesh_dims) for _, mesh_dims in shard_order):
        return tuple(range(ndim))
    return (*cuts, *(mesh_dim for mesh_dim in range(ndim) if mesh_dim not in cuts))
