"""What the opcodes of one entry build: a tree of values in which fields stand for what varies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from ckpt_tools.formats.pickle.entry_columns import UnlikeError
from ckpt_tools.formats.pickle.guard_shapes import Token


class Number(NamedTuple):
    """A number, which is the column of this token."""

    token: int


class Text(NamedTuple):
    """A text, which is the column of this token."""

    token: int


class Reference(NamedTuple):
    """What the memo holds under the number in the column of this token."""

    token: int


class Fixed(NamedTuple):
    """What the memo holds under this number."""

    memo: int


class Constant(NamedTuple):
    """None, True or False."""

    value: object


class Items(NamedTuple):
    """A tuple."""

    items: tuple[Node, ...]


class Call(NamedTuple):
    """What a callable makes of the arguments."""

    function: Node
    arguments: Node


class Record:
    """An object of a class, without arguments, that may get a state."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: Node) -> None:
        self.kind = kind
        self.state: Node | None = None


class Filled:
    """A list, or a dict as its keys and values in turn."""

    __slots__ = ("is_dict", "items")

    def __init__(self, *, is_dict: bool) -> None:
        self.is_dict = is_dict
        self.items: list[Node] = []


Node: TypeAlias = "Number | Text | Reference | Fixed | Constant | Items | Call | Record | Filled"

_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}


def values_of(tokens: Sequence[Token]) -> tuple[list[Node], list[Node]]:
    """The two values that an entry leaves, and what it puts into the memo, in order.

    Raises UnlikeError for what torch does not write into an entry.
    """
    machine = _Machine()
    for index, token in enumerate(tokens):
        machine.run(index, token)
    if machine.marks or len(machine.stack) != 2:
        raise UnlikeError
    return machine.stack, machine.memo


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Node] = []
        self.memo: list[Node] = []
        self.marks: list[int] = []

    def run(self, index: int, token: Token) -> None:
        """Take one opcode."""
        op = token.op
        if op in b"KMJ\x8a":
            self.stack.append(Number(index))
        elif op == 0x8C:
            self.stack.append(Text(index))
        elif op in b"hj":
            self.stack.append(Fixed(token.number) if token.is_fixed else Reference(index))
        elif op in _CONSTANTS:
            self.stack.append(Constant(_CONSTANTS[op]))
        elif op == 0x94:
            self.memo.append(self.stack[-1])
        elif op == ord("("):
            self.marks.append(len(self.stack))
        else:
            self._build(op)

    def _build(self, op: int) -> None:
        """Take an opcode that makes a value of others."""
        if op in b"]})":
            made: Node = Items(()) if op == ord(")") else Filled(is_dict=op == ord("}"))
            self.stack.append(made)
        elif op in _TUPLES:
            self.stack.append(Items(self._take(_TUPLES[op])))
        elif op == ord("t"):
            self.stack.append(Items(self._take(len(self.stack) - self.marks.pop())))
        elif op in b"ueas":
            count = 1 if op == ord("a") else 2 if op == ord("s") else None
            items = self._take(len(self.stack) - self.marks.pop() if count is None else count)
            self._fill(items, is_dict=op in b"us")
        else:
            self._object(op)

    def _object(self, op: int) -> None:
        first, second = self._take(2)
        if op == ord("R"):
            self.stack.append(Call(first, second))
        elif op == 0x81 and second == Items(()):
            self.stack.append(Record(first))
        elif op == ord("b") and isinstance(first, Record) and first.state is None:
            first.state = second
            self.stack.append(first)
        else:
            raise UnlikeError

    def _fill(self, items: Sequence[Node], *, is_dict: bool) -> None:
        filled = self.stack[-1]
        if not isinstance(filled, Filled) or filled.is_dict is not is_dict:
            raise UnlikeError
        filled.items.extend(items)

    def _take(self, count: int) -> tuple[Node, ...]:
        if count > len(self.stack):
            raise UnlikeError
        start = len(self.stack) - count
        taken = tuple(self.stack[start:])
        del self.stack[start:]
        return taken
