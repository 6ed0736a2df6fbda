"""Which elements of a tensor no box holds. Integers only."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

from ckpt_tools.core.geometry import Box


def holes(shape: Sequence[int], boxes: Collection[Box]) -> list[Box]:
    """The elements of ``shape`` that none of ``boxes`` holds, as disjoint boxes in row-major order.

    Neighbouring holes along the first dimension are one.
    """
    solid = [box for box in boxes if 0 not in box.sizes]
    if 0 in shape:
        return []
    if not solid:
        return [Box.whole(shape)]
    if not shape:
        return []
    found: list[Box] = []
    waiting = sorted(solid, key=_start, reverse=True)
    active: list[Box] = []
    for start, end in pairwise(sorted({0, shape[0], *_edges(solid, shape[0])})):
        active = [box for box in active if box.ends[0] > start]
        while waiting and waiting[-1].offsets[0] <= start:
            active.append(waiting.pop())
        if any(box.sizes[1:] == tuple(shape[1:]) for box in active):
            continue
        for hole in holes(shape[1:], {_below(box) for box in active}):
            _add(found, Box((start, *hole.offsets), (end - start, *hole.sizes)))
    return found


def _start(box: Box) -> int:
    return box.offsets[0]


def _edges(boxes: Sequence[Box], size: int) -> set[int]:
    """Where boxes begin and end along the first dimension, inside of it."""
    edges = {edge for box in boxes for edge in (box.offsets[0], box.ends[0])}
    return {edge for edge in edges if 0 < edge < size}


def _below(box: Box) -> Box:
    return Box(box.offsets[1:], box.sizes[1:])


def _add(found: list[Box], hole: Box) -> None:
    """Append a hole, joined to the one before it along the first dimension where they meet."""
    for place, before in enumerate(found):
        same = _below(before) == _below(hole)
        if same and before.ends[0] == hole.offsets[0]:
            found[place] = Box(before.offsets, (before.sizes[0] + hole.sizes[0], *before.sizes[1:]))
            return
    found.append(hole)


def describe(box: Box, shape: Sequence[int]) -> str:
    """Where a box lies, for a person: ``rows 3:6 of 11``, or its slices."""
    if not shape:
        return "its one value"
    if box == Box.whole(shape):
        return f"all of {list(shape)}"
    if box.sizes[1:] == tuple(shape[1:]):
        return f"rows {box.offsets[0]}:{box.ends[0]} of {shape[0]:,}"
    return f"{box} of {list(shape)}"
