"""Writes the pickles that torch.save would write, without torch and without its classes.

It takes plain Python values, and `Global`, `Instance`, `Persistent` for what a pickle says about
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
from itertools import chain, islice, zip_longest
from pickle import encode_long
from pickletools import genops
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import row_major_strides
from ckpt_tools.core.index import ObjectEntry
from ckpt_tools.core.plain_values import PickledValue, PlainValue, Size, TorchValue
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.pickle import numpy_scalars
from ckpt_tools.formats.pickle.limits import MAX_INT_BITS
from ckpt_tools.formats.pickle.nodes import Global, Instance, call, is_key
from ckpt_tools.formats.pickle.stored import LAYOUTS, STORAGES


class NotPicklableError(Exception):
    """A value that has no pickle here, which is ``value``, or lies in it."""

    def __init__(self, value: object) -> None:
        super().__init__(type(value).__name__)
        self.value = value


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Something outside of the pickle: in torch.save, a storage."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Blank:
    """An integer not known yet: the value of this number among those that fill a `Draft`."""

    number: int


class Draft(NamedTuple):
    """A pickle with blanks: ``parts[0]``, value ``blanks[0]``, ``parts[1]``… to the last part."""

    parts: tuple[bytes, ...]
    blanks: tuple[int, ...]

    def filled(self, values: Sequence[int]) -> bytes:
        """The pickle with these integers in its blanks."""
        codes = [encode_int(values[number]) for number in self.blanks]
        return b"".join(chain.from_iterable(zip_longest(self.parts, codes, fillvalue=b"")))


_BATCH = 1000  # how many items pickle puts between a MARK and a SETITEMS or APPENDS
_DEVICE = "torch.device"
_VERSION = "torch.torch_version.TorchVersion"
_MEMO_CODES = frozenset({"BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"})
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")

ORDERED_DICT = Global("collections.OrderedDict")

_REBUILD_V2 = Global("torch._utils._rebuild_tensor_v2")
_REBUILD_V3 = Global("torch._utils._rebuild_tensor_v3")
_UNTYPED = Global("torch.storage.UntypedStorage")


def tensor_node(dtype: DType, shape: Sequence[int], *, key: int, location: str = "cpu") -> Instance:
    """A packed row-major tensor that fills the storage ``data/{key}``, on device ``location``."""
    numel = 1
    for size in shape:
        numel *= size
    name = STORAGES.get(dtype.name)
    cls = _UNTYPED if name is None else Global(f"torch.{name}")
    units = numel * dtype.itemsize if name is None else numel
    storage = Persistent(("storage", cls, str(key), location, units))
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
    return draft(node).filled(())


def draft(node: object) -> Draft:
    """The pickle of a node, protocol 2, to be filled with what its blanks stand for."""
    return PickleWriter().draft(node)


class PickleWriter:
    """Writes one pickle, of what is ``deepest`` in one another at most.

    ``parts`` are its opcodes.
    """

    __slots__ = ("_alive", "_blanks", "_depth", "_memo", "_memoized", "parts")

    def __init__(self, deepest: int = sys.maxsize) -> None:
        self.parts: list[bytes] = [b"\x80\x02"]
        self._blanks: list[tuple[int, int]] = []  # how many parts lie before it, and its number
        self._memo: dict[int | str | Global, int] = {}  # what was written before, by its number
        self._memoized = 0
        self._alive: list[object] = []  # an id stays taken for as long as its object lives
        self._depth = deepest

    @property
    def names(self) -> set[str]:
        """The globals that were written."""
        return {key.name for key in self._memo if isinstance(key, Global)}

    def draft(self, node: object) -> Draft:
        """The pickle of a node. Raises NotPicklableError."""
        self._save(node)
        self.parts.append(b".")
        ends = [*(place for place, _ in self._blanks), len(self.parts)]
        starts = [0, *ends]
        parts = tuple(b"".join(self.parts[a:b]) for a, b in zip(starts, ends, strict=False))
        return Draft(parts, tuple(number for _, number in self._blanks))

    def _save(self, node: object) -> None:
        if isinstance(node, TorchValue):
            node = _of_torch(node)
        atom = _atom(node)
        if atom is not None:
            self.parts.append(atom)
            return
        if isinstance(node, Blank):
            self._blanks.append((len(self.parts), node.number))
            return
        key = node if isinstance(node, (str, Global)) else id(node)
        place = self._memo.get(key)
        if place is not None:
            self.parts.append(b"h%c" % place if place < 256 else b"j" + struct.pack("<I", place))
            return
        self._depth -= 1
        if self._depth < 0:
            raise NotPicklableError(node)
        self._save_new(node, key)
        self._depth += 1

    def _save_new(self, node: object, key: int | str | Global) -> None:
        if isinstance(node, str):
            self.parts.append(_text(node))
            self._memoize(key, node)
        elif isinstance(node, Global):
            if node.nested:  # protocol 2 has no opcode for it
                raise NotPicklableError(node)
            module, _, last = node.name.rpartition(".")
            self.parts.append(f"c{module}\n{last}\n".encode())
            self._memoize(key, node)
        elif isinstance(node, dict):
            self._save_dict(node, key)
        elif type(node) is list:
            self._save_list(node, key)
        elif type(node) is tuple:
            self._save_tuple(node)
            self._memoize(key, node)
        elif isinstance(node, Persistent):
            self._save(node.value)
            self.parts.append(b"Q")
        elif isinstance(node, PickledValue):
            self._splice(node)
        else:
            made = node if isinstance(node, Instance) else _as_call(node)
            self._save_instance(made, key)

    def _save_instance(self, node: Instance, key: int | str | Global) -> None:
        if not node.whole:
            raise NotPicklableError(node)
        self._save(node.cls)
        self._save(node.args)
        self.parts.append(b"R" if node.called else b"\x81")
        self._memoize(key, node)
        if node.items:
            self._save_batches(((item,) for item in node.items), count=len(node.items), end=b"e")
        if node.pairs:
            self._save_batches(node.pairs, count=len(node.pairs), end=b"u")
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

    def _save_list(self, node: list[object], key: int | str | Global) -> None:
        self.parts.append(b"]")
        self._memoize(key, node)
        if len(node) == 1:
            self._save(node[0])
            self.parts.append(b"a")
            return
        self._save_batches(((item,) for item in node), count=len(node), end=b"e")

    def _save_tuple(self, node: tuple[object, ...]) -> None:
        few = len(node) < len(_TUPLES)
        if not few:
            self.parts.append(b"(")
        for item in node:
            self._save(item)
        self.parts.append(_TUPLES[len(node)] if few else b"t")

    def _save_dict(self, node: dict[object, object], key: int | str | Global) -> None:
        if not all(map(is_key, node)):
            raise NotPicklableError(node)
        if isinstance(node, OrderedDict):
            self._save(ORDERED_DICT)
            self.parts.append(b")R")
        else:
            self.parts.append(b"}")
        self._memoize(key, node)
        if len(node) == 1:
            for item in chain.from_iterable(node.items()):
                self._save(item)
            self.parts.append(b"s")
            return
        self._save_batches(node.items(), count=len(node), end=b"u")

    def _save_batches(
        self, groups: Iterable[tuple[object, ...]], *, count: int, end: bytes
    ) -> None:
        rest = iter(groups)
        for _ in range(0, count, _BATCH):
            self.parts.append(b"(")
            for group in islice(rest, _BATCH):
                for item in group:
                    self._save(item)
            self.parts.append(end)

    def _memoize(self, key: int | str | Global, node: object) -> None:
        place = self._memoized
        self._memoized += 1
        self._memo[key] = place
        self._alive.append(node)
        self.parts.append(b"q%c" % place if place < 256 else b"r" + struct.pack("<I", place))


def _of_torch(value: TorchValue) -> Global | Instance:
    """How pickle says these values: a dtype by its name, others by a call of their class."""
    if value in LAYOUTS:
        return call(Global("torch.serialization._get_layout"), str(value))
    made, _, inner = value.partition("(")
    if made == "datetime.timedelta":
        return call(Global("datetime.timedelta"), *map(int, inner[:-1].split(", ")))
    if value.startswith(numpy_scalars.PREFIX):
        code, data = numpy_scalars.code_and_bytes(value)
        dtype = Instance(Global("numpy.dtype"), (f"<{code}", False, True), called=True)
        return call(Global("numpy._core.multiarray.scalar"), dtype, data)
    if made == _VERSION:
        return Instance(Global(made), (inner.strip("')"),))
    if not value.startswith(_DEVICE):
        return Global(str(value))
    kind, _, index = value.removeprefix(_DEVICE).strip("'()").partition(":")
    return call(Global("torch.device"), *((kind, int(index)) if index else (kind,)))


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
