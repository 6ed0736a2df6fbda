"""Tensors that differ only by the numbers in their names, with the same holders, as one row.

A model of 32 layers then takes no more rows than one of two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.analysis.ownership import Held
from ckpt_tools.core.text import rank_spans

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component: `layers.12.`, never `w2`


class Row(NamedTuple):
    """Tensors that are drawn as one: the first of them, how many, and their bytes together."""

    label: str
    first: Held
    tensors: int
    nbytes: int


def rows(tensors: Sequence[Held]) -> list[Row]:
    """The rows of these tensors, in the order in which the first of each comes."""
    groups: dict[tuple[object, ...], list[Held]] = {}
    numbers: dict[tuple[object, ...], int] = {}
    cuts: dict[int, int] = {}
    for held in tensors:
        if id(held.pieces) not in cuts:  # of replicas one is stored, now in this file, now in that
            cut = tuple((piece.box, piece.holders) for piece in held.pieces)
            cuts[id(held.pieces)] = numbers.setdefault(cut, len(numbers))
        pattern = _NUMBER.sub("*", held.fqn)
        kind = (pattern, held.dtype, held.shape, held.placements, cuts[id(held.pieces)])
        groups.setdefault(kind, []).append(held)
    return [
        Row(
            _label([held.fqn for held in group]), group[0], len(group), sum(h.nbytes for h in group)
        )
        for group in groups.values()
    ]


def _label(names: Sequence[str]) -> str:
    """``model.layers.{0-31}.wq.weight`` for the names that differ by these numbers."""
    if len(names) == 1:
        return names[0]
    places = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    texts = [_span(sorted(set(numbers))) for numbers in places]
    parts = _NUMBER.split(names[0])
    pairs = zip(parts, [*texts, ""], strict=True)
    return "".join(part + text for part, text in pairs)


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{{{rank_spans(numbers)}}}"


def each(tensors: Sequence[Held]) -> list[Row]:
    """One row for each tensor."""
    return [Row(held.fqn, held, 1, held.nbytes) for held in tensors]
