"""Byte ranges that overlap, and the elements of a tensor that no box holds. No file is opened."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange


class IntervalMap:
    """Finds which byte ranges of a sequence overlap another one, by their places in it."""

    def __init__(self, ranges: Sequence[ByteRange]) -> None:
        self._ranges = ranges
        self._places: dict[str, list[int]] = defaultdict(list)
        for place in sorted(range(len(ranges)), key=lambda place: ranges[place].offset):
            self._places[ranges[place].path].append(place)
        self._starts, self._ends = dict[str, list[int]](), dict[str, list[int]]()
        for path, places in self._places.items():
            self._starts[path] = [ranges[place].offset for place in places]
            # Of a range and all before it: so these ascend, too.
            ends = (ranges[place].offset + ranges[place].length for place in places)
            self._ends[path] = list(accumulate(ends, max))

    def meeting(self, data: ByteRange) -> list[int]:
        """Places of the ranges that have bytes in common with this one."""
        if data.path not in self._starts or data.length == 0:
            return []
        first = bisect_right(self._ends[data.path], data.offset)
        last = bisect_left(self._starts[data.path], data.offset + data.length)
        return [
            place
            for place in self._places[data.path][first:last]
            if data.offset < self._ranges[place].offset + self._ranges[place].length
        ]

    def files(self) -> frozenset[str]:
        """The paths of the files that have any of the ranges."""
        return frozenset(self._starts)


def holes(shape: Sequence[int], boxes: Collection[Box]) -> list[Box]:
    """The elements of ``shape`` that none of ``boxes`` holds, as disjoint boxes in row-major order.

    Neighbouring holes along the first dimension are one.
    """
    if 0 in shape:
        return []
    solid = [box for box in boxes if 0 not in box.sizes]
    if not solid:
        return [Box.whole(shape)]
    if not shape:
        return []
    found: list[Box] = []
    last: dict[Box, int] = {}  # by what a hole is in the other dimensions, where it is in these
    waiting = sorted(solid, key=lambda box: box.offsets[0], reverse=True)
    here: list[Box] = []
    edges = {0, shape[0]} | {edge for box in solid for edge in (box.offsets[0], box.ends[0])}
    # Between two edges all rows are held by the same boxes.
    for start, end in pairwise(sorted(edge for edge in edges if 0 <= edge <= shape[0])):
        here = [box for box in here if box.ends[0] > start]
        while waiting and waiting[-1].offsets[0] <= start:
            here.append(waiting.pop())
        if any(box.sizes[1:] == tuple(shape[1:]) for box in here):
            continue
        for hole in holes(shape[1:], {Box(box.offsets[1:], box.sizes[1:]) for box in here}):
            place = last.get(hole)
            if place is not None and found[place].ends[0] == start:
                first = found[place].offsets[0]
                found[place] = Box((first, *hole.offsets), (end - first, *hole.sizes))
            else:
                last[hole] = len(found)
                found.append(Box((start, *hole.offsets), (end - start, *hole.sizes)))
    return found


def describe(box: Box, shape: Sequence[int]) -> str:
    """A box as text: ``rows 3:6 of 11``, or its slices."""
    if not shape:
        return "its one value"
    if box == Box.whole(shape):
        return f"all of {list(shape)}"
    if box.sizes[1:] == tuple(shape[1:]):
        return f"rows {box.offsets[0]}:{box.ends[0]} of {shape[0]:,}"
    return f"{box} of {list(shape)}"
