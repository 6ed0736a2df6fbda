"""Reads boxes of tensors, packed row-major, from the files that hold their chunks.

Any strides, any number of chunks, boxes of any size, through buffers of a fixed size. Where the
bytes go afterwards is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import chain

from ckpt_tools.copying.parallel import IMPORTING, ignore_bytes
from ckpt_tools.copying.strided import (
    Job,
    StridedCopy,
    blocks_of,
    copies_of,
    runs_of,
    span_of,
    steps,
)
from ckpt_tools.core.crc import crc32
from ckpt_tools.core.geometry import Box, slabs
from ckpt_tools.core.index import ByteRange, TensorEntry
from ckpt_tools.core.plan import Finder, KnownReads, ReadItem
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

# Gets a run of bytes that was read in its order, and its CRC-32.
OnRun = Callable[[ByteRange, int], None]
_FETCHED = 2  # staging buffers of a store's bytes that are asked for at a time
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}


class ChunkReader:
    """Fills buffers with boxes; it has one staging buffer, so each thread needs its own.

    ``on_run`` gets each run of bytes that goes to one place, with its CRC-32.
    """

    def __init__(
        self,
        files: Files,
        *,
        stage_bytes: int,
        on_run: Callable[[ByteRange, int], None] | None = None,
    ) -> None:
        self._files, self._sizes, self._on_run = files, files.sizes, on_run
        self._stage = memoryview(bytearray(stage_bytes))

    def fill(self, reads: Sequence[ReadItem], box: Box, *, itemsize: int, out: memoryview) -> None:
        """Write the elements of ``box``, packed row-major, to the start of ``out``.

        Raises CheckpointError when the reads do not hold every element once, UnreadableError when a
        file is truncated or cannot be read.
        """
        copies = copies_of(reads, box, itemsize=itemsize)
        for copy in copies:
            if self._files.has_descriptor(copy.path):
                with self._files.descriptor(copy.path) as fd:
                    for block in self._blocks_of(copy):
                        self._run(fd, block, out)
        self._run_far([copy for copy in copies if not self._files.has_descriptor(copy.path)], out)
        if self._on_run is not None:
            for copy in copies:
                if not copy.dims:
                    self._seen(copy.path, copy.source, out[copy.target : copy.target + copy.unit])

    def _run_far(self, copies: Sequence[StridedCopy], out: memoryview) -> None:
        """Carry out copies of stores, whose blocks are asked for together."""
        batch: list[StridedCopy] = []
        left = _FETCHED * len(self._stage)
        for block in chain.from_iterable(map(self._blocks_of, copies)):
            batch.append(block)
            left -= span_of(block)
            if left <= 0:
                self._run_batch(batch, out)
                batch, left = [], _FETCHED * len(self._stage)
        self._run_batch(batch, out)

    def _run_batch(self, batch: Sequence[StridedCopy], out: memoryview) -> None:
        self._files.fetch((block.path, block.source, span_of(block)) for block in batch)
        for block in batch:
            self._run(None, block, out)

    def _seen(self, path: str, offset: int, view: memoryview) -> None:
        if self._on_run is not None:
            self._on_run(ByteRange(path, offset, len(view)), crc32(view))

    def run_jobs(self, jobs: list[Job], out: memoryview) -> None:
        """Carry out many small copies; those that lie close in a file are one read.

        Sorts ``jobs`` in place. Raises UnreadableError.
        """
        jobs.sort()
        far = {path for path in {job[0] for job in jobs} if not self._files.has_descriptor(path)}
        self._files.fetch((path, start, nbytes) for path, start, nbytes, _ in jobs if path in far)
        stage, limit = self._stage, len(self._stage)
        first, count = 0, len(jobs)
        while first < count:
            path, start, nbytes, target = jobs[first]
            near = -1 if path in far else self._sizes.near  # what was fetched is one by one
            end, last = start + nbytes, first + 1
            while last < count:
                other, source, length, _ = jobs[last]
                if other != path or source - end > near or source + length - start > limit:
                    break
                end, last = max(end, source + length), last + 1
            if last == first + 1:
                self._files.read_into(path, start, out[target : target + nbytes])
            else:
                self._files.read_into(path, start, stage[: end - start])
                for _, source, length, target in jobs[first:last]:
                    place = source - start
                    out[target : target + length] = stage[place : place + length]
            if self._on_run is not None:
                for path, source, length, target in jobs[first:last]:
                    self._seen(path, source, out[target : target + length])
            first = last

    def _blocks_of(self, copy: StridedCopy) -> Iterator[StridedCopy]:
        return blocks_of(copy, limit=len(self._stage), gap=self._sizes.gap)

    def _run(self, fd: int | None, block: StridedCopy, out: memoryview) -> None:
        if block.dims:
            self._spread(fd, block, out)
        else:
            place = out[block.target : block.target + block.unit]
            self._read_full(fd, block.path, place, block.source)

    def _spread(self, fd: int | None, block: StridedCopy, out: memoryview) -> None:
        """Read a block into the staging buffer, and copy it from there to its places."""
        stage = self._stage[: span_of(block)]
        self._read_full(fd, block.path, stage, block.source)
        # Straight to their places, without the staging buffer, was 1.2 x as fast: too little.
        if block.unit >= self._sizes.long_row:
            for source, target in steps(block.dims):
                place = block.target + target
                out[place : place + block.unit] = stage[source : source + block.unit]
            return
        with IMPORTING:  # late: it costs more than a small copy, and most copies have no strides
            import numpy as np

        is_word = block.unit == block.itemsize and block.itemsize in _WORDS
        width = block.itemsize if is_word else 1
        shape = (*(dim.size for dim in block.dims), block.unit // width)
        word = _WORDS[width]
        into = (*(dim.target for dim in block.dims), width)
        by = (*(dim.source for dim in block.dims), width)
        spread = np.ndarray(shape, word, buffer=out, offset=block.target, strides=into)
        spread[...] = np.ndarray(shape, word, buffer=stage, strides=by)

    def _read_full(self, fd: int | None, path: str, view: memoryview, offset: int) -> None:
        """Fill a view; ``fd`` is None for a file that is not on this machine."""
        if fd is None or os.preadv(fd, [view], offset) != len(view):
            self._files.read_into(path, offset, view)  # goes on after a short read, or says why not


def read_box(
    entry: TensorEntry,
    box: Box,
    *,
    files: Files,
    slab_bytes: int | None = None,
    on_run: OnRun | None = None,
) -> Iterator[memoryview]:
    """The raw bytes of a box of a tensor, packed row-major, in pieces of about ``slab_bytes``, by
    default those of a slab.

    Each piece holds whole elements. All pieces share one buffer: use or copy a piece before asking
    for the next. Twice ``slab_bytes`` are held in memory, whatever the size of the box, of a store
    four times. ``on_run`` gets runs of bytes that go to one place, with their CRC-32.

    Raises IncompleteError when the chunks do not cover the box, UnreadableError when a file is cut
    short or cannot be read.
    """
    itemsize = entry.dtype.itemsize
    known = KnownReads(Finder(entry).reads(box))
    wanted = files.sizes.slab if slab_bytes is None else slab_bytes
    slab_bytes = max(itemsize, min(wanted, box.numel * itemsize))
    buffer = memoryview(bytearray(slab_bytes))
    reader = ChunkReader(files, stage_bytes=max(slab_bytes, 4096), on_run=on_run)
    for slab in slabs(box, max_numel=slab_bytes // itemsize):
        reader.fill(known.reads(slab), slab, itemsize=itemsize, out=buffer)
        yield buffer[: slab.numel * itemsize]


def stream_box(
    entry: TensorEntry, box: Box, *, files: Files, on_run: OnRun | None = None
) -> Iterator[memoryview]:
    """The bytes that `read_box` gives, in pieces of one step each that share one buffer.

    Where each chunk is one run of bytes of a file, a piece takes two steps of the interpreter: for
    many threads that only look at bytes in their order. ``on_run`` then gets each run with its
    CRC-32. Raises as it.
    """
    itemsize = entry.dtype.itemsize
    runs = runs_of(Finder(entry).reads(box), box, itemsize=itemsize)
    if runs is None or not all(files.has(run.path, run.source, run.unit) for run in runs):
        yield from read_box(entry, box, files=files, on_run=on_run)
        return
    buffer = memoryview(bytearray(min(files.sizes.stream, box.numel * itemsize)))
    filled = 0
    for run in runs:
        crc = done = 0
        local = files.descriptor(run.path) if files.has_descriptor(run.path) else nullcontext(None)
        with local as fd:
            while done < run.unit:
                view = buffer[filled : filled + run.unit - done]
                if fd is None or os.preadv(fd, [view], run.source + done) != len(view):
                    files.read_into(run.path, run.source + done, view)
                if on_run is not None:
                    crc = crc32(view, crc)
                done, filled = done + len(view), filled + len(view)
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if on_run is not None:
            on_run(ByteRange(run.path, run.source, run.unit), crc)
    if filled:
        yield buffer[:filled]


def fetching(files: Files, *roots: str) -> Callable[[Iterable[TensorEntry]], None] | None:
    """What fetches all chunks of some tensors at once; None where no root is in a store."""
    if not any(map(is_address, roots)):
        return None
    return lambda entries: files.fetch(chunk.data for one in entries for chunk in one.chunks)


def first_difference(
    one: TensorEntry,
    other: TensorEntry,
    box: Box,
    *,
    files: Files,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> int | None:
    """How many bytes of a box are equal before a piece that differs; None when all are.

    ``on_bytes`` gets the number of bytes that were read of each. Raises what `read_box` raises.
    """
    here, there = (stream_box(entry, box, files=files) for entry in (one, other))
    return first_unequal(here, there, on_bytes=on_bytes)


def first_unequal(
    these: Iterator[memoryview],
    those: Iterator[memoryview],
    *,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> int | None:
    """How many bytes are equal before a piece that differs, or of which one side has too few.

    The two may be cut in pieces of any sizes, each of which is there until the next is asked for.
    """
    done, end, equals = 0, memoryview(b""), _equals()
    here = there = end
    while (here := here or next(these, end)) and (there := there or next(those, end)):
        count = min(len(here), len(there))
        if not equals(here[:count], there[:count]):
            return done
        here, there, done = here[count:], there[count:], done + count
        on_bytes(count)
    return done if here or there or next(those, end) else None


@cache
def _equals() -> Callable[[memoryview, memoryview], bool]:
    """Whether two writable views of as many bytes hold the same, by the C library's memcmp.

    It lets go of the interpreter's lock. Python's own comparison does not: 16 threads took five
    times as long.
    """
    import ctypes  # late: few compare, and it loads a library

    memcmp = ctypes.CDLL(None).memcmp
    memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    place, first = ctypes.byref, ctypes.c_char.from_buffer
    return lambda one, other: memcmp(place(first(one)), place(first(other)), len(one)) == 0


def read_array(entry: TensorEntry, box: Box, *, files: Files) -> bytearray:
    """The raw bytes of a box of a tensor, packed row-major: all in memory, so for small boxes."""
    out = bytearray()
    for piece in read_box(entry, box, files=files):
        out += piece
    return out
