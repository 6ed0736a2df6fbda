"""Mean, spread, extremes, norm and histogram of each tensor, and signs of a lost rank.

Tensors are streamed chunk by chunk, as they are stored, so that a chunk that is zero or a copy of
another one is found. `histograms` reads them a second time, once the extremes are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np  # noqa: TID253 - imported late, and only to read values

from ckpt_tools import formats
from ckpt_tools.copying.cast import numbers
from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.copying.parallel import Tally, ignore_bytes, in_threads
from ckpt_tools.copying.read import fetching, read_box
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Section, TensorEntry
from ckpt_tools.core.records import Json, as_json, record_json
from ckpt_tools.core.text import Shown, counted, first_of
from ckpt_tools.proof.anomalies import Anomaly, anomalies_of, zero_row_anomalies
from ckpt_tools.proof.pairs import located_batches
from ckpt_tools.proof.scan import Scan, scan
from ckpt_tools.storage.reader import Files


@dataclass(frozen=True, slots=True)
class TensorStats:
    """The numbers of one tensor, over its finite values; None where there are none.

    ``std`` divides by n. Of complex numbers, ``min`` and ``max`` are those of the magnitudes. Types
    that are no numbers (packed 4-bit floats) have no statistics.
    """

    fqn: str
    section: Section
    dtype: str
    shape: tuple[int, ...]
    numel: int
    mean: float | complex | None
    std: float | None
    min: float | None
    max: float | None
    l2: float | None
    nan: int
    inf: int
    zeros: int


@dataclass(frozen=True, slots=True, repr=False)
class Statistics(Shown):
    """The statistics of every tensor, sorted by name, and what is odd about some."""

    root: str
    tensors: tuple[TensorStats, ...]
    anomalies: tuple[Anomaly, ...]

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return sum(tensor.nan + tensor.inf for tensor in self.tensors)

    def __str__(self) -> str:
        """How many tensors there are, and what is odd."""
        odd = [f"  {one.fqn}: {one.detail}" for one in self.anomalies]
        counts = f"{counted(len(self.tensors), 'tensor')}, {self.nonfinite:,} elements not finite"
        return "\n".join([f"{self.root}: {counts}", *first_of(odd, 12)])

    def to_dict(self) -> dict[str, Json]:
        """The object of schema ckpt-tools/stats/1, which `stats --json` prints."""
        tensors = [record_json(tensor) for tensor in self.tensors]
        return {
            "schema": "ckpt-tools/stats/1",
            "path": self.root,
            "nonfinite": self.nonfinite,
            "tensors": {str(facts.pop("fqn")): facts for facts in tensors},
            "anomalies": as_json(self.anomalies),
        }


@reads_one_save
def stats(
    index: CheckpointIndex,
    files: Files,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Statistics:
    """The statistics of a whole checkpoint, or of the tensors selected in it.

    Reads every tensor once, several at a time, with a few MiB of memory for each of ``threads``.
    Raises what keeps the tensors from being whole.
    """
    tally = Tally(on_bytes)
    found: dict[str, Scan] = {}
    for located in located_batches(index, files):
        scans = in_threads(
            lambda entry: scan(entry, files, on_bytes=tally.add),
            located.tensors,
            files.sizes,
            threads=threads,
            nbytes=lambda entry: entry.nbytes,
            ahead=fetching(files, index.root),
        )
        found |= {one.entry.fqn: one for one in scans}
    scans = [found[entry.fqn] for entry in index.tensors]
    anomalies = [anomaly for one in scans for anomaly in anomalies_of(one, files)]
    return Statistics(
        root=index.root,
        tensors=tuple(map(_stats, scans)),
        anomalies=(*anomalies, *zero_row_anomalies(scans)),
    )


def _stats(scan: Scan) -> TensorStats:
    entry, total = scan.entry, scan.total
    return TensorStats(
        fqn=entry.fqn,
        section=entry.section,
        dtype=entry.dtype.name,
        shape=entry.shape,
        numel=entry.numel,
        mean=total.mean if total.finite else None,
        std=total.std,
        min=total.least,
        max=total.greatest,
        l2=total.l2,
        nan=total.nan,
        inf=total.inf,
        zeros=total.zeros,
    )


class GroupStats(NamedTuple):
    """What the tensors of one name are together, their numbers (layers, experts) left out."""

    section: Section
    group: str
    tensors: int
    numel: int
    l2: float
    abs_max: float | None
    nonfinite: int


def groups_of(statistics: Statistics) -> list[GroupStats]:
    """The tensors by section and name, ``layers.0.fc.weight`` and others as ``layers.*.fc.weight``.

    Norms and extremes are over the finite values, those of complex numbers of their magnitudes.
    """
    held: dict[tuple[Section, str], list[TensorStats]] = {}
    for one in statistics.tensors:
        name = ".".join("*" if part.isdigit() else part for part in one.fqn.split("."))
        held.setdefault((one.section, name), []).append(one)
    return [
        GroupStats(
            *(section, name, len(every), sum(one.numel for one in every)),
            l2=math.hypot(*(one.l2 or 0.0 for one in every)),
            abs_max=max(
                (abs(x) for t in every for x in (t.min, t.max) if x is not None), default=None
            ),
            nonfinite=sum(one.nan + one.inf for one in every),
        )
        for (section, name), every in sorted(held.items())
    ]


BINS = 32


def histograms(
    index: CheckpointIndex,
    files: Files,
    statistics: Statistics,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> Mapping[str, tuple[int, ...]]:
    """The counts of finite values in `BINS` equal steps, for each tensor with two values or more.

    ``statistics`` are those of the same index. Reads every tensor once. Raises what keeps the
    tensors from being whole.
    """
    located = formats.locate(index, files)
    located.require_whole()
    spreads = {
        one.fqn: (float(one.min), float(one.max))
        for one in statistics.tensors
        if one.min is not None and one.max is not None and one.min < one.max
    }
    entries = [entry for entry in located.tensors if entry.fqn in spreads]
    tally = Tally(on_bytes)

    def count(entry: TensorEntry) -> tuple[int, ...]:
        totals = np.zeros(BINS, np.int64)
        least, greatest = spreads[entry.fqn]
        for piece in read_box(entry, Box.whole(entry.shape), files=files):
            values = numbers(piece, entry.dtype)
            real = np.abs(values) if entry.dtype.kind == "complex" else values.real
            finite = real[np.isfinite(real)]
            # Halved, since the width of a range can be more than the largest float64.
            place = (finite / 2 - least / 2) / (greatest / 2 - least / 2) * BINS
            totals += np.bincount(place.clip(0, BINS - 1).astype(np.int64), minlength=BINS)
            tally.add(len(piece))
        return tuple(totals.tolist())

    counted = in_threads(
        count, entries, files.sizes, threads=threads, nbytes=lambda entry: entry.nbytes
    )
    return {entry.fqn: counts for entry, counts in zip(entries, counted, strict=True)}
