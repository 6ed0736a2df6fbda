"""Values of pickles made plain again: nested dicts, lists and tuples that are safe to walk through.

What a pickle gives is a graph: values can be shared a thousand times over, or contain themselves.

A date, an array of NumPy or a config is not looked into, but what its pickle said is known: it is
written again, in one way for all protocols, so that equal pickles are equal values. Of classes and
functions only those are written that hold data and do nothing else, and those that the user allows
by name: what would run code in a loader is not passed on. Configs (those of argparse, OmegaConf and
Lightning) are opened to be shown, and stay closed values.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeAlias

from ckpt_tools.core.plain_values import PickledValue, PlainValue, Size, TorchValue
from ckpt_tools.core.state_tree import MAX_DEPTH
from ckpt_tools.core.text import MAX_NAME, is_text
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.allowed_globals import (
    is_config,
    is_written,
    module_error,
    unknown_error,
)
from ckpt_tools.formats.pickle.limits import (
    FREE_OPCODES,
    FREE_VALUES,
    MAX_CLOSED_DEPTH,
    MAX_CONFIG_VALUES,
    MAX_COPIED,
    MAX_KEY_BITS,
    VALUES_OF_PIECE,
    VALUES_PER_BYTE,
    Bound,
    text_bound,
)
from ckpt_tools.formats.pickle.nodes import (
    ATOMS,
    NUMBERS,
    Global,
    Instance,
    Opaque,
    shown,
    type_name,
)
from ckpt_tools.formats.pickle.stored import Stored, StoredPieces

_TENSOR = "torch.Tensor"
_TORCH_VERSION = Global("torch.torch_version.TorchVersion")
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,80}")

# What is kept as the pickle that makes it, and how.
_Node: TypeAlias = Instance | Global | bytearray
_Closed: TypeAlias = Opaque | TorchValue | PickledValue


def settled(
    value: object, *, length: int, is_allowed: Callable[[str], bool], unknown: Collection[str] = ()
) -> object:
    """The same value of dicts, OrderedDicts, lists, tuples and sets, with only known leaves.

    What is shared stays shared. A closed value that can be pickled again is a PickledValue;
    ``is_allowed`` says which further globals it may ask for, and one of a class that is ``unknown``
    is an opaque value with a flaw. So is a dict with an object as a key.

    Raises UnreadableError for a value that contains itself, that is nested more than 100 deep, or
    that has too many nodes for a pickle of ``length`` bytes when each is counted as often as it is
    met.
    """
    return _Settler(length, is_allowed, unknown).settle(value, 0)


class _Settler:
    """One walk over a graph of values."""

    def __init__(
        self, length: int, is_allowed: Callable[[str], bool], unknown: Collection[str]
    ) -> None:
        # id → the settled container, its values and its text; None while it is walked through.
        self._done: dict[int, tuple[object, int, int] | None] = {}
        # One value per byte, were none shared.
        self._values = Bound(FREE_VALUES + VALUES_PER_BYTE * length, "values")
        self._text = text_bound(length)
        # Closed values are pickled again: opcodes and bytes in all, and values of configs.
        self._closed: dict[int, _Closed] = {}
        self._is_allowed = is_allowed
        self._bytes_left = MAX_COPIED + 2 * length
        self._opcodes_left = FREE_OPCODES + 2 * length
        self._configs_left = MAX_CONFIG_VALUES
        flaw = unknown_error(unknown) if unknown else None
        self._unknown = {name: Opaque(Global(name).qualname, flaw=flaw) for name in unknown}
        self._modules: dict[str, Opaque] = {}

    def settle(self, value: object, depth: int) -> object:
        """The settled value."""
        self._values.take(1)
        if type(value) in NUMBERS:
            return value
        if type(value) not in _CONTAINERS:
            return self._leaf(value)
        if depth > MAX_DEPTH:
            raise UnreadableError(f"is nested more than {MAX_DEPTH} deep.")
        if isinstance(value, list | tuple) and NUMBERS.issuperset(map(type, value)):
            self._values.take(len(value))
            return value
        if id(value) in self._done:
            done = self._done[id(value)]
            if done is None:
                raise UnreadableError("has a value that contains itself.")
            made, values, text = done
            self._values.take(values)
            self._text.take(text)
            return made
        self._done[id(value)] = None
        values, text = self._values.left, self._text.left
        try:
            made = self._container(value, depth + 1)
        except UnsupportedError as error:  # a key of its own; those of what is inside are caught
            hint = "Save it again with names for keys; -x leaves the entry out."
            made = Opaque("builtins.dict", flaw=UnsupportedError(error.message, hint=hint))
        self._done[id(value)] = made, values - self._values.left, text - self._text.left
        return made

    def _leaf(self, value: object) -> object:
        """A value that is known, or the name of what is not."""
        self._text.meet(value)
        if isinstance(value, Instance | Global | bytearray):
            if id(value) not in self._closed:
                self._closed[id(value)] = self._closed_value(value)
            return self._closed[id(value)]
        if isinstance(value, StoredPieces):
            self._values.take(VALUES_OF_PIECE * len(value.sizes))
        if type(value) is str and not is_text(value):
            return Opaque("builtins.str")
        if type(value) in ATOMS or isinstance(value, Stored | Opaque | Size | TorchValue):
            return value
        return Opaque(type_name(value))

    def _container(self, value: object, depth: int) -> object:
        if isinstance(value, OrderedDict):
            return OrderedDict((self._key(key), self.settle(i, depth)) for key, i in value.items())
        if isinstance(value, dict):
            return {self._key(key): self.settle(item, depth) for key, item in value.items()}
        if isinstance(value, list):
            return [self.settle(item, depth) for item in value]
        if isinstance(value, tuple):
            return tuple(self.settle(item, depth) for item in value)
        items = value if isinstance(value, set | frozenset) else ()
        self._values.take(len(items))
        for item in items:
            self._text.meet(item)
        is_plain = ATOMS.issuperset(map(type, items))
        if is_plain and all(is_text(item) for item in items if type(item) is str):
            return value
        return Opaque(f"builtins.{type(value).__name__}")

    def _key(self, key: object) -> object:
        """A key that is plain; of a tuple, every item is."""
        self._text.meet(key)
        if type(key) is str:
            return as_name(key)
        parts = key if type(key) is tuple else (key,)
        if not ATOMS.issuperset(map(type, parts)):
            raise UnsupportedError(f"has a dict with {shown(key)} as a key.")
        for part in parts:
            if type(part) is str:
                as_name(part)
        return key

    def _closed_value(self, value: _Node) -> _Closed:
        """A value as its pickle, or as one that is not opened, and why it cannot be used; or a
        version of torch, which can.
        """
        if isinstance(value, bytearray):
            return self._pickled(value, "builtins.bytearray")
        cls = value.cls if isinstance(value, Instance) else value
        if isinstance(value, Instance):
            text = value.args[0] if len(value.args) == 1 else None
            if cls == _TORCH_VERSION and type(text) is str and _VERSION.fullmatch(text):
                return TorchValue(f"{cls.qualname}({text!r})")
            if type(value.state) is dict and {"_parameters", "_modules"} <= value.state.keys():
                if cls.name not in self._modules:
                    flaw = module_error(cls.qualname)
                    self._modules[cls.name] = Opaque(cls.qualname, flaw=flaw)
                return self._modules[cls.name]
        return self._unknown.get(cls.name) or self._pickled(value, cls.qualname)

    def _pickled(self, value: _Node, qualname: str) -> Opaque | PickledValue:
        if self._bytes_left <= 0 or self._opcodes_left <= 0:
            return Opaque(qualname)
        # Late: most values are numbers and texts.
        from ckpt_tools.formats.pickle.dump import NotPicklableError, PickleWriter, fill

        writer = PickleWriter(MAX_CLOSED_DEPTH)
        try:
            data = fill(writer.draft(value), ())
        except NotPicklableError as error:
            odd = error.value
            is_tensor = isinstance(odd, Opaque) and (odd.is_tensor or odd.qualname == _TENSOR)
            holds_tensor = (is_tensor or isinstance(odd, Stored)) and qualname != _TENSOR
            return Opaque(f"{qualname} with tensors" if holds_tensor else qualname)
        finally:
            self._opcodes_left -= len(writer.parts)
        self._bytes_left -= len(data)
        unlisted = sorted(name for name in writer.names if not is_written(name))
        fields: PlainValue = None
        if isinstance(value, Instance) and is_config(qualname):
            with suppress(_EndlessError):
                fields = self._shown(value, 0)
        is_allowed = all(map(self._is_allowed, unlisted))
        return PickledValue(qualname, data, tuple(unlisted), is_allowed, fields)

    def _shown(self, value: object, depth: int) -> PlainValue:
        """What is in a config: configs, dicts and lists as such, other values as texts.

        Raises _EndlessError for one that holds too much, or itself.
        """
        self._configs_left -= 1
        if self._configs_left < 0 or depth > MAX_CLOSED_DEPTH:
            raise _EndlessError
        if isinstance(value, Instance) and is_config(value.qualname):
            state = value.state if type(value.state) is dict else {}
            # OmegaConf's containers and nodes keep what they hold in an attribute.
            held = [state[name] for name in ("_content", "_val") if name in state]
            items = {self._shown_key(key): item for key, item in value.pairs or ()}
            return self._shown(held[0] if held else items or state, depth + 1)
        if isinstance(value, dict):
            return {
                self._shown_key(key): self._shown(item, depth + 1) for key, item in value.items()
            }
        if isinstance(value, list | tuple | set | frozenset):
            return [self._shown(item, depth + 1) for item in value]
        return self._shown_leaf(value)

    def _shown_key(self, key: object) -> str | int:
        leaf = self._shown_leaf(key)
        return leaf if type(leaf) is str or type(leaf) is int else str(leaf)

    def _shown_leaf(self, value: object) -> PlainValue:
        """A value as it is, or what stands there in angle brackets."""
        self._text.meet(value)
        if type(value) is str:
            return value if is_text(value) else value.encode("utf-8", "backslashreplace").decode()
        if type(value) is int and value.bit_length() <= MAX_KEY_BITS:
            return value
        if value is None or isinstance(value, bool | float):
            return value
        return f"<{shown(value).removeprefix('a ')}>"


class _EndlessError(Exception):
    """A config that holds too much to be shown, or itself."""


_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset})


def as_name(value: object) -> str:
    """A name that can be printed and written again, else UnreadableError."""
    if type(value) is not str:
        raise UnreadableError(f"has {shown(value)} where a name should be.")
    if len(value) > MAX_NAME:
        raise UnreadableError(f"has a name of {len(value):,} bytes; up to {MAX_NAME:,} are read.")
    if not is_text(value):
        raise UnreadableError(f"has a name that is not text: {value[:80]!a}.")
    return value
