"""Where the pieces of a tensor lie in a rectangle: numbers from 0 to 1, for every kind of picture.

A tensor that is cut along one dimension is a strip from left to right; cut along two, it is a grid,
the first of them downwards. Those who hold the same piece share it, one band each; of many, the
first stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ckpt_tools.analysis.ownership import HeldBox
from ckpt_tools.core.geometry import cut_dims
from ckpt_tools.core.text import rank_spans

MAX_BANDS = 4


class _Rect(NamedTuple):
    """A piece, or one holder's band of it; ``holder`` is None when nobody is known to hold it."""

    x: float
    y: float
    width: float
    height: float
    piece: HeldBox
    holder: int | None
    label: str


def rects(pieces: Sequence[HeldBox], shape: Sequence[int]) -> list[_Rect]:
    """A rectangle for each piece and holder; one for a piece that more than `MAX_BANDS` hold."""
    dims = cut_dims([piece.box for piece in pieces], shape)
    if len(dims) > 2:  # strips in order, each as long as its piece is large
        ends = [0, *accumulate(piece.box.numel for piece in pieces)]
        spans = [(a / ends[-1], (b - a) / ends[-1], 0.0, 1.0) for a, b in pairwise(ends)]
    else:
        down, across = (dims[0], dims[1]) if len(dims) == 2 else (None, dims[0] if dims else None)
        spans = [(*_span(p, shape, across), *_span(p, shape, down)) for p in pieces]
    return [
        _Rect(x, y + height * band / len(bands), width, height / len(bands), piece, holder, label)
        for piece, (x, width, y, height) in zip(pieces, spans, strict=True)
        for bands in [_bands(piece.holders)]
        for band, (holder, label) in enumerate(bands)
    ]


def _bands(holders: Sequence[int]) -> list[tuple[int | None, str]]:
    """Who is drawn, and as what: ``3``; of many ``0-63``, or ``0+15`` for 0, 4, 8 and so on."""
    if not holders:
        return [(None, "?")]
    if len(holders) > MAX_BANDS:
        first, more = holders[0], len(holders) - 1
        is_range = holders[-1] == first + more
        return [(first, rank_spans(holders) if is_range else f"{first}+{more}")]
    return [(holder, str(holder)) for holder in holders]


def _span(piece: HeldBox, shape: Sequence[int], dim: int | None) -> tuple[float, float]:
    if dim is None:
        return 0.0, 1.0
    return piece.box.offsets[dim] / shape[dim], piece.box.sizes[dim] / shape[dim]
