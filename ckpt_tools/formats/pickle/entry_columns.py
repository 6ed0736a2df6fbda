"""Columns of the numbers, texts and references of entries of one shape, read all at once.

A large pickle of `.metadata` is a million entries that differ in little else. Here all entries of a
shape are cut at the same opcodes together, by numpy. What the entries mean is known to others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np  # noqa: TID253 - only large metadata comes here

from ckpt_tools.formats.pickle.guard_shapes import Run, Token, tokens_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Octets = npt.NDArray[np.uint8]
    Words = npt.NDArray[np.uint64]

NUMBER, TEXT, REFERENCE = "number", "text", "reference"
_KINDS = dict.fromkeys(b"KMJ\x8a", NUMBER) | {0x8C: TEXT, ord("h"): REFERENCE, ord("j"): REFERENCE}
_BLOCK = 1 << 20
# So many rows of a column stay in the cache.
_ROWS = 1 << 14
_SHORTEST_ANCHOR = 3
_LONG = 0x8A

# Bytes of the argument of each opcode that a field may have, those with a length aside.
_SIZES = np.zeros(256, np.uint8)
_SIZES[list(b"KMJhj")] = 1, 2, 4, 1, 4
_SIGNS = np.array([0, *(1 << 8 * size - 1 for size in range(1, 9))], np.uint64)
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(9)], np.uint64)


class UnlikeError(Exception):
    """The entries are not what they are taken for: whoever asked reads them one by one."""


class Column(NamedTuple):
    """One field of every entry: numbers or references, or the texts at ``values``, with lengths."""

    values: Ints
    lengths: Octets | None = None


class _Piece(NamedTuple):
    """Bytes that all entries have in common, and the field after them."""

    literal: bytes
    kind: str | None
    token: int


class Columns:
    """The fields of all entries of some runs of one shape, run after run.

    ``tokens`` are those of one entry. Raises UnlikeError when the entries cannot be told apart.
    """

    def __init__(self, data: bytes, runs: Sequence[Run]) -> None:
        self.tokens = tokens_of(runs[0].sample)
        self.data = data
        self._octets = np.frombuffer(data, np.uint8)
        # Numbers of each size at every place.
        self._views = {
            size: np.ndarray((max(1, len(data) - size + 1),), f"<u{size}", data, strides=(1,))
            for size in (1, 2, 4, 8)
        }
        pieces = _pieces(runs[0].sample, self.tokens)
        chosen, times = _anchor(pieces)
        anchors = self._find(pieces[chosen].literal, runs)
        counts = np.array([run.entries for run in runs])
        rows = int(counts.sum())
        if len(anchors) != rows * times:
            raise UnlikeError
        self._fields = {
            token: Column(
                np.empty(rows, np.int64), np.empty(rows, np.uint8) if kind == TEXT else None
            )
            for _, kind, token in pieces
            if kind is not None
        }
        self._cut(pieces, chosen, anchors[::times], runs, np.cumsum(counts) - counts)

    def _cut(
        self,
        pieces: Sequence[_Piece],
        chosen: int,
        anchors: Ints,
        runs: Sequence[Run],
        firsts: Ints,
    ) -> None:
        """Read all fields: those after the anchors lead to the ends, which are the next starts."""
        ends = self._follow(pieces[chosen:], anchors)
        starts = np.empty_like(ends)
        starts[1:] = ends[:-1]
        starts[firsts] = [run.start for run in runs]
        lasts = ends[np.append(firsts[1:], len(ends)) - 1]
        if not np.array_equal(lasts, [run.end for run in runs]):
            raise UnlikeError
        if not np.array_equal(self._follow(pieces[:chosen], starts), anchors):
            raise UnlikeError

    def __getitem__(self, token: int) -> Column:
        """The field that is this token of the entry."""
        return self._fields[token]

    def text(self, token: int, row: int) -> str:
        """The text of one entry."""
        values, lengths = self._fields[token]
        if lengths is None:
            raise UnlikeError
        start = int(values[row])
        return self.data[start : start + int(lengths[row])].decode("utf-8")

    def _find(self, anchor: bytes, runs: Sequence[Run]) -> Ints:
        """Where these bytes are inside of the runs."""
        rarest = min(range(len(anchor)), key=lambda at: runs[0].sample.count(anchor[at : at + 1]))
        found = []
        low, high = runs[0].start, runs[-1].end
        for block in range(low, high, _BLOCK):
            part = self._octets[block : min(block + _BLOCK, high)]
            places = np.flatnonzero(part == anchor[rarest]) + (block - rarest)
            places = places[(places >= low) & (places <= high - len(anchor))]
            for at, byte in enumerate(anchor):
                places = places if at == rarest else places[self._octets[places + at] == byte]
            found.append(places)
        places = np.concatenate(found)
        starts = np.array([run.start for run in runs])
        ends = np.array([run.end for run in runs])
        return places[places < ends[np.searchsorted(starts, places, side="right") - 1]]

    def _follow(self, pieces: Sequence[_Piece], places: Ints) -> Ints:
        """Read the fields of these pieces from some places on, and say where they end."""
        ends = np.empty_like(places)
        for low in range(0, len(places), _ROWS):
            part = slice(low, low + _ROWS)
            at = places[part]
            for literal, kind, token in pieces:
                at = at + len(literal)
                if kind is not None:
                    at = self._read(kind, self._fields[token], at, part)
            ends[part] = at
        return ends

    def _read(self, kind: str, column: Column, places: Ints, part: slice[int, int, None]) -> Ints:
        """Read one field of some rows, and say where it ends."""
        ops = self._octets[places]
        if column.lengths is not None:
            lengths = self._octets[places + 1]
            column.values[part], column.lengths[part] = places + 2, lengths
            return places + 2 + lengths
        starts = places + 1
        op = int(ops[0])
        if op != _LONG and (ops == op).all():
            size = int(_SIZES[op])
            values = self._views[size][starts]
            is_negative = op == ord("J") and (values >> 31).any()
            ends = starts + size
        else:
            values, is_negative, ends = self._words(ops, starts)
        if kind == NUMBER and is_negative:
            raise UnlikeError
        column.values[part] = values
        return ends

    def _words(self, ops: Octets, starts: Ints) -> tuple[Words, bool, Ints]:
        """Unsigned numbers of several sizes, whether one is negative, and where they end."""
        sizes = _SIZES[ops]
        long = ops == _LONG
        if long.any():
            sizes = np.where(long, self._octets[starts], sizes)
            starts = starts + long
        last = len(self._views[8]) - 1
        held = np.minimum(starts, last)
        words = self._views[8][held]
        if starts[-1] > last:
            words = words >> ((starts - held) * 8).astype(np.uint64)
        values = words & _MASKS[sizes]
        signed = long | (ops == ord("J"))
        is_negative = bool(((values & _SIGNS[sizes])[signed] > 0).any())
        return values, is_negative, starts + sizes


def _pieces(sample: bytes, tokens: Sequence[Token]) -> list[_Piece]:
    pieces, start = [], 0
    for index, token in enumerate(tokens):
        kind = None if token.is_fixed else _KINDS.get(token.op)
        if kind is not None:
            pieces.append(_Piece(sample[start : token.start], kind, index))
            start = token.end
    pieces.append(_Piece(sample[start:], None, -1))
    return pieces


def _anchor(pieces: Sequence[_Piece]) -> tuple[int, int]:
    """The piece that tells entries apart, and how often its bytes are in one entry, which is rare.

    Of the rarest it is the longest; it is the first that has these bytes.
    """
    literals = [piece.literal for piece in pieces]
    best = []
    for index, literal in enumerate(literals):
        if len(literal) < _SHORTEST_ANCHOR or any(literal in other for other in literals[:index]):
            continue
        count = sum(other.count(literal) for other in literals)
        best.append((count, -len(literal), index))
    if not best:
        raise UnlikeError
    count, _, index = min(best)
    return index, count
