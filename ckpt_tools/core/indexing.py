"""Which box of a tensor a caller means, by an index as torch takes it or by a box."""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import TYPE_CHECKING, SupportsIndex

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import TensorEntry
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    Slice = slice[int | None, int | None, int | None]
    DimIndex = SupportsIndex | Slice
    Selection = DimIndex | EllipsisType | tuple[DimIndex | EllipsisType, ...]


def indexed_box(entry: TensorEntry, selection: Selection) -> tuple[Box, tuple[int | Slice, ...]]:
    """The box that holds what the selection chooses, and the index into what is read of it.

    Raises IndexError and TypeError as torch does, and UsageError for a step below one.
    """
    given = selection if isinstance(selection, tuple) else (selection,)
    keys = [one for one in given if not isinstance(one, EllipsisType)]
    free = len(entry.shape) - len(keys)
    if free < 0 or len(given) - len(keys) > 1:
        raise IndexError(f"{entry.fqn} has {len(entry.shape)} dimensions; the index has more.")
    place = given.index(...) if len(keys) < len(given) else len(keys)
    keys[place:place] = [slice(None)] * free
    offsets, sizes, after = [], [], []
    for one, size in zip(keys, entry.shape, strict=True):
        start, count, then = _along(entry.fqn, one, size)
        offsets.append(start)
        sizes.append(count)
        after.append(then)
    return Box(tuple(offsets), tuple(sizes)), tuple(after)


def _along(fqn: str, one: DimIndex, size: int) -> tuple[int, int, int | Slice]:
    """Start and length along one dimension, and the index into what is read."""
    if isinstance(one, slice):
        chosen = range(size)[one]
        if chosen.step < 1:
            raise UsageError(f"{fqn}: a slice needs a step of 1 or more, as torch's do.")
        length = chosen[-1] - chosen[0] + 1 if chosen else 0
        return (chosen[0] if chosen else 0), length, slice(None, None, chosen.step)
    if isinstance(one, bool):
        raise TypeError(f"{fqn}: an index is a number or a slice, not {one}.")
    place = operator.index(one)
    if not -size <= place < size:
        raise IndexError(f"{fqn}: index {place} is outside of a dimension of {size}.")
    return place % size, 1, 0


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
