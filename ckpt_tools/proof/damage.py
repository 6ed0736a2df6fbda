"""Reads every byte range of a checkpoint once, and checks every CRC-32 that its archives carry.

torch.save archives (whole files, and each item of a DCP file) have a CRC for every record. Nothing
else has one: of safetensors, of torch.save's old format and of `.metadata`, reading proves only
that the bytes can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from threading import local
from typing import NamedTuple
from zlib import crc32

from ckpt_tools.copying.crc import combine
from ckpt_tools.core.index import ByteRange, CheckpointIndex
from ckpt_tools.errors import CheckpointError, UnreadableError, unreadable
from ckpt_tools.formats.dcp import items as dcp_items
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.proof.threads import Tally, in_threads
from ckpt_tools.storage.reader import Files

_BLOCK = 1 << 20
# An archive this small is read in one go, and its records are checked in memory.
_SMALL = 2 << 20
_PLAIN_BYTES = 64 << 20
_ARCHIVES = frozenset({dcp_items.TORCH_SAVE, dcp_items.ZSTD})
# A DCP file begins like an archive, too: like that of its first item.
_FILES_ARE_ARCHIVES = frozenset({"ranks", "torch"})


_View = Callable[[int, int], bytes | memoryview]


class Damage(NamedTuple):
    """Bytes that are not what they should be, or cannot be read, and what is wrong with them."""

    data: ByteRange
    error: CheckpointError


class Task(NamedTuple):
    """A byte range to check. ``codec`` says what it is: an archive, or None for plain bytes.

    ``records`` are those of the archive to check, None for all; ``nbytes`` is about their length.
    ``part`` is what to read of the only one of them, where a record is read in parts.
    """

    data: ByteRange
    codec: str | None
    nbytes: int
    records: tuple[str, ...] | None = None
    part: ByteRange | None = None


class _Part(NamedTuple):
    """The CRC-32 of a part of a record, and the record with the CRC-32 that it should have."""

    data: ByteRange
    crc: int
    record: ByteRange
    name: str
    told: int


@dataclass(slots=True)
class Reading:
    """What a reading of everything found: damages, CRCs that were right, bytes with and without."""

    damages: list[Damage] = field(default_factory=list)
    crcs: int = 0
    checked_bytes: int = 0
    plain_bytes: int = 0
    parts: list[_Part] = field(default_factory=list)

    def add(self, other: Reading) -> None:
        """Take in what another reading found."""
        self.damages += other.damages
        self.crcs += other.crcs
        self.checked_bytes += other.checked_bytes
        self.plain_bytes += other.plain_bytes
        self.parts += other.parts

    def check(self, record: ByteRange, name: str, *, crc: int, told: int) -> None:
        """Compare the CRC-32 of a record with that which the archive has."""
        if crc == told:
            self.crcs += 1
        else:
            self.damages.append(Damage(record, _wrong_crc(record, name, crc, told)))


def read_everything(
    index: CheckpointIndex, files: Files, *, threads: int | None, on_bytes: Callable[[int], None]
) -> Reading:
    """Read everything that a checkpoint needs, several ranges at a time.

    ``index`` is as its reader gave it, not located. Files that are not there are left out.
    """
    checker = _Checker(files, Tally(on_bytes))
    total = Reading()
    for found in in_threads(checker.check, tasks_of(index, files), threads=threads, nbytes=_nbytes):
        total.add(found)
    _combine(total)
    return total


def _combine(total: Reading) -> None:
    """Check the records that were read in parts; one whose part could not be read is damaged."""
    once = sorted({part.data: part for part in total.parts}.values())  # items may share a range
    for (record, name, told), parts in groupby(once, key=lambda part: part[2:]):
        crc = done = 0
        for part in parts:
            crc = combine(crc, part.crc, length=part.data.length)
            done += part.data.length
        if done == record.length:
            total.check(record, name, crc=crc, told=told)


def _nbytes(task: Task) -> int:
    return task.nbytes


def tasks_of(index: CheckpointIndex, files: Files) -> list[Task]:
    """What is to be read: items of DCP files one by one, archives, and other files in parts."""
    sizes = {file.path: file.length for file in index.files if file.length is not None}
    items = [
        (data, chunk.codec)
        for entry in index.tensors
        for chunk in entry.chunks
        if chunk.codec in _ARCHIVES
        for data in (chunk.data, *chunk.replicas)
    ]
    items += [(entry.data, entry.codec) for entry in index.objects if entry.codec in _ARCHIVES]
    tasks: list[Task] = []
    for data, codec in items:
        if _is_there(data, sizes):
            tasks += _by_records(Task(data, codec, data.length), files)
    only_items = {task.data.path for task in tasks} - _with_plain_chunks(index)
    others = [path for path in sizes if path not in only_items]
    for path in others:
        length = sizes[path]
        if index.format in _FILES_ARE_ARCHIVES and _is_archive(path, length, files):
            task = Task(ByteRange(path, 0, length), dcp_items.TORCH_SAVE, length)
            tasks += _by_records(task, files)
        else:
            tasks += _plain_tasks(path, length)
    return tasks


def _is_there(data: ByteRange, sizes: Mapping[str, int]) -> bool:
    return data.offset + data.length <= sizes.get(data.path, 0)


def _with_plain_chunks(index: CheckpointIndex) -> set[str]:
    return {
        chunk.data.path for entry in index.tensors for chunk in entry.chunks if chunk.codec is None
    }


def _is_archive(path: str, length: int, files: Files) -> bool:
    return torch_zip.sniff(files.read(path, 0, min(512, length))) == "zip"


def _plain_tasks(path: str, length: int) -> Iterator[Task]:
    for part in _parts_of(ByteRange(path, 0, length)):
        yield Task(part, None, part.length)


def _parts_of(data: ByteRange) -> Iterator[ByteRange]:
    for start in range(0, data.length, _PLAIN_BYTES):
        length = min(_PLAIN_BYTES, data.length - start)
        yield ByteRange(data.path, data.offset + start, length)


def _by_records(task: Task, files: Files) -> list[Task]:
    """A large archive as several tasks of about 64 MiB; as it is when it cannot be opened."""
    if task.nbytes <= _PLAIN_BYTES or task.codec == dcp_items.ZSTD:
        return [task]
    try:
        archive = _opened(files, task)[1]
        records = [(name, archive.record(name)) for name in archive.names]
    except CheckpointError:
        return [task]
    tasks: list[Task] = []
    groups: list[list[str]] = [[]]
    left = _PLAIN_BYTES
    for name, record in records:
        if record.crc is not None and record.length > _PLAIN_BYTES:
            whole = ByteRange(task.data.path, record.offset, record.length)
            tasks += (
                task._replace(records=(name,), part=part, nbytes=part.length)
                for part in _parts_of(whole)
            )
            continue
        if left <= 0:
            groups.append([])
            left = _PLAIN_BYTES
        groups[-1].append(name)
        left -= record.length
    share = max(0, task.nbytes - sum(one.nbytes for one in tasks)) // len(groups)
    tasks += (task._replace(records=tuple(group), nbytes=share) for group in groups if group)
    return tasks


def _opened(files: Files, task: Task) -> tuple[ByteRange, torch_zip.Archive, _View]:
    """The range of an archive, the archive, and what shows bytes of the file: a small archive is
    read once. No object holds the one that holds it: memory is then freed without a collector.
    """
    item = dcp_items.unpacked(files, task.data, task.codec or dcp_items.TORCH_SAVE)
    kept = memoryview(files.read(*item)) if item.length <= _SMALL else None

    def view(offset: int, length: int) -> bytes | memoryview:
        if kept is None:
            return files.read(item.path, offset, length)
        return kept[offset - item.offset : offset - item.offset + length]

    def read(offset: int, length: int) -> bytes:
        return bytes(view(offset, length))

    archive = torch_zip.read_archive(read, offset=item.offset, length=item.length, where=item.path)
    return item, archive, view


class _Checker:
    """Checks tasks from several threads; each has its own buffer."""

    def __init__(self, files: Files, tally: Tally) -> None:
        self._files = files
        self._tally = tally
        self._own = local()

    def check(self, task: Task) -> Reading:
        """Read one task's bytes; what is wrong with them becomes a damage, never an error."""
        found = Reading()
        try:
            if task.codec is None:
                found.plain_bytes = sum(map(len, self._blocks(task.data)))
            else:
                self._check_archive(task, found)
        except CheckpointError as error:
            found.damages.append(Damage(task.data, error))
        return found

    def _check_archive(self, task: Task, found: Reading) -> None:
        item, archive, view = _opened(self._files, task)
        for name in task.records or archive.names:
            record = archive.record(name)
            data = ByteRange(item.path, record.offset, record.length)
            try:
                crc = self._crc(task.part or data, view)
            except CheckpointError as error:
                found.damages.append(Damage(task.part or data, error))
                continue
            if record.crc is None:
                found.plain_bytes += record.length
            elif task.part is not None:
                found.checked_bytes += task.part.length
                found.parts.append(_Part(task.part, crc, data, name, record.crc))
            else:
                found.checked_bytes += record.length
                where = task.data if task.codec == dcp_items.ZSTD else data
                found.check(where, name, crc=crc, told=record.crc)

    def _crc(self, data: ByteRange, view: _View) -> int:
        """The CRC-32 of a range, read block by block."""
        if data.length <= _BLOCK:
            self._tally.add(data.length)
            return crc32(view(data.offset, data.length))
        crc = 0
        for block in self._blocks(data):
            crc = crc32(block, crc)
        return crc

    def _blocks(self, data: ByteRange) -> Iterator[memoryview]:
        """The bytes of a range in blocks, which share one buffer."""
        buffer = self._buffer()
        for start in range(0, data.length, _BLOCK):
            block = buffer[: min(_BLOCK, data.length - start)]
            self._fill(data.path, data.offset + start, block)
            self._tally.add(len(block))
            yield block

    def _fill(self, path: str, offset: int, block: memoryview) -> None:
        try:
            self._files.read_into(path, offset, block)
        except OSError as error:
            hint = "The disk or the file system fails there. Copy what can be read elsewhere."
            doing = f"read at byte {offset:,}"
            raise unreadable(path, error, doing=doing, hint=hint) from error

    def _buffer(self) -> memoryview:
        buffer: memoryview | None = getattr(self._own, "buffer", None)
        if buffer is None:
            buffer = self._own.buffer = memoryview(bytearray(_BLOCK))
        return buffer


def _wrong_crc(data: ByteRange, name: str, found: int, told: int) -> UnreadableError:
    end = data.offset + data.length
    return UnreadableError(
        f"{data.path}: record {name!r} (bytes {data.offset:,} to {end:,}) is damaged: "
        f"its CRC-32 is {found:08x}, the archive says {told:08x}.",
        hint="Take the file from another copy; what is in it cannot be mended.",
    )
