"""CRC-32 as zip archives have it, and of bytes that several threads and processes see in parts."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection
from functools import lru_cache
from typing import NamedTuple

from ckpt_tools.core.index import ByteRange

try:  # up to ten times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:  # a processor that it is not made for
    from zlib import crc32

__all__ = ["KnownCrcs", "StoredCrc", "combine", "crc32"]

# The polynomial of zip's CRC-32 (ISO 3309), bit-reversed: bit 31 is the coefficient of x^0.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine(first: int, second: int, *, length: int) -> int:
    """The CRC-32 of two byte strings in a row, of their own CRCs and the second's length in bytes.

    Appending n bytes to a message multiplies its polynomial by x^(8n); the rest is a sum.
    """
    return _multiply(first, _shift(length)) ^ second


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _shift(length: int) -> int:
    """x^(8 * length), modulo the CRC's polynomial, by repeated squaring."""
    power, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        length >>= 1
    return power


class StoredCrc(NamedTuple):
    """The CRC-32 that a checkpoint keeps of a record, which the format calls ``name``."""

    record: ByteRange
    crc: int
    name: str


class KnownCrcs:
    """The CRC-32s of runs of bytes that were read for something else, from any thread: what a copy
    has seen is not read again.

    ``stored`` are those that the source keeps of items, as far as they were read with these, and
    ``overflowed`` the tensors of which a cast made finite values infinite.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], tuple[int, int]] = {}
        self.stored: dict[ByteRange, StoredCrc] = {}
        self.overflowed: set[str] = set()

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._runs)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs together."""
        return sum(length for length, _ in self._runs.values())

    def nbytes_in(self, paths: Collection[str]) -> int:
        """Bytes of the runs in these files."""
        return sum(length for (path, _), (length, _) in self._runs.items() if path in paths)

    def add(self, data: ByteRange, crc: int) -> None:
        """Add a run; of two that begin at one place, the longer one counts."""
        place = data.path, data.offset
        self._runs[place] = max(self._runs.get(place, (0, 0)), (data.length, crc))

    def crc_of(self, data: ByteRange) -> int | None:
        """The CRC-32 of a range that was seen run after run from its first byte to its last."""
        crc, at, end = 0, data.offset, data.offset + data.length
        while at < end:
            length, more = self._runs.get((data.path, at), (0, 0))
            if not length or at + length > end:
                return None
            crc = combine(crc, more, length=length)
            at += length
        return crc

    def packed(self) -> bytes:
        """All of it in few bytes, for another process."""
        runs: dict[str, list[tuple[int, int, int]]] = {}
        for (path, offset), (length, crc) in self._runs.items():
            runs.setdefault(path, []).append((offset, length, crc))
        stored: dict[str, list[tuple[int, int, int, int, int, str]]] = {}
        for (path, offset, length), ((_, start, nbytes), crc, name) in self.stored.items():
            stored.setdefault(path, []).append((offset, length, start, nbytes, crc, name))
        return zlib.compress(json.dumps([runs, stored, [*self.overflowed]]).encode(), 1)

    def add_packed(self, data: bytes) -> None:
        """Add what another process has seen."""
        runs, stored, overflowed = json.loads(zlib.decompress(data))
        self.overflowed.update(overflowed)
        for path, seen in runs.items():
            for offset, length, crc in seen:
                self.add(ByteRange(path, offset, length), crc)
        for path, known in stored.items():
            for offset, length, start, nbytes, crc, name in known:
                record = ByteRange(path, start, nbytes)
                self.stored[ByteRange(path, offset, length)] = StoredCrc(record, crc, name)
