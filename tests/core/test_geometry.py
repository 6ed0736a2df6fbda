"""Boxes: their laws, and the slabs that they are worked on in."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.geometry import Box, row_major_strides, slabs

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def inside(draw: st.DrawFn, sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Box:
    """A box inside the box of these sizes and offsets, empty ones included."""
    starts = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - a)) for size, a in zip(sizes, starts, strict=True)]
    return Box(tuple(a + o for a, o in zip(starts, offsets, strict=True)), tuple(lengths))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    """A box, and a box inside it."""
    sizes = draw(shapes)
    outer = Box(tuple(draw(st.integers(0, 9)) for _ in sizes), sizes)
    return outer, draw(inside(outer.sizes, outer.offsets))


def elements(box: Box, within: Box) -> np.ndarray:
    """The place of each element of ``box`` in the row-major memory of ``within``, in order."""
    places = np.arange(within.numel).reshape(within.sizes)
    start = box.relative_to(within).offsets
    return places[tuple(slice(a, a + n) for a, n in zip(start, box.sizes, strict=True))].ravel()


@given(pairs(), st.integers(1, 50))
def test_slabs_follow_one_another_without_a_gap(pair: tuple[Box, Box], most: int) -> None:
    _, box = pair
    pieces = list(slabs(box, max_numel=most))
    places = [elements(piece, box) for piece in pieces]
    assert [place for some in places for place in some] == list(range(box.numel))


@given(pairs(), st.integers(1, 50))
def test_slabs_are_small_enough_and_not_empty(pair: tuple[Box, Box], most: int) -> None:
    assert all(0 < piece.numel <= most for piece in slabs(pair[1], max_numel=most))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 100))
def test_slabs_are_few(rows: int, columns: int, most: int) -> None:
    count = len(list(slabs(Box.whole((rows, columns)), max_numel=most)))
    assert count <= 2 * -(-rows * columns // most) + rows


@given(pairs(), st.data())
def test_the_intersection_is_what_both_boxes_hold(
    pair: tuple[Box, Box], data: st.DataObject
) -> None:
    outer, one = pair
    other = data.draw(inside(outer.sizes, outer.offsets))
    both = one.intersect(other)
    held = set(elements(one, outer)) & set(elements(other, outer))
    assert (set() if both is None else set(elements(both, outer))) == held


@given(pairs())
def test_a_box_contains_what_lies_inside_it(pair: tuple[Box, Box]) -> None:
    outer, inner = pair
    assert outer.contains(inner)


@given(shapes)
def test_row_major_strides_are_numpys(shape: tuple[int, ...]) -> None:
    if 0 not in shape:
        assert row_major_strides(shape) == np.empty(shape, np.int8).strides


def test_a_scalar_is_one_element_in_one_slab() -> None:
    scalar = Box((), ())
    assert scalar.numel == prod(()) == 1
    assert list(slabs(scalar, max_numel=1)) == [scalar]


def test_a_box_prints_as_a_slice() -> None:
    assert str(Box((0, 8), (4, 8))) == "[0:4, 8:16]"
