"""Reads every value of a checkpoint for a page: statistics and histograms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.cli import progress
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from ckpt_tools.proof.stats import Statistics


class Seen(NamedTuple):
    """What was seen: the statistics, and the counts of each tensor's histogram by its name."""

    statistics: Statistics
    histograms: Mapping[str, tuple[int, ...]]


def look(index: CheckpointIndex) -> Seen:
    """Read every tensor, twice. Raises what keeps the tensors from being whole."""
    from ckpt_tools.proof.stats import (
        histograms,  # late: both need numpy
        stats,
    )

    total = 2 * sum(entry.nbytes for entry in index.tensors)
    with progress.byte_bar(total, label="stats") as on_bytes, Files() as files:
        statistics = stats(index, files, on_bytes=on_bytes)
        return Seen(statistics, histograms(index, files, statistics, on_bytes=on_bytes))
