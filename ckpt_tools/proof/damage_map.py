"""Damaged byte ranges -> damaged tensors, rows, objects and files. No file is opened.

`IntervalMap` finds byte ranges that overlap, `holes` the elements of a tensor that no box holds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, LocatedIndex, Section, TensorEntry


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


class DamagedTensor(NamedTuple):
    """A tensor that is not whole: which boxes are lost, and which ranks had saved them.

    ``lost`` is empty when all rows are there and something else is wrong, ``lost_elements`` says
    how many these are.
    """

    fqn: str
    section: Section
    shape: tuple[int, ...]
    lost_elements: int
    lost: tuple[Box, ...]
    ranks: tuple[int, ...]


class Rescue(NamedTuple):
    """A box whose own bytes are not good, and the path of a replica that is."""

    fqn: str
    box: Box
    lost: str
    held_by: str


class DamageMap:
    """What of a checkpoint is good; ``damaged`` are ranges beyond missing and short files."""

    def __init__(self, index: LocatedIndex, damaged: Sequence[ByteRange]) -> None:
        self._index = index
        self._lengths = {file.path: file.length for file in index.files}
        self._damaged = IntervalMap(damaged)
        self._damaged_files = self._damaged.files()
        self._needed: dict[str, int] = defaultdict(int)
        for entry in index.tensors:
            for chunk in entry.chunks:
                end = chunk.data.offset + chunk.data.length
                self._needed[chunk.data.path] = max(self._needed[chunk.data.path], end)

    def is_good(self, data: ByteRange) -> bool:
        """Whether a byte range is there and undamaged."""
        length = self._lengths.get(data.path, data.offset + data.length)
        if length is None or data.offset + data.length > length:
            return False
        return not self._damaged.meeting(data)

    def is_damaged_file(self, path: str) -> bool:
        """Whether a file is missing, too short, or damaged anywhere."""
        length = self._lengths.get(path, self._needed[path])
        return length is None or length < self._needed[path] or path in self._damaged_files

    def damaged_tensors(self, named: Collection[str]) -> tuple[DamagedTensor, ...]:
        """The tensors that have lost rows, and those that are ``named`` by a problem."""
        tensors = (self._damage(entry) for entry in self._index.tensors)
        return tuple(one for one in tensors if one.lost or one.fqn in named)

    def _damage(self, entry: TensorEntry) -> DamagedTensor:
        good = {chunk.box for chunk in entry.chunks if self._good_place(chunk) is not None}
        bad = [chunk for chunk in entry.chunks if chunk.box.numel and chunk.box not in good]
        may_lack = bool(bad) or sum(box.numel for box in good) != entry.numel
        lost = holes(entry.shape, good) if may_lack else []
        ranks = {chunk.rank for chunk in bad if chunk.rank is not None}
        if not bad and entry.layout is not None:  # which states who had them
            for rank, box in enumerate(entry.layout.boxes(entry.shape) if lost else ()):
                if any(box.intersect(other) is not None for other in lost):
                    ranks.add(rank)
        return DamagedTensor(
            *(entry.fqn, entry.section, entry.shape, sum(box.numel for box in lost)),
            lost=tuple(lost),
            ranks=tuple(sorted(ranks)),
        )

    def _good_place(self, chunk: Chunk) -> ByteRange | None:
        """The first place of a chunk that is good, or None."""
        return next(filter(self.is_good, (chunk.data, *chunk.replicas)), None)

    def damaged_objects(self, named: Collection[str]) -> tuple[str, ...]:
        """The objects whose bytes are not good, or that are ``named`` by a problem."""
        return tuple(
            entry.fqn
            for entry in self._index.objects
            if entry.fqn in named or not self.is_good(entry.data)
        )

    def rescued(self) -> tuple[Rescue, ...]:
        """The boxes that only a replica still holds."""
        rescues: list[Rescue] = []
        for entry in self._index.tensors:
            for chunk in entry.chunks:
                place = self._good_place(chunk) if chunk.replicas else None
                if place is not None and place != chunk.data:
                    rescues.append(Rescue(entry.fqn, chunk.box, chunk.data.path, place.path))
        return tuple(rescues)


# -------------------------------------------------------------------------------------------------
# Which elements of a tensor no box holds. Integers only.
# -------------------------------------------------------------------------------------------------


def holes(shape: Sequence[int], boxes: Collection[Box]) -> list[Box]:
    """The elements of ``shape`` that none of ``boxes`` holds, as disjoint boxes in row-major order.

    Neighbouring holes along the first dimension are one.
    """
    solid = [box for box in boxes if 0 not in box.sizes]
    if 0 in shape:
        return []
    if not solid:
        return [Box.whole(shape)]
    if not shape:
        return []
    missing: list[Box] = []
    waiting = sorted(solid, key=lambda box: box.offsets[0], reverse=True)
    active: list[Box] = []
    edges = {0, shape[0]} | {edge for box in solid for edge in (box.offsets[0], box.ends[0])}
    for start, end in pairwise(sorted(edge for edge in edges if 0 <= edge <= shape[0])):
        active = [box for box in active if box.ends[0] > start]
        while waiting and waiting[-1].offsets[0] <= start:
            active.append(waiting.pop())
        if any(box.sizes[1:] == tuple(shape[1:]) for box in active):
            continue
        for hole in holes(shape[1:], {_below(box) for box in active}):
            for place, before in enumerate(missing):
                if _below(before) == hole and before.ends[0] == start:
                    missing[place] = before._replace(sizes=(end - before.offsets[0], *hole.sizes))
                    break
            else:
                missing.append(Box((start, *hole.offsets), (end - start, *hole.sizes)))
    return missing


def _below(box: Box) -> Box:
    return Box(box.offsets[1:], box.sizes[1:])


def describe(box: Box, shape: Sequence[int]) -> str:
    """A box as text: ``rows 3:6 of 11``, or its slices."""
    if not shape:
        return "its one value"
    if box == Box.whole(shape):
        return f"all of {list(shape)}"
    if box.sizes[1:] == tuple(shape[1:]):
        return f"rows {box.offsets[0]}:{box.ends[0]} of {shape[0]:,}"
    return f"{box} of {list(shape)}"
