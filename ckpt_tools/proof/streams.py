"""One pass over a tensor, chunk by chunk: sums, a checksum, and which rows are zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np  # noqa: TID253 - only whoever looks at values comes here, and late

from ckpt_tools.copying.cast import has_numbers
from ckpt_tools.copying.write import read_box
from ckpt_tools.core.index import Chunk, TensorEntry
from ckpt_tools.proof.moments import Moments, moments_of
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

# More rows than this are not told apart: one flag each would cost memory.
_MAX_ROWS = 1 << 22


@dataclass(frozen=True, slots=True)
class ChunkScan:
    """What one chunk holds: its sums, and the CRC-32 of its elements."""

    chunk: Chunk
    moments: Moments
    crc: int


@dataclass(frozen=True, slots=True)
class Scan:
    """What a tensor holds, in all and chunk by chunk in the order of their offsets.

    ``zero_rows`` are runs (start, end) of zero rows, looked for in tensors that are one chunk.
    """

    entry: TensorEntry
    total: Moments
    chunks: tuple[ChunkScan, ...]
    zero_rows: tuple[tuple[int, int], ...] = ()


def scan(entry: TensorEntry, files: Files, *, on_bytes: Callable[[int], None]) -> Scan:
    """Read a located tensor once. Equal boxes are read once, empty ones not at all."""
    unique = {chunk.box: chunk for chunk in reversed(entry.chunks) if chunk.box.numel}
    chunks = [unique[box] for box in sorted(unique)]
    rows = _Rows(entry) if len(chunks) == 1 and _has_rows(entry) else None
    total = Moments()
    scans: list[ChunkScan] = []
    for chunk in chunks:
        found, crc = Moments(), 0
        for piece in read_box(entry, chunk.box, files=files):
            crc = crc32(piece, crc)
            part = moments_of(piece, entry.dtype) if has_numbers(entry.dtype) else Moments()
            found.join(part)
            if rows is not None:
                rows.see(piece, may_be_zero=part.zeros > 0)
            on_bytes(len(piece))
        total.join(found)
        scans.append(ChunkScan(chunk, found, crc))
    return Scan(entry, total, tuple(scans), () if rows is None else tuple(rows.zero_runs()))


def _has_rows(entry: TensorEntry) -> bool:
    return bool(entry.shape) and 2 <= entry.shape[0] <= _MAX_ROWS


class _Rows:
    """Which rows of a tensor are zero, as its bytes come by in row-major order."""

    def __init__(self, entry: TensorEntry) -> None:
        self._row = prod(entry.shape[1:]) * entry.dtype.itemsize
        self._zero: NDArray[np.bool_] = np.ones(entry.shape[0], np.bool_)
        self._at = 0

    def see(self, piece: memoryview, *, may_be_zero: bool) -> None:
        """Take in the next bytes: some whole rows, or a part of one."""
        first, last = self._at // self._row, (self._at + len(piece) - 1) // self._row
        self._at += len(piece)
        if not may_be_zero:
            self._zero[first : last + 1] = False
        elif first == last:
            self._zero[first] &= not np.frombuffer(piece, "u1").any()
        else:
            found = np.frombuffer(piece, "u1").reshape(-1, self._row).any(axis=1)
            self._zero[first : last + 1] = ~found

    def zero_runs(self) -> Iterator[tuple[int, int]]:
        """Start and end of each run of zero rows."""
        edges = np.flatnonzero(np.diff(np.r_[False, self._zero, False].astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield int(start), int(end)
