"""The items that a `.metadata` names, as chunks and objects of files; no file is opened.

A million chunks cost two numbers each: which boxes there are and who saved them is the same for
most tensors, and kept once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    ByteRange,
    Chunk,
    Grid,
    GridChunks,
    ObjectEntry,
    Path,
    Section,
)
from ckpt_tools.errors import NotReadError, UnsupportedError
from ckpt_tools.formats.dcp.checks import rank_of
from ckpt_tools.formats.dcp.items import TORCH_SAVE, ZSTD
from ckpt_tools.formats.dcp.metadata import Storage, StorageInfo


class _DataFile(NamedTuple):
    """What a relative path and its transforms mean: file, packing of items, and who wrote it."""

    path: str
    codec: str
    rank: int | None


class StoredItems:
    """The items of a DCP directory: chunks of tensors, and objects."""

    def __init__(self, root: str, storage: Storage) -> None:
        self._root = root
        self._storage = storage
        self._places: dict[tuple[str, tuple[str, ...]], _DataFile] = {}
        # By the identity of the boxes, which tensors with the same cut share and a grid keeps.
        self._grids: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Grid] = {}

    @property
    def file_names(self) -> set[str]:
        """The files that are named, relative to the directory."""
        every = (infos.values() for infos in self._storage.values())
        return {info.relative_path for infos in every for info in infos}

    def chunks(self, fqn: str, boxes: tuple[Box, ...]) -> Sequence[Chunk]:
        """The chunks that have an item; one without is a hole, which the coverage check names."""
        items = self._storage.get(fqn, {})
        try:
            infos = [items[box.offsets] for box in boxes]
        except KeyError:
            boxes = tuple(box for box in boxes if box.offsets in items)
            infos = [items[box.offsets] for box in boxes]
        kinds = {info.transforms for info in infos}
        if len(kinds) != 1:
            return list(map(self._chunk, boxes, infos))
        transforms = kinds.pop()
        key = id(boxes), tuple([info.relative_path for info in infos]), transforms
        grid = self._grids.get(key)
        if grid is None:
            places = [self._place(path, transforms) for path in key[1]]
            paths, ranks = (place.path for place in places), (place.rank for place in places)
            grid = self._grids[key] = Grid(boxes, tuple(paths), tuple(ranks))
        starts, lengths = [info.offset for info in infos], [info.length for info in infos]
        return GridChunks(grid, starts, lengths, self._place(key[1][0], transforms).codec)

    def _chunk(self, box: Box, info: StorageInfo) -> Chunk:
        place = self._place(info.relative_path, info.transforms)
        data = ByteRange(place.path, info.offset, info.length)
        return Chunk(box, data, codec=place.codec, rank=place.rank)

    def object(self, fqn: str, path: Path, section: Section) -> ObjectEntry | None:
        """The entry of an object; None when no file holds it."""
        info = self._storage.get(fqn, {}).get(None)
        return None if info is None else self._object(info, fqn, path, section)

    def unread(self, fqn: str, path: Path, section: Section, *, dtype: str) -> ObjectEntry | None:
        """The entry of a tensor whose element type is not read; None when no file holds it."""
        info = next(iter(self._storage.get(fqn, {}).values()), None)
        if info is None:
            return None
        flaw = NotReadError(
            f"a tensor of element type {dtype}, which is not read.",
            hint="Load it where it was saved, make plain tensors of it (.dequantize()), and save "
            "it again; -x leaves the entry out.",
        )
        entry = self._object(info, fqn, path, section)
        return replace(entry, type_name=f"tensor of {dtype}", flaw=flaw)

    def _object(self, info: StorageInfo, fqn: str, path: Path, section: Section) -> ObjectEntry:
        place = self._place(info.relative_path, info.transforms)
        data = ByteRange(place.path, info.offset, info.length)
        return ObjectEntry(fqn, path, section, data, codec=place.codec)

    def _place(self, relative_path: str, transforms: tuple[str, ...]) -> _DataFile:
        key = relative_path, transforms
        if key not in self._places:
            path = os.path.join(self._root, relative_path)
            codec, rank = _codec(path, transforms), rank_of(relative_path)
            self._places[key] = _DataFile(path, codec, rank)
        return self._places[key]


def _codec(path: str, transforms: tuple[str, ...]) -> str:
    """How an item is packed. Raises UnsupportedError for a transform that is not known."""
    if not transforms:
        return TORCH_SAVE
    if transforms == ("stream.zstd/1",):
        return ZSTD
    raise UnsupportedError(
        f"{path} is packed with {list(transforms)}, which is not known here; only stream.zstd/1 "
        "is.",
        hint="Save again without this extension.",
    )
