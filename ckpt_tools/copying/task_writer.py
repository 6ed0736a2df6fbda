"""Writes one task at a time: reads, casts, sums and writes its bytes.

It holds a few buffers of a fixed size and one open file; threads and the tasks are in `write`.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_tools.copying.parallel import IMPORTING, ignore_note
from ckpt_tools.copying.read import ChunkReader, OnRun
from ckpt_tools.copying.strided import Job, StridedCopy, add_jobs, copies_of, runs_of, span_of
from ckpt_tools.copying.tasks import SLOT_BYTES, InlineBytes, Slab, Task, contents_of
from ckpt_tools.core.crc import combine, crc32
from ckpt_tools.core.geometry import Box, slabs
from ckpt_tools.core.index import ByteRange
from ckpt_tools.core.plan import Finder, KnownReads, WriteItem
from ckpt_tools.errors import unwritable
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from ckpt_tools.copying.cast import Caster

SLOT = struct.Struct("<I")
# What is written past the page cache is whole blocks of this: a page that the cache holds, or a
# block that it writes back, must never lie partly in them. No disk asks for more than 4096.
BLOCK = max(4096, mmap.PAGESIZE)
_ZEROS = bytes(2 << 20)  # as much as is written in one step
_WIDEST = 16  # bytes of the largest element
_CAST_SCRATCH = 16  # bytes of a slab for each element that is cast in one step
_MEAN_SCRATCH = 32  # the same for one that is averaged: two float64, or two pairs of them


class Stopped(Exception):
    """Another thread has failed, or the user has had enough: the task is left as it is."""


@dataclass(slots=True, eq=False)
class Output:
    """One open output file; ``path`` names it in errors.

    Blocks of zeros are not written: until something is, they are there, and take no room.

    ``direct`` is the same file, opened with O_DIRECT: what is to be on the disk in the end gets
    there sooner when it does not pass the page cache. Less than ``direct_least`` bytes do.
    """

    path: str
    fd: int
    direct: int | None = None
    direct_least: int = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)
        if self.direct is not None:
            os.close(self.direct)

    def put(self, offset: int, data: memoryview) -> None:
        """Write all of these bytes at this place of the file, whole blocks past the page cache.

        Only memory that lies to the block's size as ``offset`` does can go that way. Raises
        WriteError.
        """
        if _is_zero(data):
            return
        end = offset + len(data)
        first, last = -(-offset // BLOCK) * BLOCK, end // BLOCK * BLOCK
        if self.direct is None or last - first < max(BLOCK, self.direct_least):
            self.write(offset, data)
            return
        try:
            done = first + os.pwrite(self.direct, data[first - offset : last - offset], first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise unwritable(self.path, error) from error
            done = first  # this system asks for more than blocks: all goes the other way
        self.write(offset, data[: first - offset])
        self.write(done, data[done - offset :])

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of these bytes at this place of the file. Raises WriteError."""
        if _is_zero(data):
            return
        try:
            done = os.pwrite(self.fd, data, offset)
            while done < len(data):
                done += os.pwrite(self.fd, data[done:], offset + done)
        except OSError as error:
            raise unwritable(self.path, error) from error

    def copy_from(self, fd: int, *, source: int, offset: int, length: int) -> int:
        """Have the system copy bytes of another open file to this place; gives how many it copied.

        That spares a copy in memory, a quarter of the processor time. 0 when the system or the file
        systems cannot do it, or anything failed: the bytes are then to be read and written.
        """
        try:
            return os.copy_file_range(fd, self.fd, length, source, offset)
        except (OSError, AttributeError):  # a cause that stays is met again, with its file's name
            return 0

    def send(self, start: int, end: int) -> None:
        """Have the system send these bytes to the disk now, and not wait for it.

        Otherwise it waits until a large part of the memory is dirty, and then makes the writers
        wait: writing and syncing takes several times as long.
        """
        with suppress(OSError, AttributeError):  # not every system takes this advice
            os.posix_fadvise(self.fd, start, end - start, os.POSIX_FADV_DONTNEED)


def _is_zero(data: bytes | memoryview) -> bool:
    """Whether these are blocks of zeros; other bytes are told by the first or the last of them."""
    return len(data) >= BLOCK and _ZEROS.startswith(data)


def _is_in_hole(fd: int, offset: int) -> bool:
    """Whether the system says so; it is not relied on, some file systems are wrong about it."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA) > offset
    except OSError as error:
        return error.errno == errno.ENXIO  # nothing but a hole until the end


def _finders(item: WriteItem) -> list[Finder | KnownReads]:
    """What finds the chunks of an item, or of each term of its mean."""
    return [item.finder] if item.mean is None else [finder for _, finder in item.mean.terms]


@dataclass(slots=True, eq=False)
class _Batch:
    """Small contents that follow one another in the file: gathered together, written at once.

    ``casts`` are pieces with their places in the buffer of raw elements and in that of the output.
    """

    start: int
    limit: int
    size: int = 0
    raw_size: int = 0
    jobs: list[Job] = field(default_factory=list)
    raw_jobs: list[Job] = field(default_factory=list)
    casts: list[tuple[int, int, Slab]] = field(default_factory=list)
    checked: list[tuple[int, Slab]] = field(default_factory=list)

    def has_room(self, content: InlineBytes | Slab) -> bool:
        """Whether this content comes next in the file, and fits; averages are made alone."""
        is_mean = isinstance(content, Slab) and content.item.mean is not None
        if content.offset != self.start + self.size or is_mean:
            return False
        raw = _raw_nbytes(content)
        return max(self.size + content.nbytes, self.raw_size + raw) <= self.limit


def _raw_nbytes(content: InlineBytes | Slab) -> int:
    """Bytes that a content takes before its cast; 0 when it needs none."""
    if isinstance(content, InlineBytes) or content.item.source == content.item.target:
        return 0
    return content.nbytes // content.item.target.itemsize * content.item.source.itemsize


class TaskWriter:
    """Writes tasks through buffers of at most ``memory`` bytes in all; one for each thread.

    ``moved`` is called with the number of bytes written, ``stop`` is checked between two slabs.
    ``in_kernel`` lets the system copy what need not be looked at. ``on_run`` gets the CRC-32 of
    each run of the source that is written in its order, ``on_overflow`` the name of a tensor of
    which a cast made finite values infinite.
    """

    def __init__(
        self,
        files: Files,
        *,
        memory: int,
        moved: Callable[[int], None],
        stop: threading.Event,
        in_kernel: bool = True,
        on_run: OnRun | None = None,
        on_overflow: Callable[[str], None] = ignore_note,
    ) -> None:
        self._sizes = files.sizes
        slab = max(_WIDEST, min(self._sizes.slab, memory // 4) // _WIDEST * _WIDEST)
        self._memory = memoryview(mmap.mmap(-1, slab + BLOCK))  # which begins with a page
        self._slab, self._room = slab, memory // 2
        self._out = self._memory[:slab]
        self._files = files
        self._reader = ChunkReader(files, stage_bytes=slab, on_run=on_run)
        self._on_run, self._on_overflow = on_run, on_overflow
        self._casters: dict[tuple[str, str], Caster] = {}
        self._moved, self._stop, self._in_kernel = moved, stop, in_kernel

    def write(self, task: Task, output: Output) -> int:
        """Write everything of one task, and give the CRC-32 of its bytes when it is ``checked``.

        Raises WriteError, what `ChunkReader.fill` raises, and Stopped.
        """
        self._fetch(task)
        if task.is_part:
            return self._write_piece(task.pieces[0], output)
        late: list[tuple[int, int]] = []
        group = _Batch(0, self._slab)
        self._align_to(0)
        for content in contents_of(task):
            if not group.has_room(content):
                self._flush(group, output, late)
                group = _Batch(content.offset, self._slab)
                self._align_to(group.start)
            if group.has_room(content):
                self._add(content, group)
            elif isinstance(content, Slab):
                crc = self._write_piece(content, output)
                late += [(slot, crc) for slot in content.item.crc_at]
            else:
                output.write(content.offset, content.data)
                self._moved(len(content.data))
        self._flush(group, output, late)
        for slot, crc in late:
            output.write(slot, SLOT.pack(crc))
        return 0

    def _fetch(self, task: Task) -> None:
        """Fetch all that a task reads of a store at once, where there is memory for it."""
        first = next((read for piece in task.pieces for read in piece.item.reads), None)
        if first is None or self._files.has_descriptor(first.chunk.data.path):
            return
        copies = [
            copy
            for piece in task.pieces
            for finder in _finders(piece.item)
            for copy in copies_of(
                finder.reads(piece.box), piece.box, itemsize=piece.item.source.itemsize
            )
        ]
        if sum(map(span_of, copies)) <= self._room:
            self._files.fetch((copy.path, copy.source, span_of(copy)) for copy in copies)

    def _write_piece(self, piece: Slab, output: Output) -> int:
        """Write a piece slab by slab, and give its CRC-32 when its item wants one."""
        item, itemsize = piece.item, piece.item.source.itemsize
        is_copied = item.source == item.target and item.mean is None
        if is_copied and output.direct is None:
            runs = runs_of(item.finder.reads(piece.box), piece.box, itemsize=itemsize)
            is_long = runs is not None and piece.nbytes >= len(runs) * self._sizes.long_run
            if runs and is_long and all(self._files.has_descriptor(run.path) for run in runs):
                return self._write_runs(runs, piece, output)
        most = self._slab // max(itemsize, item.target.itemsize)
        most = most if item.mean is None else self._slab // _MEAN_SCRATCH
        offset, crc = piece.offset, 0
        for slab in slabs(piece.box, max_numel=most):
            self._check_stop()
            self._align_to(offset)
            view = self._out[: slab.numel * item.target.itemsize]
            self._fill(item, slab, view)
            if item.crc_at:
                crc = crc32(view, crc)
            output.put(offset, view)
            offset += len(view)
            self._moved(len(view))
        return crc

    def _fill(self, item: WriteItem, slab: Box, view: memoryview) -> None:
        """Fill a view with a slab of an item: read, or read and cast, or averaged."""
        itemsize = item.source.itemsize
        is_copied = item.source == item.target and item.mean is None
        into = view if is_copied else self._raw[: slab.numel * itemsize]

        def read(finder: Finder | KnownReads) -> memoryview:
            self._reader.fill(finder.reads(slab), slab, itemsize=itemsize, out=into)
            return into

        if item.mean is not None:
            with IMPORTING:  # late: numpy comes with it
                from ckpt_tools.copying.cast import write_mean
            write_mean(map(read, _finders(item)), item.mean, item.source, view)
            return
        read(item.finder)
        if not is_copied:
            self._cast(item, into, view)

    def _write_runs(self, runs: Sequence[StridedCopy], piece: Slab, output: Output) -> int:
        """Write a piece that lies in long runs in files here, in few steps of this interpreter."""
        self._align_to(0)
        offset, crc = piece.offset, 0
        is_looked_at = bool(piece.item.crc_at) or self._on_run is not None
        for run in runs:
            if self._in_kernel and not is_looked_at:
                self._copy(run, output, offset=offset)
            else:
                seen = 0
                for view in self._through_buffer(run, output, offset=offset):
                    seen = crc32(view, seen) if is_looked_at else 0
                crc = combine(crc, seen, length=run.unit)
                if self._on_run is not None:
                    self._on_run(ByteRange(run.path, run.source, run.unit), seen)
            offset += run.unit
            self._moved(run.unit)
        return crc

    def _copy(self, run: StridedCopy, output: Output, *, offset: int) -> None:
        """Copy one run without looking at it, as far as it is no hole."""
        done, count = 0, 1  # which the system has copied just now
        with self._files.descriptor(run.path) as fd:
            while count and done < run.unit:
                self._check_stop()
                length = min(self._sizes.kernel_copy, run.unit - done)
                source, count = run.source + done, 0
                if not _is_in_hole(fd, source):
                    count = output.copy_from(fd, source=source, offset=offset + done, length=length)
                done += count
        rest = run._replace(source=run.source + done, unit=run.unit - done)
        for _ in self._through_buffer(rest, output, offset=offset + done):
            pass

    def _through_buffer(
        self, run: StridedCopy, output: Output, *, offset: int
    ) -> Iterator[memoryview]:
        """Copy one run through a buffer that stays in the processor's cache, and give each part."""
        buffer = self._out[: self._sizes.stream]
        for view in self._files.views(run.path, run.source, run.unit, buffer):
            self._check_stop()
            output.write(offset, view)
            offset += len(view)
            yield view

    def _add(self, content: InlineBytes | Slab, group: _Batch) -> None:
        """Put a literal into the group's buffer; of a small piece, note what it needs."""
        if isinstance(content, InlineBytes):
            self._out[group.size : group.size + len(content.data)] = content.data
            group.size += len(content.data)
            return
        item = content.item
        if item.source == item.target:
            buffer, jobs, place = self._out, group.jobs, group.size
        else:
            buffer, jobs, place = self._raw, group.raw_jobs, group.raw_size
            group.casts.append((place, group.size, content))
            group.raw_size += _raw_nbytes(content)
        if not add_jobs(item, place, jobs, most=self._sizes.pieces):
            reads, itemsize = item.reads, item.source.itemsize
            self._reader.fill(reads, item.box, itemsize=itemsize, out=buffer[place:])
        if item.crc_at:
            group.checked.append((group.size, content))
        group.size += content.nbytes

    def _flush(self, group: _Batch, output: Output, late: list[tuple[int, int]]) -> None:
        """Gather and write a group; CRC slots that it does not hold go to ``late``."""
        self._check_stop()
        if not group.size and not group.checked:
            return
        self._reader.run_jobs(group.jobs, self._out)
        if group.casts:
            self._reader.run_jobs(group.raw_jobs, self._raw)
            for place, at, piece in group.casts:
                raw = self._raw[place : place + _raw_nbytes(piece)]
                self._cast(piece.item, raw, self._out[at : at + piece.nbytes])
        self._put_crcs(group, late)
        output.put(group.start, self._out[: group.size])
        self._moved(group.size)

    def _put_crcs(self, group: _Batch, late: list[tuple[int, int]]) -> None:
        for place, piece in group.checked:
            crc = crc32(self._out[place : place + piece.nbytes])
            for slot in piece.item.crc_at:
                if group.start <= slot <= group.start + group.size - SLOT_BYTES:
                    SLOT.pack_into(self._out, slot - group.start, crc)
                else:
                    late.append((slot, crc))

    def _align_to(self, offset: int) -> None:
        """Have the buffer lie in its block of memory as ``offset`` lies in its block of a file."""
        start = offset % BLOCK
        self._out = self._memory[start : start + self._slab]

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise Stopped

    @cached_property
    def _raw(self) -> memoryview:
        """Where elements wait for their cast; most tasks have none."""
        return memoryview(bytearray(self._slab))

    def _cast(self, item: WriteItem, raw: memoryview, out: memoryview) -> None:
        if self._caster(item).cast(raw, out):
            self._on_overflow(item.fqn)

    def _caster(self, item: WriteItem) -> Caster:
        with IMPORTING:  # late: numpy comes with it, few copies need it
            from ckpt_tools.copying.cast import Caster

        key = item.source.name, item.target.name
        if key not in self._casters:
            block = max(1, self._slab // _CAST_SCRATCH)
            self._casters[key] = Caster(item.source, item.target, block=block)
        return self._casters[key]
