"""A walk over the opcodes of a pickle before it is loaded: refuses what would cost too much.

A few bytes of a pickle can make the unpickler take gigabytes (a memo index of 2**32) or never end
(a dict key of tuples that hold one another, hashed again and again). The walk follows the stack
and the memo and knows of every value only its weight: how much work it is to hash it. Globals are
not looked at, and no value is made.

The pickle of ``((1,), (1,))``, and the stack of weights after each opcode:

    80 04   PROTO 4
    4b 01   BININT1 1   [0]
    85      TUPLE1      [2]      a tuple weighs 1, and for each item 1 more and what the item weighs
    94      MEMOIZE     [2]      the memo is [2]
    68 00   BINGET 0    [2, 2]
    86      TUPLE2      [7]      twice that, and 3: six such steps more are too heavy for a key
    2e      STOP        []

A step takes about 0.3 µs: the effects of opcodes that stand before every chunk in DCP metadata are
written out flat, a call of a method costs as much as they do. Large pickles of many entries of one
shape would still take long. So what comes after an entry is compared with a regular expression
made of it: see `guard_shapes`.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckpt_tools.errors import UnreadableError, UnsafePickleError
from ckpt_tools.formats.pickle.guard_shapes import MAX_SHAPE, Shape, shape_of

# Weights: 0 costs nothing to hash, `_HEAVY` too much.
_HEAVY = 250
# What a call makes weighs a little; so does a long number as a key, up to these bytes.
_CALLED = 8
_MAX_LONG_KEY = 64
_UNSET = 255
# torch numbers the memo without gaps; pickletools.optimize and old writers leave small ones.
_MAX_MEMO_GAP = 1 << 16
_MAX_TUPLE_KEYS = 5000
# Empty containers cost one byte each, and 60 to 220 in memory.
_FREE_OBJECTS = 200_000
_BYTES_PER_OBJECT = 4
# Compiling a shape takes as long as walking about 60 KB without it.
_SHAPES_FROM = 2 << 20


class CutPickleError(UnreadableError):
    """The bytes end before the pickle does."""


def end_of_pickle(data: bytes, start: int = 0) -> int:
    """Where the pickle that begins at ``start`` ends, when it is one that costs what its size says.

    Raises CutPickleError when the data ends first, UnreadableError for a pickle that is damaged or
    hostile, and UnsafePickleError for opcodes that call a class by its name.
    """
    walk, steps = _Walk(data), _STEPS
    at, size = start, 0
    try:
        while data[at] != _STOP:
            effect, size = steps[data[at]]
            at = effect(walk, at + 1, at + 1 + size)
        size = 0
        walk.take(1)
        return at + 1
    except IndexError as error:
        if at + size >= len(data):
            raise CutPickleError("is truncated: it ends inside of its pickle.") from error
        raise UnreadableError(f"is damaged: it holds no pickle, at byte {at:,}.") from error


class _Boundary(NamedTuple):
    """The state at the end of the last entry of a batch."""

    height: int
    at: int
    memo: int
    objects: int


class _Walk:
    """The stack and the memo of weights at one point of a pickle."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo = bytearray()
        self.objects = 0
        self.most_objects = _FREE_OBJECTS + len(data) // _BYTES_PER_OBJECT
        self.by_shape = len(data) >= _SHAPES_FROM
        self._known = 0
        self._tuple_keys = 0
        self._boundaries: list[_Boundary] = []
        self._shapes: dict[bytes, Shape | None] = {}
        # How often an entry may still turn out to be unlike the next one.
        self._credit = 1000

    def mark(self, at: int) -> None:
        """Begin a batch."""
        self.marks.append(len(self.stack))
        if self.by_shape:
            self._boundaries.append(_Boundary(len(self.stack), at, len(self.memo), self.objects))

    def above_mark(self) -> list[int]:
        """The items since the last mark, which are taken off the stack."""
        if self.by_shape:
            self._boundaries.pop()
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def take(self, count: int) -> None:
        """Take items off the stack."""
        if count > len(self.stack):
            raise IndexError
        del self.stack[len(self.stack) - count :]

    def refuse_objects(self) -> None:
        """Raise that there are more containers and objects than a pickle of this length has."""
        raise UnreadableError(f"is hostile: {self.objects:,} objects in {len(self.data):,} bytes.")

    def push_tuple(self, items: Sequence[int]) -> None:
        """Push a tuple of items of these weights."""
        self.stack.append(min(_HEAVY, 1 + len(items) + sum(items)))

    def check_keys(self, keys: Sequence[int]) -> None:
        """Check that values of these weights may be hashed."""
        if not any(keys):
            return
        self._tuple_keys += sum(1 for weight in keys if weight)
        if max(keys) >= _HEAVY or self._tuple_keys > _MAX_TUPLE_KEYS:
            raise UnreadableError("is hostile: its dicts have keys that take too long to compare.")

    def memoize(self) -> None:
        """Remember the top of the stack under the next free number."""
        if self._known == len(self.memo):
            self.memo.append(self.stack[-1])
            self._known += 1
        else:
            self._put(self._known, self.stack[-1])

    def put(self, index: int) -> None:
        """Remember the top of the stack under a number."""
        if index > self._known + _MAX_MEMO_GAP:
            raise UnreadableError(f"is hostile: a memo of {index:,} for {self._known:,} values.")
        self._put(index, self.stack[-1])

    def _put(self, index: int, weight: int) -> None:
        missing = index + 1 - len(self.memo)
        if missing > 0:
            self.memo.extend(bytes((_UNSET,)) * missing)
        if self.memo[index] == _UNSET:
            self._known += 1
        self.memo[index] = weight

    def get(self, index: int) -> None:
        """Push what is remembered under a number."""
        weight = self.memo[index]
        if weight == _UNSET:
            raise IndexError
        self.stack.append(weight)

    def skip_entries(self, at: int) -> int:
        """After an object was filled: skip what follows and has the shape of the last two objects.

        These are two chunks of a list, or a key and its value.
        """
        if not self._boundaries or self._credit <= 0:
            return at
        last = self._boundaries[-1]
        if len(self.stack) != last.height + 2:
            return at
        entry = self.data[last.at : at] if at - last.at <= MAX_SHAPE else b""
        if entry and self._known == len(self.memo):
            at = self._skip(entry, last, at)
        self._boundaries[-1] = _Boundary(len(self.stack), at, len(self.memo), self.objects)
        return at

    def _skip(self, entry: bytes, last: _Boundary, at: int) -> int:
        shape = shape_of(entry, self._shapes)
        end, count = shape.run(self.data, at) if shape else (at, 0)
        self._credit += count or -1
        self.stack.extend(self.stack[last.height :] * count)
        self.memo.extend(self.memo[last.memo :] * count)
        self._known = len(self.memo)
        self.objects += (self.objects - last.objects) * count
        return end


# An opcode's effect on the walk: its argument lies from the first place to the second; gives where
# to go on. A step is an effect and how many bytes its argument has, 0 where it finds that out.
_Effect = Callable[[_Walk, int, int], int]
_Step = tuple[_Effect, int]


def _plain(opcode: pickletools.OpcodeInfo) -> _Effect:
    """Take and push as `pickletools` says: for opcodes that make values of no weight."""
    taken, pushed = len(opcode.stack_before), len(opcode.stack_after)
    to_mark = pickletools.markobject in opcode.stack_before
    if pushed and not taken:
        return _value

    def effect(walk: _Walk, _at: int, end: int) -> int:
        if to_mark:
            walk.above_mark()
        elif taken:
            walk.take(taken)
        if pushed:
            walk.stack.append(0)
        return end

    return effect


def _value(walk: _Walk, _at: int, end: int) -> int:
    walk.stack.append(0)
    return end


def _refused(_walk: _Walk, at: int, _end: int) -> int:
    raise UnreadableError(f"has an opcode at byte {at - 1:,} that torch never writes.")


def _instance(walk: _Walk, at: int, end: int) -> int:
    name = walk.data[at : end - 1].decode("utf-8", "backslashreplace").replace("\n", ".")[:160]
    raise UnsafePickleError(
        f"asks to call {name!a} in a way that torch never does; it was not run."
    )


def _long(walk: _Walk, at: int, end: int) -> int:
    size = end - at
    walk.stack.append(0 if size <= 9 else _CALLED if size <= _MAX_LONG_KEY else _HEAVY)
    return end


def _making(taken: int, weight: int) -> _Effect:
    """Take a callable and its arguments, or nothing, and push an object."""

    def effect(walk: _Walk, _at: int, end: int) -> int:
        if taken == 2:
            walk.stack.pop()
            walk.stack[-1] = weight
        else:
            walk.take(taken)
            walk.stack.append(weight)
        walk.objects += 1
        if walk.objects > walk.most_objects:
            walk.refuse_objects()
        return end

    return effect


def _collecting(*, every: int, makes: bool) -> _Effect:
    """Take all above the mark into a container, each ``every``-th a key, none when it is 0."""
    make = _making(0, 0)

    def effect(walk: _Walk, at: int, end: int) -> int:
        items = walk.above_mark()
        if every and any(items):
            walk.check_keys(items[::every])
        return make(walk, at, end) if makes else end

    return effect


def _tuple_of(count: int) -> _Effect:
    def effect(walk: _Walk, _at: int, end: int) -> int:
        items = walk.stack[len(walk.stack) - count :]
        walk.take(count)
        walk.push_tuple(items)
        return end

    return effect


def _tuple(walk: _Walk, _at: int, end: int) -> int:
    walk.push_tuple(walk.above_mark())
    return end


def _mark(walk: _Walk, _at: int, end: int) -> int:
    walk.mark(end)
    return end


def _storage(walk: _Walk, _at: int, end: int) -> int:
    walk.stack[-1] = _CALLED
    return end


def _append(walk: _Walk, _at: int, end: int) -> int:
    walk.take(1)
    return end


def _setitem(walk: _Walk, _at: int, end: int) -> int:
    walk.check_keys(walk.stack[-2:-1])
    walk.take(2)
    return end


def _build(walk: _Walk, _at: int, end: int) -> int:
    walk.stack.pop()
    return walk.skip_entries(end) if walk.by_shape else end


def _memoize(walk: _Walk, _at: int, end: int) -> int:
    walk.memoize()
    return end


def _put(walk: _Walk, at: int, end: int) -> int:
    walk.put(int.from_bytes(walk.data[at:end], "little"))
    return end


def _get(walk: _Walk, at: int, end: int) -> int:
    walk.get(int.from_bytes(walk.data[at:end], "little"))
    return end


def _put_line(walk: _Walk, at: int, end: int) -> int:
    walk.put(_line_number(walk, at, end))
    return end


def _get_line(walk: _Walk, at: int, end: int) -> int:
    walk.get(_line_number(walk, at, end))
    return end


def _line_number(walk: _Walk, at: int, end: int) -> int:
    digits = walk.data[at : end - 1]
    if not digits.isdigit() or len(digits) > 10:
        raise UnreadableError(
            f"is damaged: a memo number in its pickle is not a number, at byte {at:,}."
        )
    return int(digits)


def _pop(walk: _Walk, _at: int, end: int) -> int:
    if walk.marks and walk.marks[-1] == len(walk.stack):
        walk.above_mark()
    else:
        walk.take(1)
    return end


def _dup(walk: _Walk, _at: int, end: int) -> int:
    walk.stack.append(walk.stack[-1])
    return end


# The opcodes with more to them than `pickletools` knows: weights, keys, marks, objects, the memo.
_EFFECTS: dict[str, _Effect] = {
    **dict.fromkeys("Po\x82\x83\x84\x97\x98", _refused),
    **dict.fromkeys("]}\x8f", _making(0, 0)),
    **dict.fromkeys("\x8a\x8b", _long),
    **dict.fromkeys("hj", _get),
    **dict.fromkeys("qr", _put),
    "(": _mark,
    ")": _tuple_of(0),
    "0": _pop,
    "2": _dup,
    "Q": _storage,
    "R": _making(2, _CALLED),
    "a": _append,
    "b": _build,
    "d": _collecting(every=2, makes=True),
    "e": _collecting(every=0, makes=False),
    "g": _get_line,
    "i": _instance,
    "l": _collecting(every=0, makes=True),
    "p": _put_line,
    "s": _setitem,
    "t": _tuple,
    "u": _collecting(every=2, makes=False),
    "\x81": _making(2, 0),
    "\x85": _tuple_of(1),
    "\x86": _tuple_of(2),
    "\x87": _tuple_of(3),
    "\x90": _collecting(every=1, makes=False),
    "\x91": _collecting(every=1, makes=True),
    "\x92": _making(3, 0),
    "\x94": _memoize,
}
# Bytes that say how long an argument is, where pickletools says that there are such bytes.
_COUNTS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


def _step_of(opcode: pickletools.OpcodeInfo) -> _Step:
    effect = _EFFECTS.get(opcode.code) or _plain(opcode)
    size = opcode.arg.n if opcode.arg else 0
    if size >= 0:
        return effect, size
    if size in _COUNTS:
        return _counted(effect, _COUNTS[size]), 0
    return _lined(effect, 2 if opcode.arg is pickletools.stringnl_noescape_pair else 1), 0


def _counted(effect: _Effect, width: int) -> _Effect:
    """An argument whose length comes first, in ``width`` bytes."""

    def step(walk: _Walk, at: int, _end: int) -> int:
        data = walk.data
        end = at + width + int.from_bytes(data[at : at + width], "little")
        if end > len(data):
            raise CutPickleError("is truncated: it ends inside of its pickle.")
        return effect(walk, at, end)

    return step


def _lined(effect: _Effect, lines: int) -> _Effect:
    """An argument of one or two lines of text."""

    def step(walk: _Walk, at: int, _end: int) -> int:
        end = at
        for _ in range(lines):
            end = walk.data.find(b"\n", end) + 1
            if end == 0:
                raise CutPickleError("is truncated: it ends inside of its pickle.")
        return effect(walk, at, end)

    return step


def _unknown(_walk: _Walk, at: int, _end: int) -> int:
    raise UnreadableError(f"is damaged: its pickle has no opcode at byte {at - 1:,}.")


_STOP = ord(".")
_STEPS: list[_Step] = [(_unknown, 0)] * 256
for _opcode in pickletools.opcodes:
    _STEPS[ord(_opcode.code)] = _step_of(_opcode)
