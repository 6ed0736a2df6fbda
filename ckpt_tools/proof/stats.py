"""Mean, spread, extremes and norm of each tensor, and what in it points at a lost rank.

Tensors are streamed chunk by chunk, as they are stored, so that a chunk that is zero or the copy of
another one shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex, Section, TensorEntry
from ckpt_tools.proof.anomalies import Anomaly, anomalies_of, zero_row_anomalies
from ckpt_tools.proof.streams import Scan, scan
from ckpt_tools.proof.threads import Tally, ignore_bytes, in_threads
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


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics of every tensor, sorted by name, and what is odd about some."""

    tensors: tuple[TensorStats, ...]
    anomalies: tuple[Anomaly, ...]

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or infinite."""
        return sum(tensor.nan + tensor.inf for tensor in self.tensors)


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
    located = formats.locate(index, files)
    located.require_chosen()
    tally = Tally(on_bytes)

    def one(entry: TensorEntry) -> Scan:
        return scan(entry, files, on_bytes=tally.add)

    scans = in_threads(one, located.tensors, threads=threads, nbytes=_nbytes)
    odd = [anomaly for found in scans for anomaly in anomalies_of(found, files)]
    return Statistics(
        tensors=tuple(map(_stats, scans)),
        anomalies=(*odd, *zero_row_anomalies(scans)),
    )


def _nbytes(entry: TensorEntry) -> int:
    return entry.nbytes


def _stats(found: Scan) -> TensorStats:
    entry, total = found.entry, found.total
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
