"""Values of pickles made plain again: nested dicts, lists and tuples that are safe to walk through.

What a pickle gives is a graph: values can be shared a thousand times over, or contain themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from ckpt_tools.core.plain_values import Size, TorchValue
from ckpt_tools.core.state_tree import MAX_DEPTH
from ckpt_tools.core.text import MAX_NAME, is_text
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.closed_values import ClosedValues
from ckpt_tools.formats.pickle.limits import (
    FREE_VALUES,
    VALUES_OF_PIECE,
    VALUES_PER_BYTE,
    TextBound,
)
from ckpt_tools.formats.pickle.nodes import (
    ATOMS,
    NUMBERS,
    Function,
    Global,
    Instance,
    Opaque,
    shown,
)
from ckpt_tools.formats.pickle.stored import Stored, StoredPieces


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
        # id → the settled container, its nodes and its text; None while it is being walked through.
        self._done: dict[int, tuple[object, int, int] | None] = {}
        self._nodes = 0
        self._max_nodes = FREE_VALUES + VALUES_PER_BYTE * length  # one per byte, were none shared
        self._text = TextBound(length)
        self._closed = ClosedValues(length, self._text, is_allowed, unknown)

    def settle(self, value: object, depth: int) -> object:
        """The settled value."""
        self._count(1)
        if type(value) in NUMBERS:
            return value
        if type(value) not in _CONTAINERS:
            return self._leaf(value)
        if depth > MAX_DEPTH:
            raise UnreadableError(f"is nested more than {MAX_DEPTH} deep.")
        if isinstance(value, list | tuple) and NUMBERS.issuperset(map(type, value)):
            self._count(len(value))
            return value
        if id(value) in self._done:
            done = self._done[id(value)]
            if done is None:
                raise UnreadableError("has a value that contains itself.")
            made, nodes, text = done
            self._count(nodes)
            self._text.take(text)
            return made
        self._done[id(value)] = None
        nodes, text = self._nodes, self._text.left
        try:
            made = self._container(value, depth + 1)
        except UnsupportedError as error:  # a key of its own; those of what is inside are caught
            hint = "Save it again with names for keys; -x leaves the entry out."
            made = Opaque("builtins.dict", flaw=UnsupportedError(error.message, hint=hint))
        self._done[id(value)] = made, self._nodes - nodes, text - self._text.left
        return made

    def _leaf(self, value: object) -> object:
        """A value that is known, or the name of what is not."""
        self._text.meet(value)
        if isinstance(value, Instance | Global | bytearray):
            return self._closed.of(value)
        if isinstance(value, StoredPieces):
            self._count(VALUES_OF_PIECE * len(value.sizes))
        if type(value) is str and not is_text(value):
            return Opaque("builtins.str")
        if type(value) in ATOMS or isinstance(value, Stored | Opaque | Size | TorchValue):
            return value
        return Opaque(value.qualname if isinstance(value, Function) else type(value).__name__)

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
        self._count(len(items))
        for item in items:
            self._text.meet(item)
        return (
            value
            if ATOMS.issuperset(map(type, items))
            else Opaque(f"builtins.{type(value).__name__}")
        )

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

    def _count(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > self._max_nodes:
            raise UnreadableError(f"unfolds to more than {self._max_nodes:,} values.")


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
