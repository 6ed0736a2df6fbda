"""A conversion as the join of two lists: chunks that are there, boxes that are wanted. No I/O."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import Chunk, ObjectEntry, Path, TensorEntry, completed
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.errors import IncompleteError


class ReadItem(NamedTuple):
    """Take ``box`` (global coordinates of the tensor) out of ``chunk``, which contains it."""

    chunk: Chunk
    box: Box


class WriteItem(NamedTuple):
    """One box to write, packed row-major, at byte ``offset`` of file ``path``.

    ``reads`` tile the box. Elements are ``source`` in the chunks and ``target`` in the file. When
    all of the box is written, its CRC-32 goes as four little-endian bytes to each offset in
    ``crc_at``.
    """

    fqn: str
    path: str
    offset: int
    box: Box
    source: DType
    target: DType
    reads: tuple[ReadItem, ...]
    crc_at: tuple[int, ...] = ()


class FilePlan(NamedTuple):
    """One file to write: its length in bytes, the bytes known already, and the boxes to fill in."""

    path: str
    length: int
    literals: tuple[tuple[int, bytes], ...]
    items: tuple[WriteItem, ...]


class Target(NamedTuple):
    """One tensor to write: its name and place in the output, its source, its type, its layout."""

    fqn: str
    path: Path
    entry: TensorEntry
    dtype: DType
    layout: Layout | None = None


class Nearby:
    """Which of many boxes may meet a given one, without trying them all.

    The boxes are sorted along the dimension that cuts them into the most pieces; a search there
    leaves the few that can meet it. ``order`` gives the boxes' positions in that order.
    """

    __slots__ = ("_dim", "_longest", "_starts", "order")

    def __init__(self, boxes: Sequence[Box]) -> None:
        ndim = len(boxes[0].sizes) if boxes else 0
        pieces = [len({box.offsets[dim] for box in boxes}) for dim in range(ndim)]
        self._dim = dim = pieces.index(max(pieces)) if pieces else None
        self.order = list(range(len(boxes)))
        self._starts: list[int] = []
        self._longest = 0
        if dim is not None:
            self.order.sort(key=lambda place: (boxes[place].offsets[dim], boxes[place].offsets))
            self._starts = [boxes[place].offsets[dim] for place in self.order]
            self._longest = max(box.sizes[dim] for box in boxes)

    def near(self, box: Box) -> list[int]:
        """Positions of the boxes that may meet this one, in ascending order along the cut."""
        dim = self._dim
        if dim is None:
            return self.order
        start, size = box.offsets[dim], box.sizes[dim]
        first = bisect_right(self._starts, start - self._longest)
        return self.order[first : bisect_left(self._starts, start + size)]


class Finder:
    """Finds the chunks of one tensor that hold a box; equal boxes count once, the first one."""

    __slots__ = ("_all", "_entry", "_nearby")

    def __init__(self, entry: TensorEntry) -> None:
        unique: dict[Box, Chunk] = {}
        for chunk in entry.chunks:
            unique.setdefault(chunk.box, chunk)
        self._entry = entry
        self._all = [ReadItem(chunk, box) for box, chunk in unique.items() if 0 not in box.sizes]
        self._nearby: Nearby | None = None

    def reads(self, box: Box) -> tuple[ReadItem, ...]:
        """What to read from which chunk so that the box is filled; nothing for an empty box.

        Raises IncompleteError when the chunks do not cover it.
        """
        if 0 in box.sizes:
            return ()
        found = tuple(self._parts(box))
        covered = sum(read.box.numel for read in found)
        if covered != box.numel:
            raise IncompleteError(
                f"{self._entry.fqn}: chunks hold {covered:,} of the {box.numel:,} elements "
                f"of {box}.",
                hint="`ckpt-tools verify --quick` names what is missing.",
            )
        return found

    def _parts(self, box: Box) -> Iterator[ReadItem]:
        """The parts of the box, chunk by chunk; the whole tensor needs no search."""
        if box.sizes == self._entry.shape:
            yield from self._all
            return
        if self._nearby is None:
            self._nearby = Nearby([read.box for read in self._all])
        for place in self._nearby.near(box):
            chunk, there = self._all[place]
            part = box.intersect(there)
            if part is not None:
                yield ReadItem(chunk, there if part == there else part)


def placed_tree(
    targets: Sequence[Target], objects: Sequence[ObjectEntry], tree: Branch[str]
) -> Branch[Target | ObjectEntry]:
    """What is to be written, in the containers that ``tree`` has for the names; see `completed`."""
    placed: list[Target | ObjectEntry] = [*targets, *objects]
    found = {one.fqn: one for one in placed}
    return completed(tree, placed).map(found.__getitem__)


def object_entry_as_tensor(entry: ObjectEntry) -> TensorEntry:
    """The bytes of an object as a one-dimensional uint8 tensor, to be copied like any other."""
    length = entry.data.length
    chunk = Chunk(Box((0,), (length,)), entry.data)
    return TensorEntry(entry.fqn, entry.path, entry.section, BY_NAME["uint8"], (length,), (chunk,))
