"""Plans: the chunks found for a box are those that hold it, and few are tried."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box, BoxFinder
from ckpt_tools.core.index import ByteRange, Chunk, ObjectEntry, TensorEntry
from ckpt_tools.core.plan import Finder, object_entry_as_tensor
from ckpt_tools.errors import IncompleteError


def entry_of(shape: Sequence[int], boxes: Sequence[Box]) -> TensorEntry:
    chunks = tuple(
        Chunk(box, ByteRange(f"file-{rank}", 0, 4 * box.numel)) for rank, box in enumerate(boxes)
    )
    return TensorEntry("t", ("t",), "model", BY_NAME["float32"], tuple(shape), chunks)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that tile it, cut anywhere along each dimension, in any order."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
    spans = [list(pairwise(some)) or [(0, 0)] for some in edges]
    boxes = [
        Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in product(*spans)
    ]
    return shape, draw(st.permutations(boxes))


@st.composite
def wanted(draw: st.DrawFn) -> tuple[TensorEntry, Box]:
    """A tensor in chunks, and a box of it."""
    shape, boxes = draw(grids())
    starts = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - a)) for a, size in zip(starts, shape, strict=True)]
    return entry_of(shape, boxes), Box(tuple(starts), tuple(sizes))


def cells(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.offsets, box.ends, strict=True))))


@given(wanted())
def test_reads_hold_every_element_of_the_box_once(case: tuple[TensorEntry, Box]) -> None:
    entry, box = case
    found = [cell for read in Finder(entry).reads(box) for cell in cells(read.box)]
    assert sorted(found) == sorted(cells(box))


@given(wanted())
def test_every_read_lies_in_its_chunk(case: tuple[TensorEntry, Box]) -> None:
    entry, box = case
    assert all(read.chunk.box.contains(read.box) for read in Finder(entry).reads(box))


def test_a_replica_is_read_once() -> None:
    halves = [Box((0,), (2,)), Box((2,), (2,))]
    reads = Finder(entry_of((4,), halves + halves)).reads(Box.whole((4,)))
    assert [read.chunk.data.path for read in reads] == ["file-0", "file-1"]


def test_a_hole_is_refused_with_the_name_and_the_numbers() -> None:
    entry = entry_of((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 2))])
    finder = Finder(entry)
    assert finder.reads(Box((0, 0), (4, 2)))
    with pytest.raises(
        IncompleteError, match=r"t: chunks hold 12 of the 16 elements of \[0:4, 0:4\]"
    ):
        finder.reads(Box.whole((4, 4)))


def test_few_chunks_are_tried_for_a_small_box() -> None:
    rows = [Box((2 * n, 0), (2, 7)) for n in range(5000)]
    assert len(list(BoxFinder(rows).near(Box((4000, 0), (1, 7))))) <= 2


def test_the_dimension_with_the_most_cuts_is_searched() -> None:
    boxes = [Box((4 * row, column), (4, 1)) for row in range(2) for column in range(1000)]
    assert len(list(BoxFinder(boxes).near(Box((0, 500), (8, 1))))) <= 4


def test_an_object_is_read_as_bytes() -> None:
    data = ByteRange("f", 7, 30)
    entry = object_entry_as_tensor(ObjectEntry("o", ("o",), "other", data))
    (read,) = Finder(entry).reads(Box.whole(entry.shape))
    assert (entry.nbytes, read.chunk.data) == (30, data)
