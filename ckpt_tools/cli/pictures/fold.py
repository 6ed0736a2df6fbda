"""Tensors that differ only by the numbers in their names, with the same holders, as one row.

A model of 32 layers then takes no more rows than one of two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.analysis.ownership import HeldTensor, Holdings
from ckpt_tools.core.text import rank_spans

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole component: `layers.12.`, never `w2`


class Row(NamedTuple):
    """Tensors that are drawn as one."""

    label: str
    tensors: tuple[HeldTensor, ...]

    @property
    def first(self) -> HeldTensor:
        """The one that is drawn."""
        return self.tensors[0]

    @property
    def times(self) -> str:
        """How many they are, after the label: ``" ×32"``, or nothing for one."""
        return f" ×{len(self.tensors):,}" if len(self.tensors) > 1 else ""

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return sum(held.nbytes for held in self.tensors)


def rows(before: Holdings, target: Holdings | None = None) -> list[Row]:
    """The rows of these tensors, in the order in which the first of each comes.

    Those of a row have the same pieces and holders, also after a reshard when there is a target.
    """
    groups: dict[tuple[object, ...], list[HeldTensor]] = {}
    numbers: dict[tuple[object, ...], int] = {}
    cuts: dict[int, int] = {}

    def cut(held: HeldTensor | None) -> object:
        if held is None:
            return None
        if id(held.pieces) not in cuts:  # of replicas one is stored, now in this file, now in that
            pieces = tuple((p.box, p.holders, p.file in before.missing) for p in held.pieces)
            cuts[id(held.pieces)] = numbers.setdefault(pieces, len(numbers))
        return cuts[id(held.pieces)], held.placements

    then = {} if target is None else {held.fqn: held for held in target.tensors}
    for held in before.tensors:
        pattern = _NUMBER.sub("*", held.fqn)
        kind = (pattern, held.dtype, held.shape, cut(held), cut(then.get(held.fqn)))
        groups.setdefault(kind, []).append(held)
    return [Row(_label([held.fqn for held in group]), tuple(group)) for group in groups.values()]


def _label(names: Sequence[str]) -> str:
    """``model.layers.{0-31}.wq.weight`` for the names that differ by these numbers."""
    if len(names) == 1:
        return names[0]
    places = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    texts = [
        str(numbers[0]) if len(set(numbers)) == 1 else f"{{{rank_spans(sorted(set(numbers)))}}}"
        for numbers in places
    ]
    parts = _NUMBER.split(names[0])
    pairs = zip(parts, [*texts, ""], strict=True)
    return "".join(part + text for part, text in pairs)
