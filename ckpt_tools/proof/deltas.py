"""How far two tensors of one shape are apart, element by element, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - imported late, and only to read values

from ckpt_tools.copying.cast import has_numbers, numbers
from ckpt_tools.copying.read import read_array
from ckpt_tools.core.geometry import Box, slabs
from ckpt_tools.core.index import TensorEntry
from ckpt_tools.core.records import Json, as_json
from ckpt_tools.proof.diff_options import DiffOptions
from ckpt_tools.proof.scan import sum_of_squares
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Flags = NDArray[np.bool_]


@dataclass(slots=True)
class Delta:
    """How two tensors differ: elements beyond the tolerance, how far, and where.

    ``max_abs`` and ``at`` are of the largest finite difference, ``first`` is where the first
    element beyond the tolerance is. ``nan`` counts the elements whose difference is no number: NaN
    or infinite on one side only.
    """

    numel: int
    differing: int = 0
    max_abs: float = 0.0
    at: tuple[int, ...] | None = None
    first: tuple[int, ...] | None = None
    nan: int = 0
    squares: float = 0.0
    reference: float = 0.0

    @property
    def relative_l2(self) -> float | None:
        """The L2 norm of the difference over that of the first tensor; None when that is zero."""
        return sqrt(self.squares / self.reference) if self.reference > 0 else None

    def to_dict(self) -> dict[str, Json]:
        """The values of a difference as `diff --json` prints them."""
        return {
            "numel": self.numel,
            "differing": self.differing,
            "nonfinite": self.nan,
            "max_abs": self.max_abs,
            "at": as_json(self.at),
            "first": as_json(self.first),
            "relative_l2": self.relative_l2,
        }


def delta(a: TensorEntry, b: TensorEntry, files: Files, *, options: DiffOptions) -> Delta:
    """Compare two located tensors of one shape by their values, whatever their types."""
    sums = Delta(a.numel)
    for box in slabs(Box.whole(a.shape), max_numel=files.sizes.numbers):
        one, other = (memoryview(read_array(side, box, files=files)) for side in (a, b))
        bits: Flags | None = None
        if a.dtype == b.dtype:
            raw = (np.frombuffer(side, "u1").reshape(-1, a.dtype.itemsize) for side in (one, other))
            bits = np.not_equal(*raw).any(axis=1)
        if not has_numbers(a.dtype) or not has_numbers(b.dtype):
            _count(sums, np.ones(box.numel, np.bool_) if bits is None else bits, box)
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            x, y = numbers(one, a.dtype), numbers(other, b.dtype)
            away = np.abs(x - y)
            away[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
            nonfinite = ~np.isfinite(away)
            if options.is_bitwise:
                beyond = away != 0.0 if bits is None else bits
            else:
                beyond = nonfinite | (away > options.atol + options.rtol * np.abs(y))
            _count(sums, beyond, box)
            sums.nan += int(np.count_nonzero(nonfinite))
            away[nonfinite] = 0.0
            place = int(away.argmax())
            if float(away[place]) > sums.max_abs:
                sums.max_abs, sums.at = float(away[place]), _coordinates(place, box)
            sums.squares += sum_of_squares(away)
            sizes = np.abs(x)
            sizes[~np.isfinite(sizes)] = 0.0
            sums.reference += sum_of_squares(sizes)
    return sums


def _count(sums: Delta, beyond: Flags, box: Box) -> None:
    count = int(np.count_nonzero(beyond))
    if count and sums.first is None:
        sums.first = _coordinates(int(beyond.argmax()), box)
    sums.differing += count


def _coordinates(place: int, box: Box) -> tuple[int, ...]:
    """The global coordinates of an element of a box, by its place in row-major order."""
    index = np.unravel_index(place, box.sizes) if box.sizes else ()
    return tuple(int(i) + start for i, start in zip(index, box.offsets, strict=True))
