"""Other views of stored tensors: cut, joined, transposed, stacked, rows reordered.

Every view is chunks over the same byte ranges, with other boxes and strides: nothing is read, and
no element exists twice. A view is an entry, without a layout; its name is that of the first that it
is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.core.geometry import Box, row_major_strides
from ckpt_tools.core.index import Chunk, TensorEntry
from ckpt_tools.errors import UsageError


def view_of(entry: TensorEntry) -> TensorEntry:
    """The same tensor in chunks of which others can be made, located or not."""
    return replace(entry, chunks=tuple(chunk.to_view() for chunk in entry.chunks), layout=None)


def narrow(view: TensorEntry, dim: int, *, start: int, size: int) -> TensorEntry:
    """The elements ``start`` to ``start + size`` along a dimension."""
    shape = _replaced(view.shape, dim, size)
    part = Box(_replaced((0,) * len(shape), dim, start), shape)
    chunks = []
    for chunk in view.chunks:
        box = part.intersect(chunk.box)
        if box is None:
            continue
        cut = chunk._replace(replicas=())
        if box != chunk.box:
            strides = _strides(chunk)
            places = zip(box.offsets, chunk.box.offsets, strides, strict=True)
            skipped = sum((a - b) * stride for a, b, stride in places) * view.dtype.itemsize
            place = chunk.data.offset + skipped
            cut = chunk.placed(box, place, strides, itemsize=view.dtype.itemsize)
        chunks.append(cut._replace(box=box.relative_to(part)))
    return replace(view, shape=shape, chunks=tuple(chunks))


def concat(views: Sequence[TensorEntry], dim: int) -> TensorEntry:
    """The views one behind the other along a dimension.

    Raises UsageError when their types or other dimensions differ.
    """
    first = views[0]
    chunks: list[Chunk] = []
    place = 0
    for view in views:
        if _replaced(view.shape, dim, 0) != _replaced(first.shape, dim, 0):
            raise UsageError(
                f"Shapes {list(first.shape)} and {list(view.shape)} do not join along {dim}."
            )
        _same_type(first, view)
        for chunk in view.chunks:
            offsets = _replaced(chunk.box.offsets, dim, chunk.box.offsets[dim] + place)
            chunks.append(chunk._replace(box=Box(offsets, chunk.box.sizes), replicas=()))
        place += view.shape[dim]
    return replace(first, shape=_replaced(first.shape, dim, place), chunks=tuple(chunks))


def stack(views: Sequence[TensorEntry]) -> TensorEntry:
    """The views under a new first dimension.

    Raises UsageError when their types or shapes differ.
    """
    first = views[0]
    chunks: list[Chunk] = []
    for place, view in enumerate(views):
        if view.shape != first.shape:
            raise UsageError(
                f"Shapes {list(first.shape)} and {list(view.shape)} do not stack (number {place})."
            )
        _same_type(first, view)
        for chunk in view.chunks:
            box = Box((place, *chunk.box.offsets), (1, *chunk.box.sizes))
            strides = None if chunk.strides is None else (0, *chunk.strides)
            chunks.append(chunk._replace(box=box, strides=strides, replicas=()))
    return replace(first, shape=(len(views), *first.shape), chunks=tuple(chunks))


def unstack(view: TensorEntry, index: int) -> TensorEntry:
    """One element of the first dimension, which goes away."""
    one = narrow(view, 0, start=index, size=1)
    chunks = []
    for chunk in one.chunks:
        box = Box(chunk.box.offsets[1:], chunk.box.sizes[1:])
        strides = None if chunk.strides is None else chunk.strides[1:]
        chunks.append(chunk._replace(box=box, strides=strides))
    return replace(view, shape=view.shape[1:], chunks=tuple(chunks))


def transpose(view: TensorEntry) -> TensorEntry:
    """The dimensions in reverse order: the transpose of a matrix."""
    chunks = []
    for chunk in view.chunks:
        box = Box(chunk.box.offsets[::-1], chunk.box.sizes[::-1])
        start, strides = chunk.data.offset, _strides(chunk)[::-1]
        chunks.append(chunk.placed(box, start, strides, itemsize=view.dtype.itemsize))
    return replace(view, shape=view.shape[::-1], chunks=tuple(chunks))


def rotary_to_halves(view: TensorEntry, head_dim: int) -> TensorEntry:
    """Rows of each head from pairs (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …).

    A head has ``head_dim`` rows. Raises UsageError when they do not divide the rows.
    """
    half = _half(view, head_dim)
    return _reordered(view, head_dim, [(odd, odd * half) for odd in (0, 1)], step=2)


def rotary_to_pairs(view: TensorEntry, head_dim: int) -> TensorEntry:
    """Rows of each head from halves to pairs: undoes `rotary_to_halves`."""
    half = _half(view, head_dim)
    return _reordered(view, head_dim, [(row, 2 * row) for row in range(half)], step=half)


def _half(view: TensorEntry, head_dim: int) -> int:
    if not view.shape or head_dim < 2 or head_dim % 2 or view.shape[0] % head_dim:
        raise UsageError(
            f"{list(view.shape)}: its rows are not made of heads of {head_dim} rows each, "
            "an even number."
        )
    return head_dim // 2


def _reordered(
    view: TensorEntry, head_dim: int, runs: Sequence[tuple[int, int]], *, step: int
) -> TensorEntry:
    """Rows of each head in another order.

    A run (source, target) is every ``step``-th row of the head from ``source`` on, which become the
    rows from ``target`` on.
    """
    itemsize, many = view.dtype.itemsize, head_dim // step
    chunks: list[Chunk] = []
    for chunk in view.chunks:
        begin, end, (stride, *others) = chunk.box.offsets[0], chunk.box.ends[0], _strides(chunk)
        for head in range(begin // head_dim * head_dim, end, head_dim):
            for source, target in runs:
                # Of the run, those that the chunk holds: from ``first`` on, before ``last``.
                first = max(0, -(-(begin - head - source) // step))
                last = min(many, -(-(end - head - source) // step))
                if first >= last:
                    continue
                offsets = (head + target + first, *chunk.box.offsets[1:])
                box = Box(offsets, (last - first, *chunk.box.sizes[1:]))
                skipped = (head + source + first * step - begin) * stride * itemsize
                start, strides = chunk.data.offset + skipped, (step * stride, *others)
                chunks.append(chunk.placed(box, start, strides, itemsize=itemsize))
    return replace(view, chunks=tuple(chunks))


def _strides(chunk: Chunk) -> tuple[int, ...]:
    return row_major_strides(chunk.box.sizes) if chunk.strides is None else chunk.strides


def _same_type(one: TensorEntry, other: TensorEntry) -> None:
    if one.dtype != other.dtype:
        raise UsageError(
            f"Tensors of {one.dtype.name} and {other.dtype.name} cannot become one tensor.",
            hint="Cast them to one type first, in an export of their own.",
        )


def _replaced(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
