"""What a pickle says of classes: the machine reads it into these, and `dump` writes them again.

A name is a `Global`, and imports nothing; what is made of it is an `Instance`, with all that the
pickle hands over for it. Only a `Function` is ever called, and only a `Repeated` takes a state.
"""

from __future__ import annotations

import _compat_pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from ckpt_tools.core.plain_values import TorchValue
from ckpt_tools.core.state_tree import Key
from ckpt_tools.errors import CheckpointError, UnreadableError, UnsupportedError, printable
from ckpt_tools.formats.pickle.limits import HEAVY_KEY, MADE_KEY, MAX_KEY_BITS

Columns = Mapping[str, Sequence[object]]

# Modules by the names that the oldest NumPy and Python load, too.
_MOVED = {"numpy.core.": "numpy._core.", "pathlib._local": "pathlib"}
# What an object is, where a pickle asks for the function that makes it.
_MADE_BY = {
    "numpy._core.multiarray._reconstruct": "numpy.ndarray",
    "numpy._core.multiarray.scalar": "numpy.generic",
    "numpy._core.numeric._frombuffer": "numpy.ndarray",
    "numpy.random._pickle.__bit_generator_ctor": "numpy.random.BitGenerator",
    "numpy.random._pickle.__generator_ctor": "numpy.random.Generator",
    "numpy.random._pickle.__randomstate_ctor": "numpy.random.RandomState",
    "torch._tensor._rebuild_from_type": "torch.Tensor",
    "torch._tensor._rebuild_from_type_v2": "torch.Tensor",
}


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function by the name that Python 3 has for it, ``module.name``.

    A class in a class is ``nested``: where its module ends, only the pickle says.
    """

    name: str
    nested: bool = False

    @classmethod
    def of(cls, module: str, name: str) -> Global:
        """The one that a pickle calls so.

        Protocol 2 has the names of Python 2, also when Python 3 writes it: ``__builtin__.xrange``
        is ``builtins.range``. Python itself reads with these tables.
        """
        module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
        module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        for old, new in _MOVED.items():
            if module.startswith(old):
                module = new + module[len(old) :]
        return cls(printable(f"{module}.{name}"), nested="." in name)

    @property
    def qualname(self) -> str:
        """The class, or that of what the function makes, as far as it is known."""
        if self.name.startswith("torch._utils._rebuild"):
            return "torch.Tensor"
        return _MADE_BY.get(self.name, self.name)


@dataclass(slots=True, eq=False)
class Instance:
    """An object made by ``cls.__new__(cls, *args)``, or by ``cls(*args)`` where it is ``called``.

    Then it is given items, items with keys, and a state (None: it has none), which may hold it. It
    is not ``whole`` when the pickle says what protocol 2 cannot say again. The same instance twice
    is one object.
    """

    cls: Global
    args: tuple[object, ...] = ()
    state: object = None
    called: bool = False
    whole: bool = True
    items: list[object] | None = None
    pairs: list[tuple[object, object]] | None = None

    @property
    def qualname(self) -> str:
        """Its class, as far as it is known."""
        return self.cls.qualname

    @property
    def fields(self) -> dict[object, object]:
        """Its state, which is a dict, or a pair of None and one. Raises UnreadableError."""
        state = self.state
        if type(state) is tuple and len(state) == 2 and state[0] is None:
            state = state[1]
        if state is not None and type(state) is not dict:
            raise UnreadableError(f"is damaged: a {self.qualname} has {shown(state)} for a state.")
        return state or {}


def call(function: Global, *args: object) -> Instance:
    """What a function gives for these arguments."""
    return Instance(function, args, called=True)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of ours that a pickle may call, by the name of what it stands for.

    What it runs takes all arguments as one tuple.
    """

    run: Callable[[tuple[object, ...]], object]
    qualname: str = "function"


@dataclass(slots=True, eq=False)
class Opaque:
    """A value that is not opened: ``qualname`` names its class or what would have made it.

    ``flaw`` says why the value cannot be used: an UnsupportedError when tensors are in it, else an
    UnsafePickleError.
    """

    qualname: str
    flaw: CheckpointError | None = field(default=None, kw_only=True)

    @property
    def is_tensor(self) -> bool:
        """Whether this stands for tensors that cannot be read."""
        return isinstance(self.flaw, UnsupportedError)


class Repeated:
    """An object of few fields that a pickle repeats a million times."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Take the fields of a state. Raises LookupError, TypeError, ValueError."""
        raise NotImplementedError

    @classmethod
    def columns(cls, fields: Columns) -> Columns | None:
        """The attributes of many objects by the fields of their states, each a column.

        None where `__setstate__` would refuse one of them, or where that takes more than a look.
        """
        raise NotImplementedError


# Values that hold no others.
NUMBERS = frozenset({type(None), bool, int, float, complex})
ATOMS = NUMBERS | {str, bytes}
_KEYS = frozenset({str, float, bool, type(None)})


def is_key(key: object) -> TypeGuard[Key]:
    """Whether a key of a dict can be a part of a path, by its text."""
    if type(key) is tuple:
        return all(map(is_key, key))
    if type(key) is int:
        return key.bit_length() <= MAX_KEY_BITS  # Python refuses to print thousands of digits
    return type(key) in _KEYS


# What is hashed in no time, beside short numbers.
LIGHT_KEYS = frozenset({str, bytes, float, bool, type(None), Global, Instance})


def key_weight(key: object) -> int:
    """How much work it is to hash a value: a tuple weighs 1, and 1 and more for each item."""
    weight, left = 0, [key]
    while left and weight < HEAVY_KEY:
        value = left.pop()
        if isinstance(value, tuple):
            weight += 1 + len(value)
            left.extend(value[:HEAVY_KEY])
        elif type(value) is int:
            weight += MADE_KEY if value.bit_length() > 64 else 0
        elif type(value) not in LIGHT_KEYS and not isinstance(value, Repeated):
            weight += MADE_KEY
    return weight


def shown(value: object) -> str:
    """A short text for an error, whatever the value is."""
    if type(value) is int and value.bit_length() <= 128:
        return str(value)
    if type(value) is str:
        return ascii(value[:80])
    if isinstance(value, TorchValue):
        return f"a {value[:80]}"
    return f"a {type_name(value)}"


def type_name(value: object) -> str:
    """The class of a value; of what is not opened, the class that it names."""
    return str(getattr(value, "qualname", type(value).__name__))
