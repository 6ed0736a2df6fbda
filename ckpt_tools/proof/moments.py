"""Sums over numbers that come block by block, and can be joined: mean, variance, extremes, counts.

Blocks are joined by the pairwise update of Chan, Golub and LeVeque (1979), in float64, so that a
billion small numbers lose nothing. NaN and infinities are counted and take no part in the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - only whoever looks at values comes here, and late

from ckpt_tools.copying.cast import exact_extremes, numbers
from ckpt_tools.core.dtypes import DType

if TYPE_CHECKING:
    from ckpt_tools.copying.cast import Numbers

_BLOCK = 64 << 10  # elements: 512 KiB of float64 stay in the cache


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


def moments_of(piece: memoryview, dtype: DType) -> Moments:
    """The moments of the raw elements in these bytes."""
    total = Moments()
    step = _BLOCK * dtype.itemsize
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
    found = Moments(numel=len(values), finite=len(finite), nan=nan, inf=inf, zeros=zeros)
    if len(finite) == 0:
        return found
    mean = finite.mean()
    away = finite - mean
    found.mean = complex(mean) if np.iscomplexobj(finite) else float(mean.real)
    found.m2 = sum_of_squares(away)
    found.squares = sum_of_squares(finite)
    sizes = np.abs(finite) if np.iscomplexobj(finite) else finite.real
    found.least, found.greatest = float(sizes.min()), float(sizes.max())
    return found


def sum_of_squares(values: Numbers) -> float:
    """The sum of the squared magnitudes.

    Not by BLAS, which starts threads of its own for it: with ours they are several times slower.
    """
    flat = values.view(np.float64)
    return float(np.einsum("i,i->", flat, flat))
