"""Whether all ranks of a job left a file, for formats in which none proves how many there were."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.text import counted, rank_spans
from ckpt_tools.errors import IncompleteError
from ckpt_tools.proof.verify import Report


def expecting_ranks(report: Report, index: CheckpointIndex, ranks: int) -> Report:
    """The same report, with a problem when it is not these ranks, 0 to N - 1, that left files.

    A DCP directory counts by its listing: there a rank with nothing to save leaves an empty file.
    """
    is_dcp = index.format.startswith("dcp") and index.world_size is not None
    found = set(range(index.world_size or 0)) if is_dcp else {s.rank for s in report.ranks}
    expected = set(range(ranks))
    if found == expected:
        return report
    absent, more = sorted(expected - found), sorted(found - expected)
    told = f"ranks {rank_spans(absent)} have no file" if absent else ""
    told += f"{' and ' if absent and more else ''}"
    told += f"there are files of ranks {rank_spans(more)}" if more else ""
    problem = IncompleteError(f"{index.root} should be of {counted(ranks, 'rank')}, but {told}.")
    return replace(report, problems=(problem, *report.problems))
