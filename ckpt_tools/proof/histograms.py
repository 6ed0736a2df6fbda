"""How the values of each tensor are spread: counts between its least and greatest, in equal steps.

A second pass after `stats`, which tells the extremes. Of complex numbers it counts magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np  # noqa: TID253 - only whoever looks at values comes here, and late

from ckpt_tools import formats
from ckpt_tools.copying.cast import numbers
from ckpt_tools.copying.write import read_box
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.proof.stats import Statistics
from ckpt_tools.proof.threads import Tally, ignore_bytes, in_threads
from ckpt_tools.storage.reader import Files

BINS = 32

Spread = tuple[float, float]


def histograms(
    index: CheckpointIndex,
    files: Files,
    found: Statistics,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Mapping[str, tuple[int, ...]]:
    """The counts of finite values in `BINS` equal steps, for each tensor with two values or more.

    ``found`` are the statistics of the same index. Reads every tensor once. Raises what keeps the
    tensors from being whole.
    """
    located = formats.locate(index, files)
    located.require_whole()
    spreads = {
        one.fqn: (float(one.min), float(one.max))
        for one in found.tensors
        if one.min is not None and one.max is not None and one.min < one.max
    }
    entries = [entry for entry in located.tensors if entry.fqn in spreads]
    tally = Tally(on_bytes)

    def count(entry: TensorEntry) -> tuple[int, ...]:
        return _counts(entry, files, spreads[entry.fqn], on_bytes=tally.add)

    counted = in_threads(count, entries, threads=threads, nbytes=_nbytes)
    return {entry.fqn: counts for entry, counts in zip(entries, counted, strict=True)}


def _nbytes(entry: TensorEntry) -> int:
    return entry.nbytes


def _counts(
    entry: TensorEntry, files: Files, spread: Spread, *, on_bytes: Callable[[int], None]
) -> tuple[int, ...]:
    totals = np.zeros(BINS, np.int64)
    least, greatest = spread
    for piece in read_box(entry, Box.whole(entry.shape), files=files):
        values = numbers(piece, entry.dtype)
        real = np.abs(values) if entry.dtype.kind == "complex" else values.real
        finite = real[np.isfinite(real)]
        # Halves keep the width of a range of float64's whole span from being infinite.
        place = (finite / 2 - least / 2) / (greatest / 2 - least / 2) * BINS
        totals += np.bincount(place.clip(0, BINS - 1).astype(np.int64), minlength=BINS)
        on_bytes(len(piece))
    return tuple(totals.tolist())
