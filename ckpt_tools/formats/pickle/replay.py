r"""Entries that repeat, made a thousand at a time: for pickles of a million entries.

A dict or a list of a large pickle has entries that are alike. The machine interprets the first of
them; what follows is compared with it, in two ways.

1. *The same bytes behind another name.* Most tensors of a model are cut as another one is, and what
   is said of them is the same: byte by byte, and what these refer to by its number in the memo.
   ``name value`` is read by comparing bytes.
2. *The same objects with other fields.* The objects of an entry become a regular expression with a
   group for each field. The pickle of ``[Chunk(offset=3, size=4), Chunk(offset=7, size=4), …]`` has
   for the second and the third entry, h 05 being the class and h 06, h 07 the names of its fields:

       68 05 29 81 94 7d 94 28   68 06   4b 03   68 07   4b 04   75 62
       68 05 29 81 94 7d 94 28   68 06   4b 07   68 07   4b 04   75 62

   The expression is ``h\x05\)\x81\x94}\x94\(h\x06(FIELD)h\x07(FIELD)ub``, and gives the columns
   (4b 03, 4b 07, …) and (4b 04, 4b 04, …). Each different field is read once: (3, 7, …) and
   (4, 4, …). The class takes columns in place of states, `Repeated.columns`, and checks them as it
   checks a state. What it does not take, and what is unlike, is interpreted.

For 1,221,485 chunks of 181,580 tensors that takes a third of the time of the unpickler of C with a
walk before it that checked the opcodes; for 1,024,000 of 1,000 tensors 1.2 times as long as these.
Interpreted they would take 5 times as long. It begins to matter at some thousand chunks.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from ckpt_tools.formats.pickle.machine import Machine
from ckpt_tools.formats.pickle.nodes import Function, Repeated

# Two objects of an entry with their fields; a value that is the same has no such bound.
_MAX_ENTRY = 1024
_MAX_SHAPES = 32
_MAX_SAME = 64
_MAX_SAME_BYTES = 64 << 10
_MAX_KNOWN = 1 << 18
_ROWS = 1024
# How often a thousand entries may turn out to be unlike: to match them takes a millisecond.
_CREDIT = 100

_NUMBER = rb"K.|M..|J....|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_NUMBERS = rb"(?:\)|(?:%b)\x85\x94|(?:%b){2}\x86\x94|(?:%b){3}\x87\x94|\((?:%b){4,64}t\x94)" % (
    (_NUMBER,) * 4
)
_REFERENCE = rb"(?:h.|j....)"
# A number, a short text, a reference, None, or a call of a function with a tuple of numbers.
_FIELD = rb"(%b|\x8c.[^\x94]{0,255}\x94|%b(?:%b\x85\x94R\x94)?|N)" % (
    *(_NUMBER, _REFERENCE, _NUMBERS),
)
_ONE_NUMBER = re.compile(_NUMBER, re.DOTALL)
_OBJECT = re.compile(rb"(%b)\)\x81\x94}\x94\(" % _REFERENCE, re.DOTALL)
_NAMED_FIELD = re.compile(rb"(%b)%b" % (_REFERENCE, _FIELD), re.DOTALL)
_END = b"ub"
_INT, _TEXT = ord("J"), 0x8C


class _Shape(NamedTuple):
    """The objects of an entry: their classes, the names of their fields, and the expression."""

    kinds: tuple[tuple[type[Repeated], tuple[str, ...]], ...]
    entry: re.Pattern[bytes]


class _Same(NamedTuple):
    """A value that may come again: its bytes, the value, and which part of the memo is of it."""

    data: bytes
    value: object
    first: int
    end: int


class Repetition:
    """The replay of one pickle; ``size`` is the function that makes a tuple of numbers."""

    def __init__(self, size: Function) -> None:
        self._same: list[_Same] = []
        self._shapes: dict[bytes, _Shape] = {}
        self._fields = _Fields(size)
        self._credit = _CREDIT

    def entries_after(self, machine: Machine, at: int) -> int:
        """After an object was filled: push what the next entries make, as far as they are alike.

        An entry is a key and its value, or two objects of a list.
        """
        height, start, first = machine.entry
        if len(machine.items) != height + 2:
            return at
        memo = machine.memo
        if isinstance(memo, list) and at - start <= _MAX_SAME_BYTES:
            if begin := _after_name(machine.data, start):
                same = _Same(machine.data[begin:at], machine.items[-1], first + 1, len(memo))
                self._same = [same, *self._same[: _MAX_SAME - 1]]
                at = self._named(machine, memo, at)
            elif at - start <= _MAX_ENTRY and self._credit > 0:
                at = self._rows(machine, memo, machine.data[start:at], at)
        machine.entry = len(machine.items), at, len(machine.memo)
        return at

    def _named(self, machine: Machine, memo: list[object], at: int) -> int:
        """Push all that is a name and a value with the bytes of one before."""
        data = machine.data
        while begin := _after_name(data, at):
            same = next((one for one in self._same if data.startswith(one.data, begin)), None)
            if same is None:
                break
            name = str(data[at + 2 : begin - 1], "utf-8", "surrogatepass")
            machine.items += name, same.value
            memo.append(name)
            memo += memo[same.first : same.end]
            at = begin + len(same.data)
        return at

    def _rows(self, machine: Machine, memo: list[object], entry: bytes, at: int) -> int:
        """Push the entries that have the shape of this one, a thousand at a time."""
        try:
            shape = self._shape_of(memo, entry)
        except IndexError:  # a text whose length is another one: it was no row of objects
            shape = None
        if shape is None:
            return at
        while True:
            found, end = list[re.Match[bytes]](), at
            while len(found) < _ROWS and (match := shape.entry.match(machine.data, end)):
                found.append(match)
                end = match.end()
            made = self._fields.rows(memo, shape, [match.groups() for match in found])
            if not made:
                self._credit -= bool(found)
                return at
            machine.items += chain.from_iterable(made)
            at = found[len(made) - 1].end()

    def _shape_of(self, memo: list[object], entry: bytes) -> _Shape | None:
        """The shape of an entry, None for one that is no row of objects of `Repeated` classes."""
        for shape in self._shapes.values():
            if shape.entry.fullmatch(entry):
                return shape
        kinds: list[tuple[type[Repeated], tuple[str, ...]]] = []
        source, at = b"", 0
        while found := _OBJECT.match(entry, at):
            kind, names, at = memo[_number(found[1])], list[str](), found.end()
            source += re.escape(found[0])
            while field := _NAMED_FIELD.match(entry, at):
                name = memo[_number(field[1])]
                if type(name) is not str:
                    return None
                names.append(name)
                source += re.escape(field[1]) + _FIELD
                at = field.end()
            if not isinstance(kind, type) or not issubclass(kind, Repeated):
                return None
            if not entry.startswith(_END, at):
                return None
            kinds.append((kind, (*names,)))
            source, at = source + _END, at + len(_END)
        if at < len(entry) or not kinds or len(self._shapes) >= _MAX_SHAPES:
            return None
        shape = _Shape((*kinds,), re.compile(source, re.DOTALL))
        self._shapes[source] = shape
        return shape


def _after_name(data: bytes, at: int) -> int:
    """Where a short text that is remembered ends, 0 when there is none."""
    end = at + 3 + data[at + 1] if data.startswith(b"\x8c", at) and at + 1 < len(data) else 0
    return end if end and data.startswith(b"\x94", end - 1) else 0


def _number(reference: bytes) -> int:
    return int.from_bytes(reference[1:], "little")


class _Fields(dict[bytes, tuple[object, tuple[object, ...]]]):
    """Fields by their bytes: the value, and what the memo keeps of it."""

    def __init__(self, size: Function) -> None:
        super().__init__()
        self._size = size
        self._memo: list[object] = []

    def __missing__(self, field: bytes) -> tuple[object, tuple[object, ...]]:
        """Read a field that was not met before; KeyError for one that is to be interpreted."""
        code = field[0]
        if code in b"KM":  # most are places in files, each its own
            return int.from_bytes(field[1:], "little"), ()
        if code in b"J\x8a":
            return int.from_bytes(field[1 if code == _INT else 2 :], "little", signed=True), ()
        if len(self) > _MAX_KNOWN:
            self.clear()
        if code == _TEXT:
            if len(field) != field[1] + 3:  # the expression does not look at its length
                raise KeyError(field)
            text = sys.intern(str(field[2:-1], "utf-8", "surrogatepass"))
            found: tuple[object, tuple[object, ...]] = text, (text,)
        else:
            found = (None, ()) if field == b"N" else self._referred(field)
        self[field] = found
        return found

    def _referred(self, field: bytes) -> tuple[object, tuple[object, ...]]:
        """What a reference gives, or what the function does that it refers to."""
        end = 2 if field[:1] == b"h" else 5
        number = _number(field[:end])
        if number >= len(self._memo):
            raise KeyError(field)
        value = self._memo[number]
        if len(field) == end:
            return value, ()
        if value is not self._size:
            raise KeyError(field)
        numbers = tuple(self[one][0] for one in _ONE_NUMBER.findall(field, end))
        size = self._size.run((numbers,))
        return size, (numbers, (numbers,), size) if numbers else ((numbers,), size)

    def rows(
        self, memo: list[object], shape: _Shape, rows: Sequence[tuple[bytes, ...]]
    ) -> list[tuple[object, ...]]:
        """The objects of as many entries as can be made at once, from the first on.

        What they put into the memo is in it then.
        """
        self._memo = memo
        while rows:
            try:
                columns = [list(map(self.__getitem__, raw)) for raw in zip(*rows, strict=True)]
            except KeyError as unlike:  # often it refers to one of these rows
                rows = rows[: next(at for at, row in enumerate(rows) if unlike.args[0] in row)]
                continue
            made = _made(shape, columns, memo)
            if made:
                return made
            rows = rows[: len(rows) // 2]
        return []


def _made(
    shape: _Shape,
    columns: Sequence[Sequence[tuple[object, tuple[object, ...]]]],
    memo: list[object],
) -> list[tuple[object, ...]]:
    """The objects of each entry; none where a class does not take one of its columns."""
    objects, kept, at = list[Sequence[object]](), list[Iterable[Iterable[object]]](), 0
    for kind, names in shape.kinds:
        fields = [tuple(zip(*column, strict=True)) for column in columns[at : at + len(names)]]
        at += len(names)
        values = [values for values, _ in fields]
        attributes = kind.columns(dict(zip(names, values, strict=True)))
        if attributes is None:
            return []
        made = list(map(object.__new__, repeat(kind, len(columns[0]))))
        for name, column in attributes.items():
            deque(map(setattr, made, repeat(name), column), maxlen=0)
        objects.append(made)
        kept += [zip(made, repeat({})), *(parts for _, parts in fields)]
    memo += chain.from_iterable(chain.from_iterable(zip(*kept, strict=True)))
    return list(zip(*objects, strict=True))
