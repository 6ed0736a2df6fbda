"""Whether the chunks of a tensor tile its shape: integers only, by a sweep.

The one rule of all formats; what it finds is raised, or becomes a problem of an index, as is that
chunks of the same rows differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ckpt_tools.core.geometry import Box, cut_dims
from ckpt_tools.core.index import TensorEntry
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, IncompleteError, UnsupportedError


def uncovered(
    tensors: Iterable[TensorEntry], *, known: Collection[str] = ()
) -> Iterator[CheckpointError]:
    """An error for each tensor whose chunks do not tile its shape: a gap, an overlap, one outside.

    Those with ``known`` problems are skipped.
    """
    for entry in tensors:
        flaw = None if entry.fqn in known else _flaw_of(entry)
        if flaw is not None:
            yield flaw


def _flaw_of(entry: TensorEntry) -> CheckpointError | None:
    """IncompleteError for a gap, CheckpointError for an overlap, with the box where it is.

    Equal boxes count as replicas of one another, empty ones as nothing. Works by a sweep, in
    O(n log n) for n chunks that form a grid.
    """
    shape, whole = entry.shape, Box.whole(entry.shape)
    boxes = list(set(entry.boxes))
    for box in boxes:
        if len(box.sizes) != len(shape) or not whole.contains(box) or min(box.sizes, default=0) < 0:
            text = f"{entry.fqn}: a chunk {box} lies outside of shape {list(shape)}."
            return CheckpointError(text, about=(entry.fqn,))
    solid = [box for box in boxes if 0 not in box.sizes]
    flaw = _first_flaw(solid, shape)
    if flaw is None:
        return None
    times, box = flaw
    if times == 0:
        covered = sum(box.numel for box in solid)
        return IncompleteError(
            f"{entry.fqn}: chunks cover {covered:,} of {entry.numel:,} elements; "
            f"the first hole is {box}.",
            hint="Some shards are missing. Look for the missing files, or use an older save.",
            about=(entry.fqn,),
        )
    return CheckpointError(f"{entry.fqn}: {times} chunks overlap in {box}.", about=(entry.fqn,))


def _first_flaw(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[int, Box] | None:
    """The first region, in row-major order, that is not covered exactly once: how often it is, and
    where. It is looked for slice by slice between the edges along the first dimension that is cut,
    each a smaller problem.
    """
    if 0 in shape:
        return None
    cut = cut_dims(boxes, shape)
    if not cut:
        return None if len(boxes) == 1 else (len(boxes), Box.whole(shape))
    dim = cut[0]
    if len(cut) == 1:
        return _flaw_of_line(boxes, shape, dim=dim)
    starts = {box.offsets[dim] for box in boxes}
    edges = sorted({0, shape[dim]} | starts | {b.offsets[dim] + b.sizes[dim] for b in boxes})
    waiting = sorted(boxes, key=lambda box: box.offsets[dim], reverse=True)
    active: list[Box] = []
    for start, end in pairwise(edges):
        active = [box for box in active if box.offsets[dim] + box.sizes[dim] > start]
        while waiting and waiting[-1].offsets[dim] <= start:
            active.append(waiting.pop())
        faces = [Box(_without(box.offsets, dim), _without(box.sizes, dim)) for box in active]
        flaw = _first_flaw(faces, _without(shape, dim))
        if flaw is not None:
            times, (offsets, sizes) = flaw
            offsets = (*offsets[:dim], start, *offsets[dim:])
            return times, Box(offsets, (*sizes[:dim], end - start, *sizes[dim:]))
    return None


def _flaw_of_line(
    boxes: Sequence[Box], shape: Sequence[int], *, dim: int
) -> tuple[int, Box] | None:
    """The first flaw of boxes that differ along one dimension only: a sort and one pass."""
    end = 0
    spans = sorted((box.offsets[dim], box.offsets[dim] + box.sizes[dim]) for box in boxes)
    for start, stop in [*spans, (shape[dim], shape[dim])]:
        if start != end:
            count, low, high = (0, end, start) if start > end else (2, start, min(end, stop))
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = low, max(high - low, 1)
            return count, Box(tuple(offsets), tuple(sizes))
        end = stop
    return None


def _without(values: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def replicas_differ(where: Mapping[str, str]) -> UnsupportedError:
    """The error for tensors that differ between ranks: by name, the rows and the ranks.

    It is the same wherever it is found: none of them is known to be right, so none is taken.
    """
    shown = some([f"{fqn} {place}" for fqn, place in where.items()])
    return UnsupportedError(
        "Ranks that should hold the same rows hold different ones, so it is not known which is "
        f"right: {shown}.",
        hint="A file is of another save or step, or replicas drifted apart in training. Bring the "
        "file of this save, or leave them out with -x.",
        about=where,
    )
