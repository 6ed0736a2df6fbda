"""Checks the CRC-32s that a format keeps: `verify` of every byte, --check of what was copied.

A format says which bytes it has CRCs of (`Format.checksummed`). Of all others, reading proves only
that they can be read.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from threading import local
from typing import NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.parallel import Tally, choose_threads, ignore_bytes, in_threads
from ckpt_tools.core.crc import KnownCrcs, combine, crc32
from ckpt_tools.core.index import ByteRange, CheckpointIndex
from ckpt_tools.core.text import format_size, some
from ckpt_tools.errors import CheckpointError, UnreadableError
from ckpt_tools.formats.protocol import Checksummed, ChecksumPart
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files, Window

# Read once more after a copy that has not seen it whole.
_LITTLE = 64 << 20


class Damage(NamedTuple):
    """Bytes that are not what they should be, or cannot be read, and what is wrong with them."""

    data: ByteRange
    error: CheckpointError


@dataclass(slots=True)
class ReadResult:
    """What a reading of everything found: damages, CRCs that were right, bytes with and without.

    ``plain_files`` are those that have bytes without.
    """

    damages: list[Damage] = field(default_factory=list)
    crcs: int = 0
    checked_bytes: int = 0
    plain_bytes: int = 0
    plain_files: set[str] = field(default_factory=set)
    parts: list[tuple[Checksummed, int]] = field(default_factory=list)

    def add(self, other: ReadResult) -> None:
        """Add what another reading found."""
        self.damages += other.damages
        self.crcs += other.crcs
        self.checked_bytes += other.checked_bytes
        self.plain_bytes += other.plain_bytes
        self.plain_files |= other.plain_files
        self.parts += other.parts

    def check(self, one: Checksummed, crc: int) -> None:
        """Compare the CRC-32 of the bytes of ``one`` with the stored one."""
        where = _place(one)
        if crc == one.crc:
            self.crcs += 1
            return
        end = where.offset + where.length
        error = UnreadableError(
            f"{where.path}: {one.name} (bytes {where.offset:,} to {end:,}) is damaged: "
            f"its CRC-32 is {crc:08x}, the archive says {one.crc:08x}.",
            hint="Use another copy of the file; its data cannot be repaired.",
        )
        self.damages.append(Damage(where, error))


def read_everything(
    index: CheckpointIndex,
    files: Files,
    *,
    seen: KnownCrcs,
    threads: int | None,
    on_bytes: Callable[[int], None],
) -> ReadResult:
    """Read everything that a checkpoint needs and was not ``seen``, several ranges at a time.

    ``index`` is as its reader gave it, not located. Files that are not there are left out.
    """
    parts = list(formats.checksummed(index, files))
    return _read(parts, files, seen=seen, threads=threads, on_bytes=on_bytes)


def require_undamaged(
    index: CheckpointIndex,
    files: Files,
    *,
    seen: KnownCrcs,
    threads: int | None,
    lost: str = "OUT was not created. ",
) -> str:
    """Check the CRC-32s that a checkpoint keeps of the bytes of its entries, replicas left out.

    ``index`` is as its reader gave it, or a part of that. What was ``seen`` is not read again.
    Returns a sentence that says what was checked; ``lost`` is what an error's hint begins with.

    Raises UnreadableError with the names and boxes of what is damaged.
    """
    reading, bare, _ = _check_wanted(
        index, files, seen, reads_again=True, threads=threads, lost=lost
    )
    if not reading.crcs:
        return " The source has no checksums of them."
    some_of = "as far as they exist, " if bare else ""
    again = f"; {reading.checked_bytes:,} bytes were downloaded again for it"
    is_again = is_address(index.root) and reading.checked_bytes
    return (
        f" Their checksums in the source were checked, {some_of}and are right"
        f"{again if is_again else ''}."
    )


def check_copied(
    index: CheckpointIndex, files: Files, *, seen: KnownCrcs, threads: int | None
) -> tuple[str, ...]:
    """Check the CRC-32s that a checkpoint keeps of what was copied of it, and ``seen`` in passing.

    What is little is read once more: records that were copied in part, or not in their order. A
    note says how much else could not be checked. ``index`` is as its reader gave it, or a part.

    Raises UnreadableError with the names and boxes of what is damaged.
    """
    nbytes = sum(entry.nbytes for entry in index.tensors)
    is_little = nbytes - seen.nbytes <= max(_LITTLE, nbytes // 16)
    reads_again = is_little and not is_address(index.root)
    _, bare, unseen = _check_wanted(index, files, seen, reads_again=reads_again, threads=threads)
    parts = []
    if unseen:
        size = format_size(unseen)
        parts.append(f"{size} that was read in part or out of order (--check compares it)")
    if bare:
        parts.append(f"{format_size(bare)}, of which it keeps none")
    return (f"Not compared with checksums of the source: {'; '.join(parts)}.",) if parts else ()


def _check_wanted(
    index: CheckpointIndex,
    files: Files,
    seen: KnownCrcs,
    *,
    reads_again: bool,
    threads: int | None,
    lost: str = "OUT was not created. ",
) -> tuple[ReadResult, int, int]:
    """Check the records of a checkpoint that hold bytes of its entries.

    Also gives how many bytes of them have no CRC-32, and how many have one and were not looked at.
    Raises UnreadableError for what is damaged.
    """
    ranges = [chunk.data for entry in index.tensors for chunk in entry.chunks]
    spans = IntervalMap([*ranges, *(entry.data for entry in index.objects)])
    bare: list[int] = []
    unseen: list[int] = []

    def with_crcs(part: ChecksumPart, window: Window) -> Iterator[Checksummed]:
        stored = seen.stored.get(part.data)
        for one in part.open(window) if stored is None else [Checksummed(*stored)]:
            if not spans.meeting(_place(one)):
                continue
            if one.crc is None:
                bare.append(one.data.length)
            elif reads_again or seen.crc_of(one.record or one.data) is not None:
                yield one
            else:
                unseen.append(one.data.length)

    held = spans.files()
    needed = replace(index, files=tuple(file for file in index.files if file.path in held))
    parts = [
        part._replace(open=partial(with_crcs, part))
        for part in formats.checksummed(needed, files)
        if spans.meeting(part.data)
    ]
    reading = _read(parts, files, seen=seen, threads=threads)
    if reading.damages:
        raise _damaged(index, reading.damages, lost)
    return reading, sum(bare), sum(unseen)


def _damaged(index: CheckpointIndex, damages: Sequence[Damage], lost: str) -> UnreadableError:
    """The error that names the entries whose bytes are damaged."""
    spans = IntervalMap([damage.data for damage in damages])
    named: dict[str, str] = {}
    for entry in index.tensors:
        for chunk in entry.chunks:
            if spans.meeting(chunk.data):
                rank = "" if chunk.rank is None else f" of rank {chunk.rank}"
                named[f"{entry.fqn} {chunk.box}{rank}"] = entry.fqn
    named |= {entry.fqn: entry.fqn for entry in index.objects if spans.meeting(entry.data)}
    return UnreadableError(
        f"{index.root}: what was read of it is damaged: {some(list(named))}. "
        f"{damages[0].error.message}",
        hint=f"{lost}`ckpt-tools verify` lists what is damaged and what is still complete; "
        "--exclude leaves out damaged tensors.",
        about=set(named.values()),
    )


def _place(one: Checksummed) -> ByteRange:
    """The byte range in the checkpoint that a CRC-32 is of."""
    return one.stored or one.record or one.data


def _read(
    parts: Sequence[ChecksumPart],
    files: Files,
    *,
    seen: KnownCrcs,
    threads: int | None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> ReadResult:
    checker, total = _Checker(files, Tally(on_bytes), seen), ReadResult()
    # As they lie in the files, so that small ones are read together.
    places = sorted(range(len(parts)), key=lambda place: parts[place].data)
    is_far = any(is_address(part.data.path) for part in parts[:1])
    if threads is None and not is_far:
        # What was seen is only looked up, and threads would stand in one another's way.
        nbytes = sum(part.nbytes for part in parts)
        nbytes -= seen.nbytes_in({part.data.path for part in parts})
        threads = choose_threads(nbytes, files.sizes, lanes=len(parts))
    results = in_threads(
        checker.check,
        [parts[place] for place in places],
        files.sizes,
        threads=threads,
        nbytes=lambda part: part.nbytes,
        ahead=checker.fetch if is_far else None,
    )
    for _, found in sorted(zip(places, results, strict=True), key=itemgetter(0)):
        total.add(found)
    _combine(total)
    return total


def _combine(total: ReadResult) -> None:
    """Check records that were read in parts; one with an unreadable part is a damage already."""
    records: dict[ByteRange, dict[ByteRange, tuple[Checksummed, int]]] = {}
    for one, crc in total.parts:
        records.setdefault(one.record or one.data, {})[one.data] = one, crc
    for record, parts in records.items():
        whole = done = 0
        for data, (one, crc) in sorted(parts.items()):
            whole = combine(whole, crc, length=data.length)
            done += data.length
            if done == record.length:
                total.check(one, whole)


class _Checker:
    """Checks parts from several threads; each has its own window."""

    def __init__(self, files: Files, tally: Tally, seen: KnownCrcs) -> None:
        self._files = files
        self._tally = tally
        self._seen = seen
        self._own = local()

    def fetch(self, parts: Iterable[ChecksumPart]) -> None:
        """Fetch parts of a store together; one that cannot be read is found when it is checked."""
        with suppress(CheckpointError):
            self._files.fetch(part.data for part in parts if part.data not in self._seen.stored)

    def check(self, part: ChecksumPart) -> ReadResult:
        """Read the bytes of a part; what is wrong with them becomes a damage, never an error."""
        reading = ReadResult()
        try:
            for one in part.open(self._window()):
                self._check_one(one, reading)
        except CheckpointError as error:
            reading.damages.append(Damage(part.data, error))
        return reading

    def _check_one(self, one: Checksummed, reading: ReadResult) -> None:
        reading.crcs += len(one.alike)
        reading.checked_bytes += sum(one.alike)
        try:
            if one.crc is None:
                reading.plain_bytes += sum(map(len, self._blocks(one.data)))
                reading.plain_files.add(one.data.path)
                return
            whole = one.record or one.data
            known = self._seen.crc_of(whole) if whole.length else None
            if known is not None:
                if one.data.offset == whole.offset:
                    reading.check(one, known)
                return
            crc = 0
            for block in self._blocks(one.data):
                crc = crc32(block, crc)
        except CheckpointError as error:
            reading.damages.append(Damage(one.data, error))
            return
        reading.checked_bytes += one.data.length
        if one.record is not None:
            reading.parts.append((one, crc))
        else:
            reading.check(one, crc)

    def _blocks(self, data: ByteRange) -> Iterator[memoryview]:
        """The bytes of a range in blocks, which share one buffer."""
        for block in self._window().views(*data):
            self._tally.add(len(block))
            yield block

    def _window(self) -> Window:
        window: Window | None = getattr(self._own, "window", None)
        if window is None:
            sizes = self._files.sizes
            nbytes = sizes.checked_edge if self._seen else sizes.checked
            window = self._own.window = Window(self._files, nbytes)
        return window


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
