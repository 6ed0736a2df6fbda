"""Shapes of entries in a pickle: entries that differ only in their numbers, texts and references.

A shape is made of one entry and matches others that have the same effect on the unpickler's stack
and memo, opcode by opcode. It knows nothing of what the entries mean.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Two chunks of four dimensions take about 200 bytes, a key and its value the same and their texts.
MAX_SHAPE = 1024
_MAX_SHAPES = 256
_AT_ONCE = 16
_LAST_USED = 4


class Shape(NamedTuple):
    """Regular expressions of one entry and of sixteen in a row."""

    one: re.Pattern[bytes]
    many: re.Pattern[bytes]

    def run(self, data: bytes, at: int) -> tuple[int, int]:
        """End and number of the entries of this shape that follow one another from ``at`` on."""
        count = 0
        for pattern, entries in ((self.many, _AT_ONCE), (self.one, 1)):
            match = pattern.match(data, at)
            while match:
                at = match.end()
                count += entries
                match = pattern.match(data, at)
        return at, count


def shape_of(entry: bytes, known: dict[bytes, Shape | None]) -> Shape | None:
    """The shape of an entry, or None when it has opcodes that no shape is made of.

    ``known`` keeps the shapes that were made before, those last used at its end: one that matches
    the entry will do, and making the same one again would take sixty times as long.
    """
    for used in list(known)[-_LAST_USED:]:
        shape = known[used]
        if shape is not None and shape.one.fullmatch(entry):
            known[used] = known.pop(used)
            return shape
    source = _pattern(entry)
    if source is None:
        return None
    if source not in known:
        if len(known) >= _MAX_SHAPES:
            return None
        many = b"(?:%b){%d}" % (source, _AT_ONCE)
        known[source] = Shape(re.compile(source, re.DOTALL), re.compile(many, re.DOTALL))
    return known[source]


def _text() -> bytes:
    """A short text with its length: sixteen groups of sixteen lengths, so that few are tried."""
    groups = []
    for low in range(0, 256, 16):
        sizes = b"|".join(b"\\x%02x.{%d}" % (size, size) for size in range(low, low + 16))
        groups.append(b"(?=[\\x%02x-\\x%02x])(?:%b)" % (low, low + 15, sizes))
    return b"\\x8c(?:%b)" % b"|".join(groups)


_TEXT = _text()
_NUMBER = rb"(?:K.|M..|J....|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
_REFERENCE = rb"(?:h.|j....)"

# Bytes of the argument of each opcode that a shape may have.
_ARGUMENTS = dict.fromkeys(b"()NR]abesu}t\x81\x85\x86\x87\x88\x89\x94", 0) | {
    ord("K"): 1,
    ord("M"): 2,
    ord("J"): 4,
    ord("h"): 1,
    ord("j"): 4,
}
_TUPLES = frozenset(b"\x85\x86\x87")
# What an opcode takes off the stack; each leaves one value, a, b and s the one that they change.
_TAKEN = {ord("R"): 2, 0x81: 2, ord("b"): 2, ord("a"): 2, ord("s"): 3}
_TAKEN |= {0x85: 1, 0x86: 2, 0x87: 3}
_TO_MARK = frozenset(b"tue")


class _Token(NamedTuple):
    """An opcode of an entry with its argument."""

    op: int
    start: int
    end: int


def _tokens(entry: bytes) -> list[_Token] | None:
    """The opcodes of an entry, or None when one of them is none that a shape may have."""
    tokens, at = [], 0
    while at < len(entry):
        op = entry[at]
        size = _ARGUMENTS.get(op)
        if size is None and op in {0x8A, 0x8C} and at + 1 < len(entry):
            size = 1 + entry[at + 1]
        if size is None or (op == 0x8A and not 6 <= size <= 9):
            return None
        tokens.append(_Token(op, at, at + 1 + size))
        at += 1 + size
    return tokens if at == len(entry) else None


def _pattern(entry: bytes) -> bytes | None:
    """The source of the regular expression for entries of this shape."""
    tokens = _tokens(entry)
    fixed = _fixed_references(tokens) if tokens else None
    if tokens is None or fixed is None:
        return None
    parts = []
    for index, token in enumerate(tokens):
        if token.op in b"KMJ\x8a":
            parts.append(_NUMBER)
        elif token.op == 0x8C:
            parts.append(_TEXT)
        elif token.op in b"hj" and index not in fixed:
            parts.append(_REFERENCE)
        else:
            parts.append(re.escape(entry[token.start : token.end]))
    return b"".join(parts)


def _fixed_references(tokens: list[_Token]) -> set[int] | None:
    """Which references must be to the same value in every entry: None when that is not known.

    All of those that become a key, an item of a tuple, or remembered: what they refer to decides
    what the entry costs. Others are arguments of calls and values of dicts, which are not hashed.
    """
    trace = _Trace()
    for index, token in enumerate(tokens):
        if not trace.follow(index, token.op):
            return None
    trace.fix(trace.stack)
    return trace.fixed


class _Trace:
    """A stack on which each item is the reference that pushed it, or -1."""

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.fixed: set[int] = set()
        self._marks: list[int] = []

    def fix(self, items: list[int]) -> None:
        """Hold the references among these items fixed."""
        self.fixed.update(item for item in items if item >= 0)

    def follow(self, index: int, op: int) -> bool:
        """Take one opcode; False when it reaches below the entry."""
        if op == ord("("):
            self._marks.append(len(self.stack))
        elif op in _TO_MARK:
            return bool(self._marks) and self._to_mark(op)
        elif op in _TAKEN:
            return self._take(op, _TAKEN[op])
        elif op == 0x94:
            self.fix(self.stack[-1:])
        else:
            self.stack.append(index if op in b"hj" else -1)
        return bool(self.stack)

    def _take(self, op: int, count: int) -> bool:
        """Take the operands of an opcode and push what it leaves."""
        if len(self.stack) < count:
            return False
        taken = self.stack[-count:]
        del self.stack[-count:]
        if op in _TUPLES:
            self.fix(taken)
        elif op == ord("s"):
            self.fix(taken[1:2])
        self.stack.append(taken[0] if op in b"abs" else -1)
        return True

    def _to_mark(self, op: int) -> bool:
        height = self._marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        self.fix(items if op == ord("t") else items[::2] if op == ord("u") else [])
        if op == ord("t"):
            self.stack.append(-1)
        return bool(self.stack)
