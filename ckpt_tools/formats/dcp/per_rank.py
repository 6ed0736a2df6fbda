"""Directories in which each rank wrote its own `__R.metadata` (use_collectives=False).

Together they are one checkpoint. What several ranks hold, all of them have written: it is compared
here.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, ObjectEntry, Path, TensorEntry
from ckpt_tools.core.plain_values import are_same
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, IncompleteError
from ckpt_tools.formats.dcp import items as dcp_items
from ckpt_tools.formats.dcp import objects as dcp_objects
from ckpt_tools.formats.dcp.data_files import rank_of
from ckpt_tools.formats.dcp.metadata import Copies, Metadata, Offsets, StorageInfo, TensorMeta
from ckpt_tools.formats.protocol import Checksummed, is_there, lengths_of
from ckpt_tools.formats.replicas import Replicas
from ckpt_tools.formats.slices import JOINED_BY_OWNER
from ckpt_tools.storage.reader import Files

_BLOCK = 1 << 20
_SMALL = 64 << 10  # bytes of an item that is read whole


def union(parts: Mapping[int, Metadata]) -> Metadata:
    """One metadata out of those of the ranks."""
    tensors: dict[str, TensorMeta] = {}
    places: dict[tuple[str, Offsets | None], list[StorageInfo]] = {}
    planner: dict[str, Path] = {}
    complaints: dict[str, str] = {}
    first: dict[str, int] = {}
    for rank, part in sorted(parts.items()):
        planner |= part.planner_data or {}
        for fqn, items in part.storage.items():
            for at, info in items.items():
                places.setdefault((fqn, at), []).append(info)
        for fqn, meta in part.tensors.items():
            known = tensors.setdefault(fqn, meta)
            first.setdefault(fqn, rank)
            if known is meta:
                continue
            if (known.shape, known.dtype) != (meta.shape, meta.dtype):
                said = [f"{one.dtype} {list(one.shape)}" for one in (known, meta)]
                complaints[fqn] = (
                    f"it is {said[0]} on rank {first[fqn]} and {said[1]} on rank {rank}"
                )
            else:
                tensors[fqn] = known._replace(
                    boxes=tuple(dict.fromkeys((*known.boxes, *meta.boxes)))
                )
    storage: dict[str, dict[Offsets | None, StorageInfo]] = {}
    for (fqn, at), infos in places.items():
        storage.setdefault(fqn, {})[at] = infos[0]
    return next(iter(parts.values()))._replace(
        tensors=tensors,
        objects=frozenset().union(*(part.objects for part in parts.values())),
        storage=storage,
        planner_data=planner or None,
        copies={key: infos for key, infos in places.items() if len(infos) > 1},
        complaints=complaints,
    )


def missing_ranks(
    parts: Collection[int], names: Iterable[str], root: str
) -> Iterator[CheckpointError]:
    """Ranks that others, or data files of their own among these, prove to have been there."""
    wrote = {rank for rank in map(rank_of, names) if rank is not None}
    absent = [rank for rank in range(max({*parts, *wrote}) + 1) if rank not in parts]
    if absent:
        shown = some([f"__{rank}.metadata" for rank in absent])
        yield IncompleteError(
            f"{root}: {len(absent)} of {len(absent) + len(parts)} ranks' own metadata are not "
            f"there: {shown}.",
            hint="Each rank wrote its own: bring the files of all nodes into one folder.",
        )


def with_replicas(index: CheckpointIndex, copies: Copies) -> CheckpointIndex:
    """The same index with the other places of the chunks that several ranks wrote."""
    named = {fqn for fqn, at in copies if at is not None}

    def chunks(entry: TensorEntry) -> Iterator[Chunk]:
        for chunk in entry.chunks:
            others = copies.get((entry.fqn, chunk.box.offsets), ())[1:]
            yield chunk._replace(replicas=tuple(_range(index.root, info) for info in others))

    tensors = (
        replace(entry, chunks=tuple(chunks(entry))) if entry.fqn in named else entry
        for entry in index.tensors
    )
    return replace(index, tensors=tuple(tensors))


def _range(root: str, info: StorageInfo) -> ByteRange:
    return ByteRange(os.path.join(root, info.relative_path), info.offset, info.length)


def compared(index: CheckpointIndex, metadata: Metadata, files: Files) -> CheckpointIndex:
    """The same index, what several ranks wrote compared with one another, as `Replicas` says.

    What cannot be read is not compared: that is said elsewhere.
    """
    items = _Items(index, files)
    replicas = Replicas(complaints=dict(metadata.complaints))
    for entry in index.tensors:
        others = [(chunk, data) for chunk in entry.chunks for data in chunk.replicas]
        differs = next((data for chunk, data in others if items.differ(chunk, data)), None)
        if differs is None:
            replicas.add(entry, several=bool(others))
            continue
        first = entry.chunks[0]
        alone = [
            first._replace(data=data, replicas=(), rank=rank_of(data.path))
            for data in (first.data, *first.replicas)
        ]
        held = ((chunk.rank, replace(entry, chunks=(chunk,))) for chunk in alone)
        replicas.add_unequal(
            entry, held, rank=rank_of(differs.path), how=_not_on(first.data, differs)
        )
    for item in index.objects:
        places = [_range(index.root, info) for info in metadata.copies.get((item.fqn, None), ())]
        differs = next((data for data in places[1:] if items.objects_differ(item, data)), None)
        if differs is None:
            replicas.add(item, several=len(places) > 1)
            continue
        own = ((rank_of(data.path), replace(item, data=data)) for data in places)
        replicas.add_unequal(item, own, rank=rank_of(differs.path), how=_not_on(places[0], differs))
    hint = f"-x leaves them out. {JOINED_BY_OWNER}"
    return replace(
        index,
        tensors=replicas.sorted(TensorEntry),
        objects=replicas.sorted(ObjectEntry),
        notes=(*index.notes, *replicas.notes()),
        problems=(*index.problems, *replicas.problems("tensors", hint=hint)),
        tree=replicas.within(index.tree),
    )


def _not_on(one: ByteRange, other: ByteRange) -> str:
    return f"not the same on ranks {rank_of(one.path)} and {rank_of(other.path)}"


class _Items:
    """Compares items that should be the same, by their bytes or by the CRC-32s of their records."""

    def __init__(self, index: CheckpointIndex, files: Files) -> None:
        self._lengths = lengths_of(index)
        self._files = files

    def differ(self, chunk: Chunk, other: ByteRange) -> bool:
        """Whether a replica of a chunk certainly holds something else."""
        if not chunk.box.numel or not self._are_there(chunk.data, other):
            return False
        if chunk.codec is None:
            return not self._same_bytes(chunk.data, other)
        return not self._same_items(chunk.data, other, str(chunk.codec))

    def objects_differ(self, entry: ObjectEntry, other: ByteRange) -> bool:
        """Whether another rank's object is certainly or possibly another one."""
        if not self._are_there(entry.data, other):
            return False
        codec = entry.codec or dcp_items.TORCH_SAVE
        if self._same_items(entry.data, other, codec):
            return False
        try:
            one = dcp_objects.opened(entry, self._files)
            two = dcp_objects.opened(replace(entry, data=other), self._files)
        except CheckpointError:
            return True
        return not (one.opened and two.opened and are_same(one.value, two.value))

    def _are_there(self, *places: ByteRange) -> bool:
        return all(is_there(data, self._lengths) for data in places)

    def _same_bytes(self, one: ByteRange, other: ByteRange) -> bool:
        if one.length != other.length:
            return False
        return all(
            self._files.read(one.path, one.offset + at, min(_BLOCK, one.length - at))
            == self._files.read(other.path, other.offset + at, min(_BLOCK, one.length - at))
            for at in range(0, one.length, _BLOCK)
        )

    def _same_items(self, one: ByteRange, other: ByteRange, codec: str) -> bool:
        """Whether two archives hold the same records, however they are packed."""
        if one.length == other.length <= _SMALL and self._same_bytes(one, other):
            return True
        try:
            here, there = self._records(one, codec), self._records(other, codec)
        except CheckpointError:
            return True  # a damaged item is reported when it is read
        return here.keys() == there.keys() and all(
            self._same_record(here[name], there[name]) for name in here
        )

    def _same_record(self, one: Checksummed, other: Checksummed) -> bool:
        if one.crc is None or other.crc is None:
            return self._same_bytes(one.data, other.data)
        return (one.data.length, one.crc) == (other.data.length, other.crc)

    def _records(self, item: ByteRange, codec: str) -> dict[str, Checksummed]:
        """The records of an item that make up its value."""
        item = dcp_items.unpacked(self._files, item, codec)
        archive = dcp_items.archive_of(self._files, item, item.path)
        return {
            name: Checksummed(ByteRange(item.path, record.offset, record.length), record.crc)
            for name in archive.names
            if name == "data.pkl" or name.startswith("data/")
            for record in [archive.record(name)]
        }
