"""Recognises items that are equal to one read before but for their elements and checksums.

Those of one shape and type have the same frame (`zip.frames`), so that only the first is parsed.
This module compares bytes; it does not know what an archive is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpt_tools.core.index import ByteRange
from ckpt_tools.formats.pickle.torch_stubs import StoredTensor
from ckpt_tools.formats.zip.frames import MAX_FRAME, Frame, frame_of
from ckpt_tools.formats.zip.read import Archive
from ckpt_tools.storage.reader import Files

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


class Templates:
    """The items that were learned, by their length, and blocks of files read ahead."""

    def __init__(self, files: Files, lengths: Mapping[str, int]) -> None:
        self._files = files
        self._lengths = lengths
        self._known: dict[int, list[tuple[Frame, ItemContents]]] = {}
        self._window = min(_MAX_WINDOW, max(MAX_FRAME, _AHEAD // max(1, len(lengths))))
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
            edge = min(length, MAX_FRAME)
            yield ByteRange(path, offset, edge)
            yield ByteRange(path, offset + length - edge, edge)

    def find(self, item: ByteRange) -> ItemContents | None:
        """What an item is, when it is like one that was learned."""
        path, offset, length = item
        # Of large items, only the end of one and the beginning of the next are worth reading.
        ahead = self._window if length <= self._window else 2 * MAX_FRAME
        for frame, place in self._known.get(length, ()):
            block, at = self._block(path, offset, len(frame.head), ahead=ahead)
            if not frame.begins(block, at):
                continue
            tail = length - frame.tail_at
            block, at = self._block(path, offset + frame.tail_at, tail, ahead=ahead)
            if frame.ends(block, at):
                return place
        return None

    def learn(self, item: ByteRange, archive: Archive, place: ItemContents) -> None:
        """Remember an item that was read, when little stands around its elements."""
        templates = self._known.setdefault(item.length, [])
        if len(templates) < _MAX_OF_ONE_LENGTH:
            frame = frame_of(archive, f"data/{place.stored.storage.key}")
            if frame is not None:
                templates.append((frame, place))

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
