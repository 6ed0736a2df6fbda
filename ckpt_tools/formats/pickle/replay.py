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
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, chain, islice, repeat
from typing import NamedTuple, TypeGuard

from ckpt_tools.formats.pickle.machine import Machine
from ckpt_tools.formats.pickle.memo import Memo
from ckpt_tools.formats.pickle.nodes import Function, Repeated

# Two objects of an entry with their fields; a value that is the same has no such bound.
_MAX_ENTRY = 1024
_MAX_SHAPES = 32
_MAX_SAME = 64
_MAX_SAME_BYTES = 64 << 10
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
_OBJECT = re.compile(rb"(%b\)\x81\x94}\x94\()" % _REFERENCE, re.DOTALL)
_NAMED_FIELD = re.compile(rb"(%b)%b" % (_REFERENCE, _FIELD), re.DOTALL)
_END = b"ub"
_OF_OBJECT = 2  # memo numbers of an object and its state, which lie before those of its fields


class _Shape(NamedTuple):
    """The objects of an entry: their classes, the names of their fields, and the expression."""

    kinds: tuple[tuple[type[Repeated], tuple[str, ...]], ...]
    entry: re.Pattern[bytes]


class _Same(NamedTuple):
    """A value that may come again: its bytes, the value, and its numbers in the memo."""

    data: bytes
    value: object
    first: int
    numbers: int


class _UnlikeError(Exception):
    """A field that is read by interpreting it."""

    def __init__(self, field: bytes) -> None:
        super().__init__()
        self.field = field


class Repetition:
    """The replay of one pickle; ``size`` is the function that makes a tuple of numbers."""

    def __init__(self, size: Function) -> None:
        self._size = size
        self._same: list[_Same] = []
        self._shapes: dict[bytes, _Shape] = {}
        self._fields: _Fields | None = None
        self._credit = _CREDIT

    def entries_after(self, machine: Machine, at: int) -> int:
        """After an object was filled: push what the next entries make, as far as they are alike.

        An entry is a key and its value, or two objects of a list.
        """
        height, start, first = machine.entry
        if len(machine.items) != height + 2:
            return at
        if machine.memo.is_dense and at - start <= _MAX_SAME_BYTES:
            if begin := _after_name(machine.data, start):
                at = self._named(machine, begin, first, at)
            elif at - start <= _MAX_ENTRY and self._credit > 0:
                at = self._rows(machine, machine.data[start:at], at)
        machine.entry = len(machine.items), at, len(machine.memo)
        return at

    def _named(self, machine: Machine, begin: int, first: int, at: int) -> int:
        """Push all that is a name and a value with the bytes of one before."""
        data = machine.data
        count = len(machine.memo) - first - 1
        self._same.insert(0, _Same(data[begin:at], machine.items[-1], first + 1, count))
        del self._same[_MAX_SAME:]
        names: list[str] = []
        values: list[object] = []
        found: list[_Same] = []
        while begin := _after_name(data, at):
            same = next((one for one in self._same if data.startswith(one.data, begin)), None)
            if same is None:
                break
            names.append(str(data[at + 2 : begin - 1], "utf-8", "surrogatepass"))
            values.append(same.value)
            found.append(same)
            at = begin + len(same.data)
        if found:
            machine.items.extend(chain.from_iterable(zip(names, values, strict=True)))
            _skip_named(machine.memo, names, found)
        return at

    def _rows(self, machine: Machine, entry: bytes, at: int) -> int:
        """Push the entries that have the shape of this one, a thousand at a time."""
        if self._fields is None:
            self._fields = _Fields(machine.memo, self._size)
        try:
            shape = self._shape_of(machine.memo, entry)
        except IndexError:  # a text whose length is another one: it was no row of objects
            shape = None
        if shape is None:
            return at
        while True:
            found = list(islice(_in_a_row(shape.entry, machine.data, at), _ROWS))
            made = self._fields.rows(shape, [match.groups() for match in found])
            if made is None:
                self._credit -= bool(found)
                return at
            machine.items.extend(chain.from_iterable(zip(*made.objects, strict=True)))
            at = found[made.skip(machine.memo) - 1].end()

    def _shape_of(self, memo: Memo, entry: bytes) -> _Shape | None:
        """The shape of an entry, None for one that is no row of objects of `Repeated` classes."""
        for shape in self._shapes.values():
            if shape.entry.fullmatch(entry):
                return shape
        kinds: list[tuple[type[Repeated], tuple[str, ...]]] = []
        source, at = b"", 0
        while found := _OBJECT.match(entry, at):
            kind, names, at = memo.get(_number(found[1][:-6])), list[object](), found.end()
            source += re.escape(found[1])
            while field := _NAMED_FIELD.match(entry, at):
                names.append(memo.get(_number(field[1])))
                source += re.escape(field[1]) + _FIELD
                at = field.end()
            words = tuple(name for name in names if type(name) is str)
            if not entry.startswith(_END, at) or not _is_repeated(kind) or len(words) < len(names):
                return None
            kinds.append((kind, words))
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


def _in_a_row(entry: re.Pattern[bytes], data: bytes, at: int) -> Iterator[re.Match[bytes]]:
    while found := entry.match(data, at):
        yield found
        at = found.end()


def _is_repeated(kind: object) -> TypeGuard[type[Repeated]]:
    return isinstance(kind, type) and issubclass(kind, Repeated)


class _Fields(dict[bytes, tuple[object, int]]):
    """Fields by their bytes: the value, and how many numbers of the memo it takes."""

    def __init__(self, memo: Memo, size: Function) -> None:
        super().__init__()
        self._memo = memo
        self._size = size

    def __missing__(self, field: bytes) -> tuple[object, int]:
        """Read a field that was not met before."""
        if field[0] in _WIDTHS:  # most are places in files, each its own
            return int.from_bytes(field[1:], "little", signed=field[0] == _SIGNED), 0
        if len(self) > _MAX_KNOWN:
            self.clear()
        found = self[field] = self._read(field)
        return found

    def _read(self, field: bytes) -> tuple[object, int]:
        if field == b"N":
            return None, 0
        if field[0] == _LONG:
            return _int_at(field, 0)[0], 0
        return self._text(field) if field[0] == _TEXT else self._referred(field)

    def _text(self, field: bytes) -> tuple[str, int]:
        """A short text, which ends where its length says: the expression does not look at that."""
        if len(field) == field[1] + 3:
            with suppress(UnicodeDecodeError):
                return sys.intern(str(field[2:-1], "utf-8")), 1
        raise _UnlikeError(field)

    def _referred(self, field: bytes) -> tuple[object, int]:
        """What a reference gives, or what the function does that it refers to."""
        end = 2 if field[:1] == b"h" else 5
        number = _number(field[:end])
        if number >= len(self._memo):
            raise _UnlikeError(field)
        value = self._memo.get(number)
        if len(field) == end:
            return value, 0
        if value is not self._size:
            raise _UnlikeError(field)
        if field[end : end + 1] == b")":
            return self._size.run(((),)), 2
        at, numbers = end + (field[end : end + 1] == b"("), list[int]()
        while field[at] in _WIDTHS or field[at] == _LONG:
            made, at = _int_at(field, at)
            numbers.append(made)
        return self._size.run(((*numbers,),)), 3

    def rows(self, shape: _Shape, rows: list[tuple[bytes, ...]]) -> _Rows | None:
        """The objects of as many entries as can be made at once, from the first on; or None."""
        while rows:
            try:
                columns = [list(map(self.__getitem__, raw)) for raw in zip(*rows, strict=True)]
            except _UnlikeError as unlike:  # often it refers to one of these rows
                rows = rows[: next(at for at, row in enumerate(rows) if unlike.field in row)]
                continue
            made = _rows(shape, columns)
            if made is not None:
                return made
            rows = rows[: len(rows) // 2]
        return None


_WIDTHS = {ord("K"): 1, ord("M"): 2, ord("J"): 4}
_SIGNED = ord("J")
_LONG, _TEXT = 0x8A, 0x8C
_MAX_KNOWN = 1 << 18


def _int_at(field: bytes, at: int) -> tuple[int, int]:
    """The number whose opcode is at this place, and where it ends."""
    start = at + 1 + (field[at] == _LONG)
    end = start + (_WIDTHS.get(field[at]) or field[at + 1])
    return int.from_bytes(field[start:end], "little", signed=field[at] in b"J\x8a"), end


def _rows(shape: _Shape, columns: Sequence[Sequence[tuple[object, int]]]) -> _Rows | None:
    objects, groups, at = [], [], 0
    for kind, names in shape.kinds:
        pairs = [tuple(zip(*column, strict=True)) for column in columns[at : at + len(names)]]
        values = [values for values, _ in pairs]
        at += len(names)
        attributes = kind.columns(dict(zip(names, values, strict=True)))
        if attributes is None:
            return None
        made = list(map(object.__new__, repeat(kind, len(columns[0]))))
        for name, column_ in attributes.items():
            deque(map(setattr, made, repeat(name), column_), maxlen=0)
        objects.append(made)
        groups.append([(values, bytes(counts)) for values, counts in pairs])
    return _Rows(objects, groups)


class _Rows:
    """Objects of entries of one shape, and what they have put into the memo.

    ``groups`` has, for each object of an entry, the columns of its fields: values, and how many
    numbers of the memo each takes.
    """

    def __init__(
        self,
        objects: Sequence[Sequence[object]],
        groups: Sequence[Sequence[tuple[Sequence[object], bytes]]],
    ) -> None:
        self.objects = objects
        self._groups = groups
        self._starts = array("Q")

    def skip(self, memo: Memo) -> int:
        """Count what they put into the memo; gives how many entries they are."""
        every = [counts for group in self._groups for _, counts in group]
        own = _OF_OBJECT * len(self._groups)
        sums = (own + sum(counts) for counts in zip(*every, strict=True))
        self._starts.extend(accumulate(sums, initial=0))
        memo.skip(self._value, self._starts.pop())
        return len(self._starts)

    def _value(self, number: int) -> object:
        row = bisect_right(self._starts, number) - 1
        left = number - self._starts[row]
        for made, fields in zip(self.objects, self._groups, strict=True):
            if left < _OF_OBJECT:
                return made[row] if left == 0 else {}
            left -= _OF_OBJECT
            for values, counts in fields:
                if left < counts[row]:
                    value = values[row]  # of a size: its numbers, the arguments, and itself
                    return (value,) if left == counts[row] - 2 else value
                left -= counts[row]
        raise IndexError


def _skip_named(memo: Memo, names: Sequence[str], found: Sequence[_Same]) -> None:
    """Count what names and values that came again have put into the memo."""
    starts = array("Q", accumulate((1 + same.numbers for same in found), initial=0))

    def value(number: int) -> object:
        """A name, or what the value had under its number when it came first."""
        row = bisect_right(starts, number) - 1
        left = number - starts[row]
        return memo.get(found[row].first + left - 1) if left else names[row]

    memo.skip(value, starts.pop())
