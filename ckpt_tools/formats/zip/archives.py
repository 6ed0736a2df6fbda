"""Many archives: what those alike have in common, and the CRC-32s that each keeps of its records.

torch saves every item of DCP as an archive of its own, and those of one shape and type are equal
byte for byte outside of a few places, so that only the first is parsed.

An item of torch 2.13 with four float32 in 1,577 bytes:

    0 to 704      head: equal in all (headers, the pickle, …)
    704 to 720    the elements, which are not compared
    720 to 1577   tail: equal but for bytes 724 to 728 and 1298 to 1302, the sum of the elements;
                  960 to 1000, a random number, and its sum at 1004 to 1008 and 1419 to 1423

Another item of 1,577 bytes with the same head and the same rest of the tail is four float32 in its
bytes 704 to 720: its archive need not be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from ckpt_tools.core.crc import StoredCrc, crc32
from ckpt_tools.core.index import ByteRange, CheckpointIndex
from ckpt_tools.errors import CheckpointError, UnreadableError
from ckpt_tools.formats.foreign import HEAD, sniff
from ckpt_tools.formats.protocol import (
    PART_BYTES,
    Checksummed,
    ChecksumPart,
    cut,
    lengths_of,
    plain_parts,
    ready,
)
from ckpt_tools.formats.zip.read import Archive, VaryingRecord, archive_in, ends_of, read_archive
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files, Window, batches

# What an archive may have before and after its record; torch writes less than 2 KiB of each.
MAX_FRAME = 4096
# A random number that torch gives every archive.
_SERIAL = ".data/serialization_id"
_MOST_OF_ONE_LENGTH = 16
_PART_BYTES = PART_BYTES
# Small items of DCP follow one another in a file.
_AHEAD = 64 << 10

T = TypeVar("T")
# Given a place in an archive and a number of bytes: a block with these bytes, and where.
Block: TypeAlias = Callable[[int, int], tuple[bytes | bytearray, int]]


class Frame(NamedTuple):
    """The bytes before the record ``varying[0]``, and those after it, which begin at ``tail_at``.

    ``parts`` are what is equal of the tail, with their places in it. ``varying`` are the records
    that differ; all places are relative to the archive.
    """

    head: bytes
    tail_at: int
    parts: tuple[tuple[int, bytes], ...]
    varying: tuple[VaryingRecord, ...]

    def ends(self, block: bytes | bytearray, at: int) -> bool:
        """Whether this is the tail of such an archive."""
        for start, data in self.parts:  # noqa: SIM110 (a generator takes twice as long)
            if not block.startswith(data, at + start):
                return False
        return True

    def stored_crc(self, data: ByteRange, block: Block) -> StoredCrc | None:
        """What such an archive, which fills ``data``, keeps of its elements; None when it has no
        CRC-32 of them, or that of another record is wrong.
        """
        tail, at = block(self.tail_at, data.length - self.tail_at)
        zero = at - self.tail_at
        one, *others = self.varying
        for other in others:
            crc = _uint32(tail, zero + other.sums[0])
            if crc32(tail[zero + other.start : zero + other.end]) != crc:
                return None
        elements = ByteRange(data.path, data.offset + one.start, one.end - one.start)
        crc = _uint32(tail, zero + one.sums[0])
        return StoredCrc(elements, crc, f"record {one.name!r}") if crc else None


class KnownArchives(Generic[T]):
    """Archives that were read, with what was learned of each: one like them need not be parsed.

    To parse one takes longer than a MiB of it, and the interpreter's lock all the while.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[tuple[Frame, T]]] = {}

    def find(self, length: int, block: Block) -> tuple[Frame, T] | None:
        """The known archive that is like one of this length; its bytes are compared."""
        for frame, learned in self._known.get(length, ()):
            data, at = block(0, len(frame.head))
            if data.startswith(frame.head, at):
                data, at = block(frame.tail_at, length - frame.tail_at)
                if frame.ends(data, at):
                    return frame, learned
        return None

    def has_room(self, length: int) -> bool:
        """Whether one more archive of this length may be learned."""
        return len(self._known.get(length, ())) < _MOST_OF_ONE_LENGTH

    def learn(self, archive: Archive, name: str, learned: T) -> Frame | None:
        """Remember an archive by all but this record, when little stands around that."""
        frame = frame_of(archive, name) if self.has_room(archive.length) else None
        if frame is not None:
            self._known.setdefault(archive.length, []).append((frame, learned))
        return frame


def frame_of(archive: Archive, name: str) -> Frame | None:
    """What stands around a record; None when it is much, or damaged, or not as torch writes it."""
    try:
        varying = archive.varying((name, _SERIAL))
        start, tail_at = varying[0].start, varying[0].end
        if max(start, archive.length - tail_at) > MAX_FRAME:
            return None
        head, tail = archive.taken(0, start), archive.taken(tail_at, archive.length)
    except UnreadableError:
        return None  # damaged where nothing is read from: good for itself, no example for others
    holes = [(one.start, one.end) for one in varying[1:]]
    holes += [(at, at + 4) for one in varying for at in one.sums]
    if min(holes)[0] < tail_at:
        return None  # its sums stand before the elements, which torch does not do
    parts, at = [], 0
    for start, end in sorted(holes):
        parts.append((at, tail[at : start - tail_at]))
        at = end - tail_at
    parts.append((at, tail[at:]))
    return Frame(head, tail_at, tuple(parts), tuple(varying))


def parts_of_files(index: CheckpointIndex, files: Files) -> Iterator[ChecksumPart]:
    """The archives of a checkpoint; a file of torch.save's old format has no checksums."""
    heads = {path: min(HEAD, length) for path, length in lengths_of(index).items()}
    files.fetch((path, 0, head) for path, head in heads.items())
    kinds = {path: sniff(files.read(path, 0, head)) for path, head in heads.items()}
    for path, length in lengths_of(index).items():
        if kinds[path] == "zip":
            yield from Archives(files).parts(ByteRange(path, 0, length))
        else:
            yield from plain_parts(path, length)


class Archives:
    """Archives to be checked from several threads: one like a good one need not be opened."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._good: KnownArchives[tuple[int, ...]] = KnownArchives()  # lengths of other records

    def parts(self, data: ByteRange) -> Iterator[ChecksumPart]:
        """An archive as one part; a large one in parts of about 64 MiB, when it can be opened."""
        whole = ChecksumPart(data, data.length, partial(self.records, data))
        if data.length <= _PART_BYTES:
            yield whole
            return
        try:
            archive = archive_in(self._files, data, data.path)
            found = {name: archive.record(name) for name in archive.names}
        except CheckpointError:
            yield whole
            return
        small: list[str] = []
        for name, (offset, length, crc) in found.items():
            if crc is None or length <= _PART_BYTES:
                small.append(name)
                continue
            record = ByteRange(data.path, offset, length)
            for part in cut(record, _PART_BYTES):
                one = Checksummed(part, crc, f"record {name!r}", record=record)
                yield ChecksumPart(part, part.length, partial(ready, one))
        for group in batches(small, lambda name: found[name].length, _PART_BYTES):
            yield ChecksumPart(data, _PART_BYTES, partial(self.records, data, only=group))

    def records(
        self, data: ByteRange, window: Window, *, only: Collection[str] = ()
    ) -> Iterator[Checksummed]:
        """The records of the archive that fills ``data``, all or ``only`` some.

        Raises UnreadableError where the archive, or the header of a record, is damaged.
        """
        path, start, size = data
        if size <= window.nbytes:
            window.block(path, start, size, until=start + max(size, _AHEAD))
        else:
            self._files.fetch(ends_of(data, window.nbytes // 16))  # 64 KiB, or no more than a frame
        known = None if only else self._known(data, window)
        if known is not None:
            yield known
            return

        def read(offset: int, length: int) -> bytes:
            return window.read(path, offset, length, until=start + size)

        if is_address(path) and window.nbytes < min(size, self._files.sizes.checked):
            archive = archive_in(self._files, data, path)  # no more than the headers is read
        else:
            archive = read_archive(read, offset=start, length=size, where=path)
        if not only:
            self._keep_kind(data, self._learn(archive))
        for name in only or archive.names:
            offset, length, crc = archive.record(name)
            yield Checksummed(ByteRange(path, offset, length), crc, f"record {name!r}")

    def _known(self, data: ByteRange, window: Window) -> Checksummed | None:
        """The elements of an archive whose other records are those of a good one."""
        path, offset, length = data

        def block(at: int, nbytes: int) -> tuple[bytearray, int]:
            return window.block(path, offset + at, nbytes, until=offset + at + nbytes)

        found = self._good.find(length, block)
        if found is None:
            return None
        frame, others = found
        stored = frame.stored_crc(data, block)
        if stored is None:
            return None
        self._keep_kind(data, frame)
        return Checksummed(*stored, alike=others)

    def _keep_kind(self, data: ByteRange, frame: Frame | None) -> None:
        if frame is not None and is_address(data.path):
            self._files.kinds[data] = frame

    def _learn(self, archive: Archive) -> Frame | None:
        """Remember an archive of one record of elements, when all others are as their CRCs say."""
        elements = [name for name in archive.names if name.startswith("data/")]
        if len(elements) != 1 or not self._good.has_room(archive.length):
            return None
        others = [name for name in archive.names if name not in elements]
        try:
            lengths = tuple(len(archive.read(name)) for name in others)
            if all(archive.record(name).crc is not None for name in others):
                return self._good.learn(archive, elements[0], lengths)
        except CheckpointError:
            pass  # good for no example; it is checked as any other
        return None


def _uint32(block: bytes | bytearray, at: int) -> int:
    return int.from_bytes(block[at : at + 4], "little")
