"""The chunks that a `.metadata` lists, kept as columns: a million of them cost one object each.

Which boxes there are and who saved them is the same for most tensors, and kept once. It knows the
rows of `.metadata`, and opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import NamedTuple, TypeAlias, overload

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, Grid, GridChunks
from ckpt_tools.formats.dcp.metadata import TensorMeta
from ckpt_tools.formats.dcp.storage import Offsets, Places, Storage, StorageInfo

# The constructors that NamedTuple generates would take two seconds of a million chunks.
_make = tuple.__new__


class Place(NamedTuple):
    """What a relative path and its transforms mean: file, packing of items, and who wrote it."""

    path: str
    codec: str
    rank: int | None


_Slice: TypeAlias = "slice[int | None, int | None, int | None]"
# What a relative path and its transforms mean.
PlaceOf = Callable[[str, tuple[str, ...]], Place]


class StoredChunks(GridChunks):
    """Chunks of one codec, each made when it is asked for; ``starts`` and ``lengths`` in bytes.

    Without a codec the bytes are the elements, packed row-major.
    """

    __slots__ = ("codec", "lengths", "starts")

    def __init__(
        self, grid: Grid, starts: Sequence[int], lengths: Sequence[int], codec: str | None
    ) -> None:
        super().__init__(grid)
        self.starts = starts
        self.lengths = lengths
        self.codec = codec

    def ends(self) -> Iterator[tuple[str, int]]:
        """The file of each chunk, and the byte after its last."""
        return zip(self.grid.paths, map(add, self.starts, self.lengths), strict=True)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: _Slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | _Slice) -> Chunk | Sequence[Chunk]:
        """One chunk, or a list of them."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        grid = self.grid
        data = ByteRange(grid.paths[index], self.starts[index], self.lengths[index])
        return Chunk(grid.boxes[index], data, codec=self.codec, rank=grid.ranks[index])

    def __iter__(self) -> Iterator[Chunk]:
        """Every chunk, in order."""
        codec, grid = self.codec, self.grid
        for box, path, rank, start, length in zip(
            grid.boxes, grid.paths, grid.ranks, self.starts, self.lengths, strict=True
        ):
            data = _make(ByteRange, (path, start, length))
            yield _make(Chunk, (box, data, None, codec, (), rank))


class _Cut:
    """The boxes of tensors that are cut alike, and the grids of those that lie in files alike."""

    __slots__ = ("boxes", "grids", "offsets")

    def __init__(self, boxes: Sequence[tuple[Offsets, Offsets]]) -> None:
        if len({offsets for offsets, _ in boxes}) < len(boxes):
            boxes = list(dict.fromkeys(boxes))
        self.boxes = tuple(_make(Box, box) for box in boxes)
        self.offsets = [offsets for offsets, _ in boxes]
        self.grids: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[Grid, str]] = {}


class Columns:
    """Makes the chunks of each name; ``place_of`` says what a place in `.metadata` means."""

    def __init__(self, storage: Storage, place_of: PlaceOf) -> None:
        self._storage = storage
        self._place_of = place_of
        # By the identity of the rows: those of tensors that are cut alike are one object.
        self._cuts: dict[int, tuple[TensorMeta, _Cut]] = {}

    def chunks(self, fqn: str, meta: TensorMeta) -> Sequence[Chunk]:
        """The chunks that have an item; one without is a hole, which the coverage check names."""
        known = self._cuts.get(id(meta.chunks))
        if known is None:
            known = self._cuts[id(meta.chunks)] = meta, _Cut(meta.chunks)
        cut = known[1]
        places = self._storage.places(fqn, cut.offsets)
        if not isinstance(places, Places):
            return [
                self._chunk(box, info)
                for box, info in zip(cut.boxes, places, strict=True)
                if info is not None
            ]
        paths, starts, lengths, transforms = places
        kind = paths, transforms
        found = cut.grids.get(kind)
        if found is None:
            found = cut.grids[kind] = self._grid(cut.boxes, paths, transforms)
        return StoredChunks(found[0], starts, lengths, found[1])

    def _grid(
        self, boxes: tuple[Box, ...], paths: tuple[str, ...], transforms: tuple[str, ...]
    ) -> tuple[Grid, str]:
        """The grid of chunks in these files, and their codec."""
        found = {path: self._place_of(path, transforms) for path in set(paths)}
        places = [found[path] for path in paths]
        grid = Grid(
            boxes, tuple(place.path for place in places), tuple(place.rank for place in places)
        )
        return grid, places[0].codec if places else ""

    def _chunk(self, box: Box, info: StorageInfo) -> Chunk:
        place = self._place_of(info.relative_path, info.transforms)
        data = ByteRange(place.path, info.offset, info.length)
        return Chunk(box, data, codec=place.codec, rank=place.rank)
