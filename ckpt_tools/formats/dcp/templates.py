"""Recognises items that are equal to one read before but for their elements and checksums.

torch saves every item as an archive of its own, and those of one shape and type are equal byte for
byte outside of a few places, so that only the first is parsed. This module compares bytes; it does
not know what an archive is.

An item of torch 2.13 with four float32 in 1,577 bytes:

    0 to 704      head: equal in all (headers, the pickle, …)
    704 to 720    the elements, which are not compared
    720 to 1577   tail: equal but for bytes 724 to 728 and 1298 to 1302, the sum of the elements;
                  960 to 1000, a random number, and its sum at 1004 to 1008 and 1419 to 1423

Another item of 1,577 bytes with the same head and the same rest of the tail is four float32 in its
bytes 704 to 720: its archive need not be opened.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpt_tools.core.index import ByteRange
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle.torch_stubs import StoredTensor
from ckpt_tools.formats.zip.read import Archive
from ckpt_tools.storage.reader import Files

# What an item may have before and after its elements; torch writes less than 2 KiB of each.
_MAX_FRAME = 4096
_MAX_OF_ONE_LENGTH = 16
_AHEAD = 16 << 20
_MAX_WINDOW = 64 << 10


class ItemContents(NamedTuple):
    """What an item is: the tensor that it says it holds, and where its bytes lie in the item.

    ``strides`` are None for elements that are packed row-major.
    """

    stored: StoredTensor
    offset: int
    length: int
    strides: tuple[int, ...] | None


class Template(NamedTuple):
    """The bytes around the elements, which end at ``tail_at``, and what such an item is."""

    head: bytes
    tail_at: int
    parts: tuple[tuple[int, bytes], ...]
    found: ItemContents


class Templates:
    """The items that were learned, by their length, and blocks of files read ahead."""

    def __init__(self, files: Files, lengths: Mapping[str, int]) -> None:
        self._files = files
        self._lengths = lengths
        self._known: dict[int, list[Template]] = {}
        self._window = min(_MAX_WINDOW, max(_MAX_FRAME, _AHEAD // max(1, len(lengths))))
        self._blocks: dict[str, tuple[int, bytes]] = {}
        self._fetched: dict[str, tuple[list[int], list[bytes]]] = {}

    def fetch(self, items: Iterable[ByteRange]) -> None:
        """Read what stands around the elements of these items, many at a time.

        A store answers after tens of milliseconds: thousands of items asked for one by one are
        minutes.
        """
        windows = [window for item in items for window in self._ends_of(item)]
        joined: list[ByteRange] = []
        for window in sorted(windows):
            last = joined[-1] if joined else ByteRange("", 0, 0)
            end = window.offset + window.length
            if window.path == last.path and window.offset <= last.offset + last.length:
                joined[-1] = last._replace(length=max(last.length, end - last.offset))
            else:
                joined.append(window)
        for window, block in zip(joined, self._files.read_many(joined), strict=True):
            starts, data = self._fetched.setdefault(window.path, ([], []))
            starts.append(window.offset)
            data.append(block)

    def _ends_of(self, item: ByteRange) -> Iterable[ByteRange]:
        path, offset, length = item
        if offset + length <= self._lengths.get(path, 0):
            edge = min(length, _MAX_FRAME)
            yield ByteRange(path, offset, edge)
            yield ByteRange(path, offset + length - edge, edge)

    def find(self, item: ByteRange) -> ItemContents | None:
        """What an item is, when it is like one that was learned."""
        path, offset, length = item
        # Of large items, only the end of one and the beginning of the next are worth reading.
        ahead = self._window if length <= self._window else 2 * _MAX_FRAME
        for head, tail_at, parts, place in self._known.get(length, ()):
            block, at = self._block(path, offset, len(head), ahead=ahead)
            if not block.startswith(head, at):
                continue
            block, at = self._block(path, offset + tail_at, length - tail_at, ahead=ahead)
            for start, data in parts:
                if not block.startswith(data, at + start):
                    break
            else:
                return place
        return None

    def learn(self, item: ByteRange, archive: Archive, place: ItemContents) -> None:
        """Remember an item that was read, when little stands around its elements."""
        record = f"data/{place.stored.storage.key}"
        start, length = archive.record(record).offset - item.offset, archive.record(record).length
        tail_at = start + length
        templates = self._known.setdefault(item.length, [])
        if max(start, item.length - tail_at) > _MAX_FRAME or len(templates) >= _MAX_OF_ONE_LENGTH:
            return
        try:
            holes = archive.loose_ranges((record, ".data/serialization_id"))
        except UnreadableError:
            return  # damaged where nothing is read from: good for itself, but no example for others
        if any(hole[0] < start for hole in holes):
            return  # its sums stand before the elements, which torch does not do
        head = self._take(item.path, item.offset, start)
        tail = self._take(item.path, item.offset + tail_at, item.length - tail_at)
        inside = [(a - tail_at, b - tail_at) for a, b in holes if a >= tail_at]
        templates.append(Template(head, tail_at, tuple(_around(tail, inside)), place))

    def _take(self, path: str, offset: int, length: int) -> bytes:
        block, at = self._block(path, offset, length, ahead=self._window)
        return block[at : at + length]

    def _block(self, path: str, offset: int, length: int, *, ahead: int) -> tuple[bytes, int]:
        """A block of a file that holds these bytes, and where: the last one, or one read now."""
        starts, blocks = self._fetched.get(path, ((), ()))
        place = bisect_right(starts, offset) - 1
        if place >= 0 and offset + length <= starts[place] + len(blocks[place]):
            return blocks[place], offset - starts[place]
        start, data = self._blocks.get(path, (0, b""))
        if offset < start or offset + length > start + len(data):
            start = offset
            left = self._lengths.get(path, 0) - offset
            data = self._files.read(path, offset, max(length, min(ahead, left)))
            self._blocks[path] = start, data
        return data, offset - start


def _around(data: bytes, holes: Iterable[tuple[int, int]]) -> Iterable[tuple[int, bytes]]:
    """The parts of the data between the holes, each with its place."""
    at = 0
    for start, end in sorted(holes):
        yield at, data[at:start]
        at = end
    yield at, data[at:]
