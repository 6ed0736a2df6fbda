"""Writes the pickles that torch.save would write, without torch and without its classes.

It takes plain Python values, and `Global`, `Instance`, `_Persistent` for what a pickle says about
classes (`nodes`). Protocol 2, with the same opcodes in the same order as `pickle.Pickler`, so that
a tensor's pickle is the same bytes. Equal strings are memoized as one; pickle itself would do so
only for the same object.

A subclass of `pickle._Pickler` was tried in its place: 43 lines fewer, but 1.4 times as slow for
each tensor (33 µs to 24), and it leans on methods that are private and differ between Pythons.

This room knows tensors; of checkpoint formats it knows nothing.
"""

from __future__ import annotations

import struct
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from pickle import encode_long
from pickletools import genops
from typing import TypeAlias

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import row_major_strides
from ckpt_tools.core.index import ObjectEntry
from ckpt_tools.core.plain_values import PickledValue, PlainValue, Size, TorchValue
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.pickle.containers import node_of
from ckpt_tools.formats.pickle.limits import MAX_INT_BITS
from ckpt_tools.formats.pickle.nodes import Global, Instance, call, is_key
from ckpt_tools.formats.pickle.stored import STORAGES


class NotPicklableError(Exception):
    """A value that has no pickle here, which is ``value``, or lies in it."""

    def __init__(self, value: object) -> None:
        super().__init__(type(value).__name__)
        self.value = value


@dataclass(frozen=True, slots=True, eq=False)
class _Persistent:
    """Something outside of the pickle: in torch.save, a storage."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Blank:
    """An integer not known yet: the value of this number among those that fill a `Draft`."""

    number: int


# The bytes of a pickle, with the number of a blank where a value is missing.
Draft: TypeAlias = "tuple[bytes | int, ...]"


def fill(draft: Draft, values: Sequence[int]) -> bytes:
    """The pickle with these integers in its blanks."""
    return b"".join(part if isinstance(part, bytes) else encode_int(values[part]) for part in draft)


_BATCH = 1000  # how many items pickle puts between a MARK and a SETITEMS or APPENDS
_MEMO_CODES = frozenset({"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"})
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")

ORDERED_DICT = Global("collections.OrderedDict")

_REBUILD_V2 = Global("torch._utils._rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils._rebuild_tensor_v3")
_UNTYPED = Global("torch.storage.UntypedStorage")


def tensor_node(dtype: DType, shape: Sequence[int], *, key: int, location: str = "cpu") -> Instance:
    """A packed row-major tensor that fills the storage ``data/{key}``, on device ``location``."""
    numel = prod(shape)
    name = STORAGES.get(dtype.name)
    cls = _UNTYPED if name is None else Global(f"torch.{name}")
    units = numel * dtype.itemsize if name is None else numel
    storage = _Persistent(("storage", cls, str(key), location, units))
    # torch gives an empty tensor the strides of one whose empty dimensions have size 1.
    strides = row_major_strides([max(1, size) for size in shape])
    sizes = (*shape,)  # a tuple of its own: the same one twice would be memoized, torch's are not
    common = (storage, 0, sizes, strides, False, call(ORDERED_DICT))
    if name is None:
        return call(_REBUILD_V3, *common, Global(f"torch.{dtype.name}"))
    return call(_REBUILD_V2, *common)


def object_node(entry: ObjectEntry) -> PlainValue:
    """The value of an object that was opened.

    Raises UnsupportedError for an object that was not opened: there is no value to pickle.
    """
    if not entry.opened:
        raise UnsupportedError(
            f"{entry.fqn}: an object of type {entry.type_name or 'unknown'} was not opened, and "
            "its bytes cannot go into this output as they are.",
            hint=f"Leave it out with --exclude '{entry.fqn}'.",
        )
    return entry.value


def dumps(node: object) -> bytes:
    """The pickle of a node without blanks, protocol 2. Raises NotPicklableError."""
    return fill(PickleWriter().draft(node), ())


_Key: TypeAlias = "int | str | Global"


class PickleWriter:
    """Writes one pickle, of what is ``deepest`` in one another at most.

    ``parts`` are its opcodes, those after its last blank.
    """

    __slots__ = ("_before", "_depth", "_memo", "_memoized", "parts")

    def __init__(self, deepest: int = sys.maxsize) -> None:
        self.parts: list[bytes] = [b"\x80\x02"]
        self._before: list[bytes | int] = []  # up to the last blank
        # What was written before: its number, and itself, so that its id stays taken.
        self._memo: dict[_Key, tuple[int, object]] = {}
        self._memoized = 0
        self._depth = deepest

    @property
    def names(self) -> set[str]:
        """The globals that were written."""
        return {key.name for key in self._memo if isinstance(key, Global)}

    def draft(self, node: object) -> Draft:
        """The pickle of a node, protocol 2. Raises NotPicklableError."""
        self._save(node)
        self.parts.append(b".")
        return (*self._before, b"".join(self.parts))

    def _save(self, node: object) -> None:
        if isinstance(node, TorchValue):
            node = node_of(node)
        atom = _atom(node)
        if atom is not None:
            self.parts.append(atom)
            return
        if isinstance(node, Blank):
            self._before += b"".join(self.parts), node.number
            self.parts = []
            return
        key = node if isinstance(node, (str, Global)) else id(node)
        if key in self._memo:
            place = self._memo[key][0]
            self.parts.append(b"h%c" % place if place < 256 else b"j" + struct.pack("<I", place))
            return
        self._depth -= 1
        if self._depth < 0:
            raise NotPicklableError(node)
        self._save_new(node, key)
        self._depth += 1

    def _save_new(self, node: object, key: _Key) -> None:
        if isinstance(node, str):
            self._put(_text(node), key, node)
        elif isinstance(node, Global):
            if node.nested:  # protocol 2 has no opcode for it
                raise NotPicklableError(node)
            module, _, last = node.name.rpartition(".")
            self._put(f"c{module}\n{last}\n".encode(), key, node)
        elif type(node) is tuple or isinstance(node, list | dict):
            self._save_container(node, key)
        elif isinstance(node, _Persistent):
            self._save(node.value)
            self.parts.append(b"Q")
        elif isinstance(node, PickledValue):
            self._splice(node)
        else:
            self._save_instance(node if isinstance(node, Instance) else _as_call(node), key)

    def _save_container(
        self, node: dict[object, object] | list[object] | tuple[object, ...], key: _Key
    ) -> None:
        if isinstance(node, dict):
            if not all(map(is_key, node)):
                raise NotPicklableError(node)
            if isinstance(node, OrderedDict):
                self._save(ORDERED_DICT)
            self._put(b")R" if isinstance(node, OrderedDict) else b"}", key, node)
            self._save_items(node.items(), count=len(node), one=b"s", end=b"u")
        elif isinstance(node, list):
            self._put(b"]", key, node)
            self._save_items(zip(node, strict=True), count=len(node), one=b"a", end=b"e")
        else:
            few = len(node) < len(_TUPLES)
            self.parts.append(b"" if few else b"(")
            for item in node:
                self._save(item)
            self._put(_TUPLES[len(node)] if few else b"t", key, node)

    def _save_instance(self, node: Instance, key: _Key) -> None:
        if not node.whole:
            raise NotPicklableError(node)
        self._save(node.cls)
        self._save(node.args)
        self._put(b"R" if node.called else b"\x81", key, node)
        items, pairs = node.items or [], node.pairs or []
        self._save_items(zip(items, strict=True), count=len(items), end=b"e")
        self._save_items(pairs, count=len(pairs), end=b"u")
        if node.state is not None:
            self._save(node.state)
            self.parts.append(b"b")

    def _splice(self, value: PickledValue) -> None:
        """The opcodes of another pickle, with its memo behind what was memoized here."""
        if not value.is_allowed:
            raise UnsupportedError(f"{value} asks for {value.unlisted[0]}, which is not written.")
        first, start = self._memoized, len(b"\x80\x02")
        for code, number, at in genops(value.pickle):
            if code.name in _MEMO_CODES and isinstance(number, int) and at is not None:
                put = code.name.endswith("PUT")
                self._memoized += put
                self.parts.append(value.pickle[start:at])
                self.parts.append((b"r" if put else b"j") + struct.pack("<I", first + number))
                start = at + (5 if code.name.startswith("LONG") else 2)
        self.parts.append(value.pickle[start:-1])

    def _save_items(
        self, groups: Iterable[tuple[object, ...]], *, count: int, end: bytes, one: bytes = b""
    ) -> None:
        """Items, or keys and values; where there is ``one`` opcode for a single group, by that."""
        if count == 1 and one:
            for item in chain.from_iterable(groups):
                self._save(item)
            self.parts.append(one)
            return
        rest = iter(groups)
        for _ in range(0, count, _BATCH):
            self.parts.append(b"(")
            for item in chain.from_iterable(islice(rest, _BATCH)):
                self._save(item)
            self.parts.append(end)

    def _put(self, opcode: bytes, key: _Key, node: object) -> None:
        """Write an opcode, and what memoizes the object that it makes."""
        place = self._memoized
        self._memoized += 1
        self._memo[key] = place, node
        self.parts.append(opcode)
        self.parts.append(b"q%c" % place if place < 256 else b"r" + struct.pack("<I", place))


def _as_call(node: object) -> Instance:
    """How protocol 2 says a value that has no opcode there. Raises NotPicklableError."""
    if type(node) is bytes:
        return call(Global("_codecs.encode"), node.decode("latin-1"), "latin1")
    if type(node) is bytearray:
        return call(Global("builtins.bytearray"), node.decode("latin-1"), "latin-1")
    if type(node) is complex:
        return call(Global("__builtin__.complex"), node.real, node.imag)
    if type(node) is Size:
        return call(Global("torch.Size"), (*node,))
    if isinstance(node, set | frozenset) and all(map(is_key, node)):
        return call(Global(f"__builtin__.{type(node).__name__}"), sorted(node, key=repr))
    raise NotPicklableError(node)


def _text(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError:
        raise NotPicklableError(text) from None
    return b"X" + struct.pack("<I", len(data)) + data


def _atom(node: object) -> bytes | None:
    """The opcode of what is never memoized, or None."""
    if node is None:
        return b"N"
    if node is True or node is False:
        return b"\x88" if node else b"\x89"
    if isinstance(node, int):
        return encode_int(node)
    if isinstance(node, float):
        return b"G" + struct.pack(">d", node)
    if isinstance(node, tuple) and not node and not isinstance(node, Size):
        return b")"
    return None


def encode_int(value: int) -> bytes:
    """The shortest opcode for an integer of 128 bytes or less, as pickle chooses it."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    if value.bit_length() > MAX_INT_BITS:
        raise NotPicklableError(value)
    data = encode_long(value)
    return b"\x8a%c" % len(data) + data
