"""Layouts: the box of every rank is the one that torch's own DTensor gives it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.core.layout import (
    Layout,
    Mesh,
    Placement,
    Replicate,
    Shard,
    split,
    strided_order,
)
from ckpt_tools.errors import UnsupportedError, UsageError


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    """A shape of 1 to 3 dimensions, and a layout on a mesh of 1 to 3."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = Mesh(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))
    one = st.sampled_from([Replicate(), *(Shard(dim) for dim in range(len(shape)))])
    placements: list[Placement] = [draw(one) for _ in mesh.shape]
    return shape, Layout(mesh, tuple(placements))


@st.composite
def reordered(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout]:
    """A shape that every cut divides, and a layout that cuts in any order."""
    _, layout = draw(cases())
    parts = math.prod(layout.mesh.shape)
    ndim = 1 + max((one.dim for one in layout.placements if isinstance(one, Shard)), default=0)
    shape = tuple(parts * draw(st.integers(1, 3)) for _ in range(ndim))
    order = tuple(draw(st.permutations(range(len(layout.placements)))))
    return shape, Layout(layout.mesh, layout.placements, order)


def factor(layout: Layout, mesh_dim: int) -> int:
    """Torch's split factor: the pieces that mesh dimensions to the right have cut before."""
    earlier = layout.order[: layout.order.index(mesh_dim)]
    same = [dim for dim in earlier if dim > mesh_dim]
    here = layout.placements[mesh_dim]
    return math.prod(layout.mesh.shape[dim] for dim in same if layout.placements[dim] == here)


def boxes_by_torch(shape: tuple[int, ...], layout: Layout) -> list[Box]:
    import torch.distributed.tensor as dt
    from dtensor_files import mesh_of
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[dt.Placement] = []
    for mesh_dim, one in enumerate(layout.placements):
        if isinstance(one, Replicate):
            placements.append(dt.Replicate())
        elif factor(layout, mesh_dim) == 1:
            placements.append(dt.Shard(one.dim))
        else:
            placements.append(_StridedShard(one.dim, split_factor=factor(layout, mesh_dim)))
    found = []
    for rank in range(layout.mesh.size):
        mesh = mesh_of(layout.mesh.shape, rank)
        sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        found.append(Box(tuple(map(int, offsets)), tuple(map(int, sizes))))
    return found


@settings(max_examples=60)
@given(cases())
def test_the_box_of_each_rank_is_torchs(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    ours, theirs = layout.boxes(shape), boxes_by_torch(shape, layout)
    assert [box.sizes for box in ours] == [box.sizes for box in theirs]
    full = [place for place, box in enumerate(ours) if box.numel]
    assert [ours[place] for place in full] == [theirs[place] for place in full]


@pytest.mark.skipif(
    torch.__version__.startswith("2.6."),
    reason="torch 2.6 has strided shards over two mesh dimensions only",
)
@settings(max_examples=60)
@given(reordered())
def test_the_box_of_each_rank_is_torchs_when_another_dimension_cuts_first(
    case: tuple[tuple[int, ...], Layout],
) -> None:
    shape, layout = case
    assert layout.boxes(shape) == boxes_by_torch(shape, layout)


@given(reordered())
def test_the_order_is_known_from_torchs_split_factors(
    case: tuple[tuple[int, ...], Layout],
) -> None:
    shape, layout = case
    dims = [one.dim if isinstance(one, Shard) else None for one in layout.placements]
    factors = [factor(layout, mesh_dim) for mesh_dim in range(len(dims))]
    order = strided_order(layout.mesh.shape, dims, factors)
    assert Layout(layout.mesh, layout.placements, order).boxes(shape) == layout.boxes(shape)


@given(cases())
def test_the_boxes_of_all_ranks_cover_the_tensor(case: tuple[tuple[int, ...], Layout]) -> None:
    shape, layout = case
    chunks = tuple(Chunk(box, ByteRange("f", 0, 0)) for box in layout.boxes(shape))
    assert not list(uncovered([TensorEntry("t", (), "model", BY_NAME["uint8"], shape, chunks)]))


@given(st.integers(0, 100), st.integers(1, 20))
def test_a_split_is_torchs_chunk(size: int, parts: int) -> None:
    import torch

    sizes = [split(size, parts, index)[1] for index in range(parts)]
    assert [n for n in sizes if n] == [len(x) for x in torch.arange(size).chunk(parts) if len(x)]


def test_an_impossible_split_factor_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="split factor 3"):
        strided_order((2, 2), (0, 0), (3, 1))


def test_a_placement_of_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"Shard\(1\) of a tensor of shape \(4,\)"):
        Layout(Mesh((2,)), (Shard(1),)).box((4,), (0,))


@pytest.mark.parametrize("order", [(0,), (0, 0), (0, 2)])
def test_an_order_that_is_no_permutation_is_refused(order: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="does not name each mesh dimension once"):
        Layout(Mesh((2, 2)), (Shard(0), Shard(0)), order)


def test_a_mesh_prints_as_it_is_asked_for() -> None:
    assert str(Mesh((2, 4))) == "2x4"
    assert str(Mesh((2, 4), ("dp_replicate", "dp_shard"))) == "dp_replicate=2,dp_shard=4"
