"""One pass over a tensor, chunk by chunk: moments, a checksum, and which rows are zero.

`Moments` are sums over blocks of numbers that can be joined: mean, variance, extremes, counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod, sqrt
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - imported late, and only to read values

from ckpt_tools.copying.cast import exact_extremes, has_numbers, numbers
from ckpt_tools.copying.read import read_box
from ckpt_tools.core.crc import crc32
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import Chunk, TensorEntry
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ckpt_tools.copying.cast import Numbers


@dataclass(slots=True)
class Moments:
    """What is known of the numbers so far. ``m2`` is the sum of squared distances to the mean.

    Extremes of complex numbers are those of their magnitudes.
    """

    numel: int = 0
    finite: int = 0
    mean: float | complex = 0.0
    m2: float = 0.0
    squares: float = 0.0
    least: float | None = None
    greatest: float | None = None
    nan: int = 0
    inf: int = 0
    zeros: int = 0

    @property
    def std(self) -> float | None:
        """The standard deviation of all these numbers (divided by n, not by n - 1)."""
        return sqrt(self.m2 / self.finite) if self.finite else None

    @property
    def l2(self) -> float | None:
        """The square root of the sum of squares."""
        return sqrt(self.squares) if self.finite else None

    def join(self, other: Moments) -> None:
        """Add what is known of other numbers."""
        total = self.finite + other.finite
        if other.finite:
            delta = other.mean - self.mean
            self.m2 += other.m2 + abs(delta) ** 2 * self.finite * other.finite / total
            self.mean += delta * other.finite / total
            self.squares += other.squares
        self.numel += other.numel
        self.finite = total
        self.least = min(_known(self.least, other.least), default=None)
        self.greatest = max(_known(self.greatest, other.greatest), default=None)
        self.nan += other.nan
        self.inf += other.inf
        self.zeros += other.zeros


def _known(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]


def moments_of(piece: memoryview, dtype: DType, *, at_once: int) -> Moments:
    """The moments of the raw elements in these bytes, so many at once; empty for no numbers."""
    total = Moments()
    if not has_numbers(dtype):
        return total
    step = at_once * dtype.itemsize
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(piece), step):
            block = piece[start : start + step]
            part = _block(numbers(block, dtype))
            extremes = exact_extremes(block, dtype)
            if extremes is not None:
                part.least, part.greatest = extremes
            total.join(part)
    return total


def _block(values: Numbers) -> Moments:
    total = values.sum()
    nan = inf = 0
    finite = values
    if not np.isfinite(total):
        nan = int(np.count_nonzero(np.isnan(values)))
        good = np.isfinite(values)
        finite = values[good]
        inf = len(values) - nan - len(finite)
    zeros = len(values) - int(np.count_nonzero(values))
    moments = Moments(numel=len(values), finite=len(finite), nan=nan, inf=inf, zeros=zeros)
    if len(finite) == 0:
        return moments
    mean = finite.mean()
    away = finite - mean
    moments.mean = complex(mean) if np.iscomplexobj(finite) else float(mean.real)
    moments.m2 = sum_of_squares(away)
    moments.squares = sum_of_squares(finite)
    sizes = np.abs(finite) if np.iscomplexobj(finite) else finite.real
    moments.least, moments.greatest = float(sizes.min()), float(sizes.max())
    return moments


def sum_of_squares(values: Numbers) -> float:
    """The sum of the squared magnitudes.

    Not by BLAS, which starts threads of its own for it: with ours they are several times slower.
    """
    flat = values.view(np.float64)
    return float(np.einsum("i,i->", flat, flat))


# Tensors with more rows are not looked through: one flag a row would cost memory.
_MAX_ROWS = 1 << 22


@dataclass(frozen=True, slots=True)
class Scan:
    """What a tensor holds, in all and chunk by chunk in the order of their offsets.

    ``chunks`` come with the moments and the CRC-32 of their elements. ``zero_rows`` are runs of
    zero rows (start, end), looked for in tensors that are one chunk.
    """

    entry: TensorEntry
    total: Moments
    chunks: tuple[tuple[Chunk, Moments, int], ...]
    zero_rows: tuple[tuple[int, int], ...] = ()


def scan(entry: TensorEntry, files: Files, *, on_bytes: Callable[[int], None]) -> Scan:
    """Read a located tensor once. Equal boxes are read once, empty ones not at all."""
    unique = {chunk.box: chunk for chunk in reversed(entry.chunks) if chunk.box.numel}
    chunks = [unique[box] for box in sorted(unique)]
    has_rows = bool(entry.shape) and 2 <= entry.shape[0] <= _MAX_ROWS
    rows = _Rows(entry) if len(chunks) == 1 and has_rows else None
    total = Moments()
    scans: list[tuple[Chunk, Moments, int]] = []
    for chunk in chunks:
        moments, crc = Moments(), 0
        for piece in read_box(entry, chunk.box, files=files):
            crc = crc32(piece, crc)
            part = moments_of(piece, entry.dtype, at_once=files.sizes.numbers)
            moments.join(part)
            if rows is not None:
                rows.see(piece, may_be_zero=part.zeros > 0)
            on_bytes(len(piece))
        total.join(moments)
        scans.append((chunk, moments, crc))
    return Scan(entry, total, tuple(scans), () if rows is None else tuple(rows.zero_runs()))


class _Rows:
    """Which rows of a tensor are zero, as its bytes come by in row-major order."""

    def __init__(self, entry: TensorEntry) -> None:
        self._row = prod(entry.shape[1:]) * entry.dtype.itemsize
        self._zero: NDArray[np.bool_] = np.ones(entry.shape[0], np.bool_)
        self._at = 0

    def see(self, piece: memoryview, *, may_be_zero: bool) -> None:
        """Add the next bytes: some whole rows, or a part of one."""
        first, last = self._at // self._row, (self._at + len(piece) - 1) // self._row
        self._at += len(piece)
        if not may_be_zero:
            self._zero[first : last + 1] = False
        elif first == last:
            self._zero[first] &= not np.frombuffer(piece, "u1").any()
        else:
            is_nonzero = np.frombuffer(piece, "u1").reshape(-1, self._row).any(axis=1)
            self._zero[first : last + 1] = ~is_nonzero

    def zero_runs(self) -> Iterator[tuple[int, int]]:
        """Start and end of each run of zero rows."""
        edges = np.flatnonzero(np.diff(np.r_[False, self._zero, False].astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            yield int(start), int(end)
