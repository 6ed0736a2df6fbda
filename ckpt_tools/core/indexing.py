"""Which box of a tensor a caller means, by an index as torch takes it or by a box."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, SupportsIndex

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import TensorEntry
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    Slice = slice[int | None, int | None, int | None]
    DimIndex = SupportsIndex | Slice | Sequence[int]
    AnyIndex = DimIndex | EllipsisType | None
    Selection = AnyIndex | tuple[AnyIndex, ...]
    Within = int | Slice | list[int] | None


def indexed_box(entry: TensorEntry, selection: Selection) -> tuple[Box, tuple[Within, ...]]:
    """The box that holds what the selection chooses, and the index into what is read of it.

    ``None`` is a new dimension, a list of numbers chooses them; the box reaches from the lowest to
    the highest. Raises IndexError and TypeError as torch does, and UsageError for a step below one.
    """
    given = selection if isinstance(selection, tuple) else (selection,)
    named = sum(one is not None and one is not ... for one in given)
    free = len(entry.shape) - named
    if free < 0:
        raise IndexError(f"{entry.fqn} has {len(entry.shape)} dimensions; the index has more.")
    keys: list[DimIndex | None] = []
    for one in given if ... in given else (*given, ...):
        if isinstance(one, EllipsisType):
            keys += [slice(None)] * free
            free = 0  # as in torch, a second one is of no dimension
        else:
            keys.append(one)
    offsets: list[int] = []
    sizes: list[int] = []
    after: list[Within] = []
    for key in keys:
        if key is None:
            after.append(None)
            continue
        start, count, then = _along(entry.fqn, key, entry.shape[len(offsets)])
        offsets.append(start)
        sizes.append(count)
        after.append(then)
    return Box(tuple(offsets), tuple(sizes)), tuple(after)


def _along(fqn: str, one: DimIndex, size: int) -> tuple[int, int, Within]:
    """Start and length along one dimension, and the index into what is read."""
    if isinstance(one, slice):
        chosen = range(size)[one]
        if chosen.step < 1:
            raise UsageError(f"{fqn}: a slice needs a step of 1 or more, as torch's do.")
        length = chosen[-1] - chosen[0] + 1 if chosen else 0
        return (chosen[0] if chosen else 0), length, slice(None, None, chosen.step)
    if isinstance(one, list):
        places = [_place(fqn, each, size) for each in one]
        start = min(places, default=0)
        return start, max(places, default=-1) + 1 - start, [place - start for place in places]
    return _place(fqn, one, size), 1, 0


def _place(fqn: str, one: object, size: int) -> int:
    if isinstance(one, bool) or not isinstance(one, SupportsIndex):
        raise TypeError(f"{fqn}: an index is a number, a slice or a list of numbers, not {one!r}.")
    place = operator.index(one)
    if not -size <= place < size:
        raise IndexError(f"{fqn}: index {place} is outside of a dimension of {size}.")
    return place % size


def require_inside(entry: TensorEntry, box: Box | None) -> Box:
    """The box, or that of the whole tensor. Raises UsageError for one that is not inside it."""
    whole = Box.whole(entry.shape)
    if box is None:
        return whole
    if len(box.offsets) != len(entry.shape) or len(box.sizes) != len(entry.shape):
        raise UsageError(f"{entry.fqn} has {len(entry.shape)} dimensions, the box {box} does not.")
    if min(box.sizes, default=0) < 0 or not whole.contains(box):
        raise UsageError(f"{box} is not inside of {entry.fqn} with shape {list(entry.shape)}.")
    return box
