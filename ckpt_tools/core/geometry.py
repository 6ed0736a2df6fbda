"""Boxes of elements, and where their elements lie in memory: integers only.

A box is a hyper-rectangle in the global coordinates of one tensor. Nothing here knows of dtypes,
files, ranks or meshes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """A hyper-rectangle: ``offsets`` and ``sizes`` in elements, one of each per dimension.

    A scalar is ``Box((), ())``: no dimension, one element. A box with a size of 0 is empty.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box that holds a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last coordinate, per dimension."""
        return tuple(start + size for start, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The elements in both boxes, or None when there are none."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(
            min(a + m, b + n) - start
            for a, m, b, n, start in zip(
                self.offsets, self.sizes, other.offsets, other.sizes, offsets, strict=True
            )
        )
        return None if any(size <= 0 for size in sizes) else Box(offsets, sizes)

    def contains(self, other: Box) -> bool:
        """Whether every corner of the other box lies inside this one."""
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def relative_to(self, origin: Box) -> Box:
        """The same elements in the coordinates of ``origin``."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin.offsets, strict=True))
        return Box(offsets, self.sizes)

    def __str__(self) -> str:
        """As a slice: ``[0:4, 8:16]``."""
        spans = (f"{a}:{a + n}" for a, n in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


def cut_dims(boxes: Sequence[Box], shape: Sequence[int]) -> list[int]:
    """The dimensions along which some of these boxes is shorter than the tensor."""
    return [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a packed row-major tensor of this shape."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def slabs(box: Box, *, max_numel: int) -> Iterator[Box]:
    """Cut a box into pieces of at most ``max_numel`` elements, in row-major order.

    Each piece is contiguous in the row-major memory of ``box``, and the pieces follow one another
    there without a gap. An empty box gives no piece.
    """
    if 0 in box.sizes:
        return
    if box.numel <= max_numel:
        yield box
        return
    strides = row_major_strides(box.sizes)
    dim = next(i for i, stride in enumerate(strides) if stride <= max_numel)
    step = max(1, max_numel // strides[dim])
    ones = (1,) * dim
    for index in product(*(range(size) for size in box.sizes[:dim])):
        lead = tuple(a + i for a, i in zip(box.offsets, index, strict=False))
        for start in range(0, box.sizes[dim], step):
            size = min(step, box.sizes[dim] - start)
            yield Box(
                (*lead, box.offsets[dim] + start, *box.offsets[dim + 1 :]),
                (*ones, size, *box.sizes[dim + 1 :]),
            )


class BoxFinder:
    """Which of many boxes hold parts of a given one: empty ones hold none, equal ones count once.

    Each is known by its place in ``boxes``, the first one of equals; ``numel`` elements are in all.
    They are sorted along the dimension that cuts them into the most pieces: a search there leaves
    the few that can meet a given one.
    """

    __slots__ = ("_boxes", "_dim", "_longest", "_order", "_places", "_starts", "numel")

    def __init__(self, boxes: Iterable[Box]) -> None:
        first: dict[Box, int] = {}
        for place, box in enumerate(boxes):
            first.setdefault(box, place)
        solid = [(box, place) for box, place in first.items() if 0 not in box.sizes]
        self._boxes = [box for box, _ in solid]
        self._places = [place for _, place in solid]
        self._order: list[int] | None = None  # many are asked only for all
        self.numel = sum(box.numel for box in self._boxes)

    def all(self) -> Iterator[tuple[int, Box]]:
        """The place of each box, and itself."""
        return zip(self._places, self._boxes, strict=True)

    def parts(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The place of each box that meets this one, and the part that they share."""
        for at in self._near(box):
            there = self._boxes[at]
            part = box.intersect(there)
            if part is not None:
                yield self._places[at], there if part == there else part

    def near(self, box: Box) -> Iterator[int]:
        """The places of those that may meet this box, not all of which do."""
        return map(self._places.__getitem__, self._near(box))

    def _near(self, box: Box) -> Sequence[int]:
        """Those that may meet this box, in ascending order along the cut."""
        order = self._sorted() if self._order is None else self._order
        if self._dim is None:
            return order
        start, size = box.offsets[self._dim], box.sizes[self._dim]
        first = bisect_right(self._starts, start - self._longest)
        return order[first : bisect_left(self._starts, start + size)]

    def _sorted(self) -> list[int]:
        boxes = self._boxes
        pieces = [len(set(offsets)) for offsets in zip(*(b.offsets for b in boxes), strict=True)]
        order = list(range(len(boxes)))
        self._dim = dim = pieces.index(max(pieces)) if pieces else None
        if dim is not None:
            order.sort(key=lambda at: (boxes[at].offsets[dim], boxes[at].offsets))
            self._starts = [boxes[at].offsets[dim] for at in order]
            self._longest = max(box.sizes[dim] for box in boxes)
        self._order = order  # last: other threads then have all of it
        return order
