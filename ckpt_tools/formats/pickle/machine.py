r"""Interprets a pickle: bytes in, a value out. This file is why no pickle can run code.

A pickle is a program for a machine with a stack and a memo. Here each of its opcodes is one short
function in `_STEPS`. They make numbers, texts, lists, dicts and tuples, and look names up in a
table of ours. What is called is in `Machine.called`, and nothing else: the functions of that table.
Of any other name, and of what a pickle makes of it, a note is taken (`nodes`): it is never
imported.

The pickle of ``{"a": Size((1, 2))}``, what each opcode does, and the stack after it:

    80 02                   PROTO 2
    7d                      EMPTY_DICT   [{}]
    58 01 00 00 00 61       BINUNICODE   [{}, "a"]
    63 torch \n Size \n       GLOBAL       [{}, "a", f]       f is what the table has for torch.Size
    4b 01 4b 02 86          TUPLE2       [{}, "a", f, (1, 2)]
    85                      TUPLE1       [{}, "a", f, ((1, 2),)]
    52                      REDUCE       [{}, "a", (1, 2)]    what f((1, 2)) gives
    73                      SETITEM      [{"a": (1, 2)}]
    2e                      STOP         the value

A few bytes could take gigabytes (a memo of 2**32, a million empty lists) or never end (a key of
tuples that hold one another, hashed again and again): `limits` says what is too much. No text, and
no number, is longer than its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ckpt_tools.errors import UnreadableError, UnsafePickleError, printable
from ckpt_tools.formats.pickle.limits import (
    BYTES_PER_OBJECT,
    FREE_ITEMS,
    FREE_OBJECTS,
    HEAVY_KEY,
    MAX_COPIED,
    MAX_GAPS,
    MAX_HEAVY_KEYS,
    MAX_LONG,
    MAX_MARKS,
    MAX_NAMES,
    MAX_SHOWN,
    OBJECTS_OF_CALL,
    is_word,
)
from ckpt_tools.formats.pickle.nodes import (
    LIGHT_KEYS,
    Function,
    Global,
    Instance,
    Opaque,
    Repeated,
    key_weight,
)

_NEWEST_PROTOCOL = 5
# What Python raises for texts, numbers and keys that are none, and our functions for odd arguments.
_DAMAGE = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)


class CutPickleError(UnreadableError):
    """The bytes end before the pickle does."""

    def __init__(self) -> None:
        super().__init__("is truncated: it ends inside of its pickle.")


Replay: TypeAlias = "Callable[[Machine, int], int]"


class _Gaps(dict[int, object]):
    """A memo of other numbers than a list has: Python 2 began at 1, and left some out."""

    def append(self, value: object) -> None:
        self[len(self)] = value

    def __setitem__(self, number: int, value: object) -> None:
        if len(self) == MAX_GAPS:
            raise UnreadableError("is hostile: the numbers of its memo leave some out.")
        super().__setitem__(number, value)

    def __missing__(self, number: int) -> object:
        raise IndexError(number)


class Machine:
    """Stack and memo of the pickle at the start of the data, which `run` gives the value of.

    ``resolve`` gives what stands for a global, ``storage`` what stands for a persistent id. Of the
    stack, ``items`` is what lies above the last mark.

    After an object was filled, ``replay`` pushes what the next entries make, as far as they are
    alike, and gives where the first one begins that is unlike. It keeps ``entry``: what follows a
    mark, or another entry. How many items lie before it, where it begins in ``data``, and how long
    the memo was then.
    """

    def __init__(
        self,
        data: bytes,
        *,
        resolve: Callable[[Global], object],
        storage: Callable[[object], object],
        replay: Replay | None = None,
    ) -> None:
        self.data = data
        self.items: list[object] = []
        self.memo: list[object] | _Gaps = []  # by number; without gaps as `pickle` writes it
        self.entry = (0, 0, 0)
        self.storage = storage
        self.replay = replay
        self._resolve = resolve
        self._named: dict[tuple[str, str], object] = {}
        self._below: list[tuple[list[object], tuple[int, int, int]]] = []
        self._most_objects = self.objects_left = FREE_OBJECTS + len(data) // BYTES_PER_OBJECT
        self._heavy_keys = 0
        self._bytes_to_copy = MAX_COPIED + len(data)
        self._items_to_copy = FREE_ITEMS + len(data) // 2

    def run(self) -> tuple[object, int]:
        """The value of the pickle, and where it ends.

        Raises CutPickleError when the data ends first, UnreadableError for a pickle that is damaged
        or hostile, and what `resolve`, `storage` and the functions of the table raise.
        """
        at, code, data, steps = 0, 0, self.data, _STEPS
        try:
            while True:
                code = data[at]
                at += 1
                if code == _STOP:
                    break
                if (end := steps[code](self, at)) is not None:
                    at = end
            if self.objects_left < 0:
                raise self._too_many()
            return self.items.pop(), at
        except IndexError as error:
            if code != _STOP and at + (4 if code == _LONG_GET else 1) > len(data):
                raise CutPickleError from error
            raise UnreadableError(f"is damaged: it holds no pickle, at byte {at - 1:,}.") from error
        except _DAMAGE as error:
            reason = printable(str(error))[:MAX_SHOWN] or type(error).__name__
            message = f"is damaged: its pickle cannot be read ({reason})."
            raise UnreadableError(message) from error

    def put_mark(self, at: int) -> None:
        """Put a mark on the stack; what follows it begins at this place."""
        if len(self._below) == MAX_MARKS:
            raise UnreadableError(f"is nested more than {MAX_MARKS:,} deep.")
        self._below.append((self.items, self.entry))
        self.items, self.entry = [], (0, at, len(self.memo))

    def above_mark(self) -> list[object]:
        """The items above the last mark, which are taken off the stack with it."""
        items = self.items
        self.items, self.entry = self._below.pop()
        return items

    def remember(self, number: int) -> None:
        """Keep the last item under a number of the memo that is not its next."""
        if isinstance(self.memo, list):
            first, self.memo = self.memo, _Gaps()
            for value in first:
                self.memo.append(value)
        self.memo[number] = self.items[-1]

    def push_object(self, made: object, objects: int = 1) -> None:
        """Push a container or an object, and count it as so many."""
        self.items.append(made)
        self.objects_left -= objects
        if self.objects_left < 0:
            raise self._too_many()

    def _too_many(self) -> UnreadableError:
        return UnreadableError(
            f"is hostile: more than {self._most_objects:,} objects in {len(self.data):,} bytes."
        )

    def named(self, module: str, name: str) -> object:
        """What stands for a global."""
        asked = module, name
        if asked not in self._named:
            if not is_word(module) or not is_word(name):
                raise UnsafePickleError("asks for a class with a name of more than 255 characters.")
            if len(self._named) == MAX_NAMES:
                raise UnreadableError(f"asks for more than {MAX_NAMES:,} classes.")
            self._named[asked] = self._resolve(Global.of(module, name))
        return self._named[asked]

    def called(self, function: object, args: object) -> object:
        """What a function of the table makes of arguments: all that is ever called."""
        if type(args) is not tuple:
            raise TypeError("argument list must be a tuple")
        if isinstance(function, Global):
            return Instance(function, args, called=True)
        if not isinstance(function, Function):
            raise TypeError(f"'{type(function).__name__}' object is not callable")
        copied = args[0] if args else None  # they copy none but the first
        if isinstance(copied, list | tuple):
            self._items_to_copy -= len(copied)
        elif isinstance(copied, str | bytes | bytearray):
            self._bytes_to_copy -= len(copied)
        if self._items_to_copy < 0 or self._bytes_to_copy < 0:
            raise UnreadableError("is hostile: it copies values again and again.")
        return function.run(args)

    def check_keys(self, keys: Sequence[object]) -> None:
        """Check that these values may be hashed."""
        if all(kind in LIGHT_KEYS or issubclass(kind, Repeated) for kind in set(map(type, keys))):
            return
        weights = list(filter(None, map(key_weight, keys)))
        self._heavy_keys += len(weights)
        if max(weights, default=0) >= HEAVY_KEY or self._heavy_keys > MAX_HEAVY_KEYS:
            raise UnreadableError("is hostile: its dicts have keys that take too long to compare.")

    def set_items(self, target: object, items: Sequence[object]) -> None:
        """Give a dict or an instance these keys and values, which alternate."""
        keys = items[::2]
        self.check_keys(keys)
        if len(items) % 2:
            raise ValueError("odd number of items for SETITEMS")
        if isinstance(target, dict):
            target.update(zip(keys, items[1::2], strict=True))
        elif isinstance(target, Instance):
            target.pairs = target.pairs or []
            target.pairs.extend(zip(keys, items[1::2], strict=True))
        else:
            raise TypeError(f"'{type(target).__name__}' object does not support item assignment")


def _made(kind: object, args: object, kwargs: object = None) -> object:
    """A new object of a class."""
    if type(args) is not tuple or (kwargs is not None and type(kwargs) is not dict):
        raise TypeError("argument list must be a tuple")
    if isinstance(kind, Global):
        return Instance(kind, args, whole=not kwargs)
    if isinstance(kind, type) and issubclass(kind, Repeated) and not args and not kwargs:
        return kind()
    raise TypeError(f"NEWOBJ class argument must be a type, not {type(kind).__name__}")


# What an opcode does: its argument begins at the place that it is given; it gives where it ends,
# and nothing when there is none.
_Step = Callable[[Machine, int], int | None]


def _constant(value: object) -> _Step:
    def step(machine: Machine, _: int) -> None:
        machine.items.append(value)

    return step


def _protocol(machine: Machine, at: int) -> int:
    if machine.data[at] > _NEWEST_PROTOCOL:
        raise ValueError(f"unsupported pickle protocol: {machine.data[at]}")
    return at + 1


def _frame(machine: Machine, at: int) -> int:
    """How many bytes follow at least: what lacks one in its middle is told by that."""
    if at + 8 + int.from_bytes(machine.data[at : at + 8], "little") > len(machine.data):
        raise CutPickleError
    return at + 8


def _byte(machine: Machine, at: int) -> int:
    machine.items.append(machine.data[at])
    return at + 1


def _number(width: int, *, signed: bool) -> _Step:
    def step(machine: Machine, at: int) -> int:
        end = at + width
        machine.items.append(int.from_bytes(machine.data[at:end], "little", signed=signed))
        return end

    return step


def _counted(width: int, value_of: Callable[[bytes], object]) -> _Step:
    """A value whose length comes first, in ``width`` bytes."""

    def step(machine: Machine, at: int) -> int:
        start = at + width
        end = start + int.from_bytes(machine.data[at:start], "little")
        if end > len(machine.data):
            raise CutPickleError
        machine.items.append(value_of(machine.data[start:end]))
        return end

    return step


def _line(machine: Machine, at: int) -> tuple[bytes, int]:
    end = machine.data.find(b"\n", at) + 1
    if end == 0:
        raise CutPickleError
    return machine.data[at : end - 1], end


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _old_text(data: bytes) -> str:
    """A byte string of Python 2, as torch.load decodes it; only names and plain texts are used."""
    return str(data, "utf-8", "backslashreplace")


def _long(data: bytes) -> int | Opaque:
    if len(data) > MAX_LONG:
        return Opaque("builtins.int")
    return int.from_bytes(data, "little", signed=True)


def _float(machine: Machine, at: int) -> int:
    if at + 8 > len(machine.data):
        raise CutPickleError
    machine.items.append(struct.unpack_from(">d", machine.data, at)[0])
    return at + 8


def _new(make: Callable[[], object]) -> _Step:
    def step(machine: Machine, _: int) -> None:
        machine.push_object(make())

    return step


def _new_frozenset(machine: Machine, _: int) -> None:
    items = machine.above_mark()
    machine.check_keys(items)
    machine.push_object(frozenset(items))


def _tuple(machine: Machine, _: int) -> None:
    machine.push_object((*machine.above_mark(),))


def _tuple_of(count: int) -> _Step:
    def step(machine: Machine, _: int) -> None:
        items = machine.items
        if len(items) < count:
            raise IndexError
        items[-count:] = [tuple(items[-count:])]
        machine.objects_left -= 1

    return step


def _pop(machine: Machine, _: int) -> None:
    machine.items.pop()


def _pop_mark(machine: Machine, _: int) -> None:
    machine.above_mark()


def _add_items(target: object, items: Iterable[object]) -> None:
    if isinstance(target, Instance):
        target.items = target.items or []
        target = target.items
    if not isinstance(target, list):
        raise TypeError(f"'{type(target).__name__}' object has no attribute 'append'")
    target.extend(items)


def _append(machine: Machine, _: int) -> None:
    last = machine.items.pop()
    _add_items(machine.items[-1], (last,))


def _appends(machine: Machine, _: int) -> None:
    items = machine.above_mark()
    _add_items(machine.items[-1], items)


def _add_to_set(machine: Machine, _: int) -> None:
    items = machine.above_mark()
    machine.check_keys(items)
    target = machine.items[-1]
    if isinstance(target, set):
        target.update(items)
    else:
        _add_items(target, items)


def _setitem(machine: Machine, _: int) -> None:
    value = machine.items.pop()
    key = machine.items.pop()
    target = machine.items[-1]
    if type(key) is str and isinstance(target, dict):
        target[key] = value
    else:
        machine.set_items(target, (key, value))


def _setitems(machine: Machine, _: int) -> None:
    items = machine.above_mark()
    machine.set_items(machine.items[-1], items)


def _global(machine: Machine, at: int) -> int:
    module, middle = _line(machine, at)
    name, end = _line(machine, middle)
    machine.items.append(machine.named(module.decode(), name.decode()))
    return end


def _stack_global(machine: Machine, _: int) -> None:
    name = machine.items.pop()
    module = machine.items.pop()
    if type(module) is not str or type(name) is not str:
        raise TypeError("STACK_GLOBAL requires str")
    machine.items.append(machine.named(module, name))


def _reduce(machine: Machine, _: int) -> None:
    args = machine.items.pop()
    machine.push_object(machine.called(machine.items.pop(), args), OBJECTS_OF_CALL)


def _newobj(machine: Machine, _: int) -> None:
    args = machine.items.pop()
    machine.push_object(_made(machine.items.pop(), args), OBJECTS_OF_CALL)


def _newobj_ex(machine: Machine, _: int) -> None:
    kwargs = machine.items.pop()
    args = machine.items.pop()
    machine.push_object(_made(machine.items.pop(), args, kwargs), OBJECTS_OF_CALL)


def _build(machine: Machine, at: int) -> int | None:
    """Give an object its state; a dict of a class of its own loses its attributes."""
    state = machine.items.pop()
    target = machine.items[-1]
    if isinstance(target, Instance):
        target.state = state
    elif isinstance(target, Repeated):
        target.__setstate__(state)
    elif state is not None and not isinstance(target, dict):
        raise TypeError(f"'{type(target).__name__}' object takes no state")
    return machine.replay(machine, at) if machine.replay else None


def _storage(machine: Machine, _: int) -> None:
    machine.items[-1] = machine.storage(machine.items[-1])


def _memoize(machine: Machine, _: int) -> None:
    machine.memo.append(machine.items[-1])


def _put(width: int) -> _Step:
    def step(machine: Machine, at: int) -> int:
        end = at + width
        number = int.from_bytes(machine.data[at:end], "little")
        if number == len(machine.memo):
            machine.memo.append(machine.items[-1])
        else:
            machine.remember(number)
        return end

    return step


def _get(machine: Machine, at: int) -> int:
    machine.items.append(machine.memo[machine.data[at]])
    return at + 1


def _long_get(machine: Machine, at: int) -> int:
    number = int.from_bytes(machine.data[at : at + 4], "little")
    machine.items.append(machine.memo[number])
    return at + 4


def _refused(_machine: Machine, at: int) -> int:
    raise UnreadableError(
        f"is damaged, or of pickle protocol 0 or 1: byte {at - 1:,} is no opcode that torch writes."
    )


_STOP, _LONG_GET = b".j"
# fmt: off
_OF_OPCODE: dict[str, _Step] = {
    # Constants and numbers.
    "N": _constant(None), ")": _constant(()),
    "\x88": _constant(value=True), "\x89": _constant(value=False),
    "K": _byte, "M": _number(2, signed=False), "J": _number(4, signed=True), "G": _float,
    "\x8a": _counted(1, _long), "\x8b": _counted(4, _long),
    # Texts and bytes.
    "X": _counted(4, _text), "\x8c": _counted(1, _text), "\x8d": _counted(8, _text),
    "T": _counted(4, _old_text), "U": _counted(1, _old_text),
    "B": _counted(4, bytes), "C": _counted(1, bytes), "\x8e": _counted(8, bytes),
    "\x96": _counted(8, bytearray),
    # Containers, and what goes into them.
    "]": _new(list), "}": _new(dict), "\x8f": _new(set), "\x91": _new_frozenset,
    "t": _tuple, "\x85": _tuple_of(1), "\x86": _tuple_of(2), "\x87": _tuple_of(3),
    "a": _append, "e": _appends, "s": _setitem, "u": _setitems, "\x90": _add_to_set,
    # Names, and what is made by them.
    "c": _global, "\x93": _stack_global, "Q": _storage,
    "R": _reduce, "\x81": _newobj, "\x92": _newobj_ex, "b": _build,
    # Stack and memo.
    "(": Machine.put_mark, "0": _pop, "1": _pop_mark,
    "\x94": _memoize, "q": _put(1), "r": _put(4), "h": _get, "j": _long_get,
    "\x80": _protocol, "\x95": _frame,
}
# fmt: on
_STEPS: list[_Step] = [_OF_OPCODE.get(chr(code), _refused) for code in range(256)]
