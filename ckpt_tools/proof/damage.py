"""Reads every byte range of a checkpoint once, and checks every CRC-32 that its archives carry.

torch.save archives (whole files, and each item of a DCP file) have a CRC for every record. Nothing
else has one: of safetensors, of torch.save's old format and of `.metadata`, reading proves only
that the bytes can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import local
from typing import NamedTuple
from zlib import crc32

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
_FILE_OF_ITEMS = ".distcp"


class Damage(NamedTuple):
    """Bytes that are not what they should be, or cannot be read, and what is wrong with them."""

    data: ByteRange
    error: CheckpointError


class Task(NamedTuple):
    """A byte range to check. ``codec`` says what it is: an archive, or None for plain bytes.

    ``records`` are those of the archive to check, None for all; ``nbytes`` is about their length.
    """

    data: ByteRange
    codec: str | None
    nbytes: int
    records: tuple[str, ...] | None = None


@dataclass(slots=True)
class Reading:
    """What a reading of everything found: damages, CRCs that were right, bytes with and without."""

    damages: list[Damage] = field(default_factory=list)
    crcs: int = 0
    checked_bytes: int = 0
    plain_bytes: int = 0


def read_everything(
    index: CheckpointIndex, files: Files, *, threads: int, on_bytes: Callable[[int], None]
) -> Reading:
    """Read everything that a checkpoint needs, several ranges at a time.

    ``index`` is as its reader gave it, not located. Files that are not there are left out.
    """
    checker = _Checker(files, Tally(on_bytes))
    tasks = tasks_of(index, files, threads=threads)
    total = Reading()
    for part in in_threads(checker.check, tasks, threads=threads, nbytes=_nbytes):
        total.damages += part.damages
        total.crcs += part.crcs
        total.checked_bytes += part.checked_bytes
        total.plain_bytes += part.plain_bytes
    return total


def _nbytes(task: Task) -> int:
    return task.nbytes


def tasks_of(index: CheckpointIndex, files: Files, *, threads: int) -> list[Task]:
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
    tasks = [Task(data, codec, data.length) for data, codec in items if _is_there(data, sizes)]
    only_items = {task.data.path for task in tasks} - _with_plain_chunks(index)
    others = [path for path in sizes if path not in only_items]
    for path in others:
        length = sizes[path]
        if not path.endswith(_FILE_OF_ITEMS) and _is_archive(path, length, files):
            task = Task(ByteRange(path, 0, length), dcp_items.TORCH_SAVE, length)
            tasks += _by_records(task, files) if len(others) < threads else [task]
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
    for start in range(0, length, _PLAIN_BYTES):
        part = ByteRange(path, start, min(_PLAIN_BYTES, length - start))
        yield Task(part, None, part.length)


def _by_records(task: Task, files: Files) -> list[Task]:
    """The same archive as several tasks of about 64 MiB; as it is when it cannot be opened."""
    try:
        archive = _Opened(files, task).archive
        records = [(name, archive.record(name)) for name in archive.names]
    except CheckpointError:
        return [task]
    groups: list[list[str]] = [[]]
    left = _PLAIN_BYTES
    for name, record in records:
        if left <= 0:
            groups.append([])
            left = _PLAIN_BYTES
        groups[-1].append(name)
        left -= record.length
    share = task.nbytes // len(groups)
    return [task._replace(records=tuple(group), nbytes=share) for group in groups]


class _Opened:
    """An archive that is being checked; a small one is held in memory."""

    def __init__(self, files: Files, task: Task) -> None:
        self.item = dcp_items.unpacked(files, task.data, task.codec or dcp_items.TORCH_SAVE)
        self._files = files
        small = self.item.length <= _SMALL
        self._kept = files.read(*self.item) if small else b""
        self.archive = torch_zip.read_archive(
            self.read, offset=self.item.offset, length=self.item.length, where=self.item.path
        )

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the file, from memory when they are there."""
        if not self._kept:
            return self._files.read(self.item.path, offset, length)
        start = offset - self.item.offset
        return self._kept[start : start + length]


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
        opened = _Opened(self._files, task)
        for name in task.records or opened.archive.names:
            record = opened.archive.record(name)
            data = ByteRange(opened.item.path, record.offset, record.length)
            try:
                crc = self._crc(data, opened)
            except CheckpointError as error:
                found.damages.append(Damage(data, error))
                continue
            if record.crc is None:
                found.plain_bytes += record.length
                continue
            found.checked_bytes += record.length
            if crc == record.crc:
                found.crcs += 1
                continue
            where = task.data if task.codec == dcp_items.ZSTD else data
            found.damages.append(Damage(where, _wrong_crc(where, name, crc, record.crc)))

    def _crc(self, data: ByteRange, opened: _Opened) -> int:
        """The CRC-32 of a record, read block by block."""
        if data.length <= _BLOCK:
            self._tally.add(data.length)
            return crc32(opened.read(data.offset, data.length))
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
