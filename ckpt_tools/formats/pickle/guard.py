"""A walk over the opcodes of a pickle before it is loaded: refuses what would hurt by its cost.

A few bytes of a pickle can make the unpickler take gigabytes (a memo index of 2**32) or never end
(a dict key of tuples that hold one another, hashed again and again). The walk follows the stack
and the memo and knows of every value only its weight: how much work it is to hash it. Globals are
not looked at, and no value is made.

Large pickles of many entries of one shape, as DCP metadata is, would take long here. So the second
entry is compared with a regular expression made of the first, and so on: see `opcode_shapes`.
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools.errors import UnreadableError, UnsafePickleError
from ckpt_tools.formats.pickle.guard_stack import HEAVY, Walk

# What a call makes weighs a little; so does a long number as a key, up to these bytes.
_CALLED = 8
_MAX_LONG_KEY = 64

Step = Callable[[Walk, int], int]


class CutPickleError(UnreadableError):
    """The bytes end before the pickle does."""


def end_of_pickle(data: bytes, start: int = 0) -> int:
    """Where the pickle that begins at ``start`` ends, when it is one that costs what its size says.

    Raises CutPickleError when the data ends first, UnreadableError for a pickle that is damaged or
    hostile, and UnsafePickleError for opcodes that call a class by its name.
    """
    walk = Walk(data)
    at = start
    try:
        while True:
            op = data[at]
            at = _STEPS[op](walk, at + 1)
            if op == _STOP:
                return at
    except IndexError as error:
        if at >= len(data):
            raise CutPickleError("is cut short: it ends inside of its pickle.") from error
        raise UnreadableError(f"is damaged: its pickle is not one, at byte {at:,}.") from error


def _unknown(_walk: Walk, at: int) -> int:
    raise UnreadableError(f"is damaged: its pickle has no opcode at byte {at - 1:,}.")


def _refused(_walk: Walk, at: int) -> int:
    raise UnreadableError(f"has an opcode at byte {at - 1:,} that torch never writes.")


def _line(walk: Walk, at: int) -> int:
    """Past one line of text."""
    end = walk.data.find(b"\n", at) + 1
    if end == 0:
        raise CutPickleError("is cut short: it ends inside of its pickle.")
    return end


def _pushing(skip: int, weight: int = 0) -> Step:
    def step(walk: Walk, at: int) -> int:
        walk.stack.append(weight)
        return at + skip

    return step


def _pushing_counted(width: int) -> Step:
    """A value whose length comes first, in ``width`` bytes."""

    def step(walk: Walk, at: int) -> int:
        walk.stack.append(0)
        return _past_counted(walk, at, width)

    return step


def _past_counted(walk: Walk, at: int, width: int) -> int:
    data = walk.data
    end = at + width + int.from_bytes(data[at : at + width], "little")
    if end > len(data):
        raise CutPickleError("is cut short: it ends inside of its pickle.")
    return end


def _pushing_long(width: int) -> Step:
    def step(walk: Walk, at: int) -> int:
        end = _past_counted(walk, at, width)
        size = end - at - width
        walk.stack.append(0 if size <= 8 else _CALLED if size <= _MAX_LONG_KEY else HEAVY)
        return end

    return step


def _pushing_line(walk: Walk, at: int) -> int:
    walk.stack.append(0)
    return _line(walk, at)


def _global(walk: Walk, at: int) -> int:
    walk.stack.append(0)
    return _line(walk, _line(walk, at))


def _instance(walk: Walk, at: int) -> int:
    end = _line(walk, _line(walk, at))
    data = walk.data
    name = data[at : end - 1].decode("utf-8", "backslashreplace").replace("\n", ".")[:160]
    raise UnsafePickleError(
        f"asks to call {name!a} in a way that torch never does; it was not run."
    )


def _pushing_object(walk: Walk, at: int) -> int:
    walk.stack.append(0)
    walk.count_object()
    return at


def _calling(taken: int, weight: int) -> Step:
    """Take a callable and its arguments, push what it makes."""

    def step(walk: Walk, at: int) -> int:
        walk.take(taken)
        walk.stack.append(weight)
        walk.count_object()
        return at

    return step


def _stack_global(walk: Walk, at: int) -> int:
    walk.take(2)
    walk.stack.append(0)
    return at


def _storage(walk: Walk, at: int) -> int:
    walk.stack[-1] = _CALLED
    return at


def _mark(walk: Walk, at: int) -> int:
    walk.mark(at)
    return at


def _tuple_of(count: int) -> Step:
    def step(walk: Walk, at: int) -> int:
        items = walk.stack[-count:]
        walk.take(count)
        walk.push_tuple(items)
        return at

    return step


def _tuple(walk: Walk, at: int) -> int:
    walk.push_tuple(walk.above_mark())
    return at


def _list(walk: Walk, at: int) -> int:
    walk.above_mark()
    return _pushing_object(walk, at)


def _dict(walk: Walk, at: int) -> int:
    walk.check_keys(walk.above_mark()[::2])
    return _pushing_object(walk, at)


def _frozenset(walk: Walk, at: int) -> int:
    walk.check_keys(walk.above_mark())
    return _pushing_object(walk, at)


def _append(walk: Walk, at: int) -> int:
    walk.take(1)
    return at


def _appends(walk: Walk, at: int) -> int:
    walk.above_mark()
    return at


def _setitem(walk: Walk, at: int) -> int:
    walk.check_keys(walk.stack[-2:-1])
    walk.take(2)
    return at


def _setitems(walk: Walk, at: int) -> int:
    walk.check_keys(walk.above_mark()[::2])
    return at


def _additems(walk: Walk, at: int) -> int:
    walk.check_keys(walk.above_mark())
    return at


def _build(walk: Walk, at: int) -> int:
    walk.take(1)
    return walk.skip_entries(at)


def _memoize(walk: Walk, at: int) -> int:
    walk.memoize()
    return at


def _putting(width: int) -> Step:
    def step(walk: Walk, at: int) -> int:
        walk.put(_number(walk, at, width))
        return at + width

    return step


def _getting(width: int) -> Step:
    def step(walk: Walk, at: int) -> int:
        walk.get(_number(walk, at, width))
        return at + width

    return step


def _number(walk: Walk, at: int, width: int) -> int:
    data = walk.data
    return int.from_bytes(data[at : at + width], "little")


def _line_number(walk: Walk, at: int, end: int) -> int:
    digits = walk.data[at : end - 1]
    if not digits.isdigit() or len(digits) > 10:
        raise UnreadableError(f"is damaged: a memo number in its pickle is none, at byte {at:,}.")
    return int(digits)


def _put_line(walk: Walk, at: int) -> int:
    end = _line(walk, at)
    walk.put(_line_number(walk, at, end))
    return end


def _get_line(walk: Walk, at: int) -> int:
    end = _line(walk, at)
    walk.get(_line_number(walk, at, end))
    return end


def _pop(walk: Walk, at: int) -> int:
    if walk.marks and walk.marks[-1] == len(walk.stack):
        return _appends(walk, at)
    return _append(walk, at)


def _dup(walk: Walk, at: int) -> int:
    walk.stack.append(walk.stack[-1])
    return at


def _nothing(skip: int) -> Step:
    return lambda _walk, at: at + skip


_STOP = ord(".")
_TABLE: dict[str, Step] = {
    "(": _mark,
    ")": _pushing(0, 1),
    ".": _nothing(0),
    "0": _pop,
    "1": _appends,
    "2": _dup,
    "B": _pushing_counted(4),
    "C": _pushing_counted(1),
    "F": _pushing_line,
    "G": _pushing(8),
    "I": _pushing_line,
    "J": _pushing(4),
    "K": _pushing(1),
    "L": _pushing_line,
    "M": _pushing(2),
    "N": _pushing(0),
    "P": _refused,
    "Q": _storage,
    "R": _calling(2, _CALLED),
    "S": _pushing_line,
    "T": _pushing_counted(4),
    "U": _pushing_counted(1),
    "V": _pushing_line,
    "X": _pushing_counted(4),
    "]": _pushing_object,
    "a": _append,
    "b": _build,
    "c": _global,
    "d": _dict,
    "e": _appends,
    "g": _get_line,
    "h": _getting(1),
    "i": _instance,
    "j": _getting(4),
    "l": _list,
    "o": _refused,
    "p": _put_line,
    "q": _putting(1),
    "r": _putting(4),
    "s": _setitem,
    "t": _tuple,
    "u": _setitems,
    "}": _pushing_object,
    "\x80": _nothing(1),
    "\x81": _calling(2, 0),
    "\x82": _refused,
    "\x83": _refused,
    "\x84": _refused,
    "\x85": _tuple_of(1),
    "\x86": _tuple_of(2),
    "\x87": _tuple_of(3),
    "\x88": _pushing(0),
    "\x89": _pushing(0),
    "\x8a": _pushing_long(1),
    "\x8b": _pushing_long(4),
    "\x8c": _pushing_counted(1),
    "\x8d": _pushing_counted(8),
    "\x8e": _pushing_counted(8),
    "\x8f": _pushing_object,
    "\x90": _additems,
    "\x91": _frozenset,
    "\x92": _calling(3, 0),
    "\x93": _stack_global,
    "\x94": _memoize,
    "\x95": _nothing(8),
    "\x96": _pushing_counted(8),
    "\x97": _refused,
    "\x98": _refused,
}
_STEPS: list[Step] = [_TABLE.get(chr(op), _unknown) for op in range(256)]
