"""Signs of a lost rank: zero, constant, NaN or repeated regions that end at shard edges.

A shard that was lost leaves zeros in a file that another tool put together; a rank that loaded
nothing leaves its chunk constant; a rank's file that was copied over another's repeats it. None of
it proves anything: it says where to look.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools.copying.read import first_unequal, read_box
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.text import counted
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from ckpt_tools.core.index import Chunk
    from ckpt_tools.proof.scan import Moments, Scan

Kind = Literal["zero", "constant", "nan", "repeated", "zero rows"]

# Fewer elements than this are equal to one another, or to another chunk's, by chance.
_MIN_NUMEL = 8
_MAX_RANKS = 4096
# Single rows are zero for other reasons, too: a padding token's, in an embedding and its tied twin.
_MIN_VOTES, _MIN_VOTES_OF_ONE_ROW = 2, 3
# A lost rank leaves one run of zeros in a tensor; many of them are something else.
_MAX_RUNS = 2


class Anomaly(NamedTuple):
    """A region of a tensor that is odd, its rank and its file; ``detail`` says more."""

    fqn: str
    kind: Kind
    box: Box
    rank: int | None
    path: str
    detail: str


def anomalies_of(scan: Scan, files: Files) -> Iterator[Anomaly]:
    """The odd chunks of a tensor that is cut into several."""
    if len(scan.chunks) < 2:
        return
    fqn = scan.entry.fqn
    equal_crcs: dict[tuple[int, tuple[int, ...]], list[Chunk]] = defaultdict(list)
    for chunk, moments, crc in scan.chunks:
        oddity = _oddity(moments, scan.total)
        if oddity is not None:
            kind, detail = oddity
            yield Anomaly(fqn, kind, chunk.box, chunk.rank, chunk.data.path, detail)
        if moments.least != moments.greatest and moments.numel >= _MIN_NUMEL:
            equal_crcs[crc, chunk.box.sizes].append(chunk)
    for first, *others in equal_crcs.values():
        for chunk in others:
            here, there = (
                read_box(replace(scan.entry, chunks=(one,)), one.box, files=files)
                for one in (first, chunk)
            )
            if first_unequal(here, there) is None:
                who = "" if first.rank is None else f" of rank {first.rank}"
                detail = f"the same as {first.box}{who}"
                yield Anomaly(fqn, "repeated", chunk.box, chunk.rank, chunk.data.path, detail)


def _oddity(here: Moments, total: Moments) -> tuple[Kind, str] | None:
    """How a chunk differs from the rest of its tensor."""
    if here.numel < _MIN_NUMEL:
        return None
    if here.zeros == here.numel and total.zeros < total.numel:
        return "zero", "every element is zero"
    if here.nan == here.numel and total.nan < total.numel:
        return "nan", "every element is NaN"
    is_constant = here.finite == here.numel and here.least == here.greatest and here.m2 == 0
    if is_constant and total.least != total.greatest:
        return "constant", f"every element is {here.mean:g}"
    return None


def zero_row_anomalies(scans: Sequence[Scan]) -> Iterator[Anomaly]:
    """Zero rows of weights stored in one piece, when they are one rank's share of several tensors.

    Only cuts along the first dimension are looked for. An optimizer's state is often zero in rows
    that never had a gradient, and is left out.
    """
    weights = [scan for scan in scans if scan.entry.section == "model"]
    runs = [
        (scan, start, end, _shares(start, end, scan.entry.shape[0]))
        for scan in weights
        if len(scan.zero_rows) <= _MAX_RUNS
        for start, end in scan.zero_rows
    ]
    votes = Counter(share for *_, shares in runs for share in shares)
    for scan, start, end, shares in runs:
        if not shares:
            continue
        rank, ranks = max(shares, key=lambda share: (votes[share], -share[1]))
        count, least = votes[rank, ranks], _MIN_VOTES if end - start > 1 else _MIN_VOTES_OF_ONE_ROW
        if count >= least:
            rows, *others = scan.entry.shape
            box = Box((start, *[0] * len(others)), (end - start, *others))
            whose = f"the share of rank {rank} of {ranks}, as in {counted(count, 'tensor')}"
            detail = f"rows {start}:{end} of {rows} are zero, {whose}"
            path = scan.chunks[0][0].data.path
            yield Anomaly(scan.entry.fqn, "zero rows", box, rank, path, detail)


def _shares(start: int, end: int, rows: int) -> list[tuple[int, int]]:
    """Whose share these rows may be, as a rank and the number of ranks.

    A share is ceil(rows / ranks) rows, the last one fewer.
    """
    if start == 0 and end == rows:
        return []
    shares = []
    for ranks in range(2, min(rows, _MAX_RANKS) + 1):
        size = -(-rows // ranks)
        if start % size == 0 and end == min(rows, start + size):
            shares.append((start // size, ranks))
    return shares
