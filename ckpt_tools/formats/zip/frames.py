"""What archives have in common that are equal but for the contents of one record.

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

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.zip.read import Archive, VaryingRecord

# What an archive may have before and after its record; torch writes less than 2 KiB of each.
MAX_FRAME = 4096
# A random number that torch gives every archive.
_SERIAL = ".data/serialization_id"
_MOST_OF_ONE_LENGTH = 16

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
