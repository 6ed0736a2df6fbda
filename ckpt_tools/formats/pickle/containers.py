"""Python's own containers and small values in pickles: how they are made, and made plain again.

What a pickle gives is a graph: values can be shared a thousand times over, or contain themselves.
Here it becomes nested plain dicts, lists and tuples that are safe to walk through.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial

from ckpt_tools.core.plain_values import PickledValue, Size, TorchValue
from ckpt_tools.core.state_tree import MAX_DEPTH
from ckpt_tools.core.text import MAX_NAME, is_text
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle import numpy_scalars
from ckpt_tools.formats.pickle.allowed_globals import module_error, runner_error, unknown_error
from ckpt_tools.formats.pickle.closed_values import ClosedValues
from ckpt_tools.formats.pickle.dump import NotPicklableError
from ckpt_tools.formats.pickle.limits import (
    BYTES_OF_ITEM,
    FREE_VALUES,
    MAX_COPIED,
    VALUES_OF_PIECE,
    VALUES_PER_BYTE,
    TextBound,
    is_word,
)
from ckpt_tools.formats.pickle.nodes import Function, Global, Instance, Opaque, call, shown
from ckpt_tools.formats.pickle.stored import (
    LAYOUTS,
    Stored,
    StoredPieces,
    as_counts,
)

_NUMBERS = frozenset({type(None), bool, int, float, complex})
_ATOMS = _NUMBERS | {str, bytes}
_SCALAR = Global("numpy._core.multiarray.scalar")
_RECONSTRUCT, _ARRAY = Global("numpy._core.multiarray._reconstruct"), Global("numpy.ndarray")
_FROM_BUFFER, _DTYPE = Global("numpy._core.numeric._frombuffer"), Global("numpy.dtype")
_LITTLE_ENDIAN: tuple[object, ...] = (
    (3, "<", None, None, None, -1, -1, 0),
    (3, "|", None, None, None, -1, -1, 0),
)
_TORCH_VERSION = Global("torch.torch_version.TorchVersion")
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,80}")


class Containers:
    """The globals that make containers and small values, for one pickle of ``length`` bytes.

    A call costs three bytes of a pickle and can copy a long list, so what they copy is summed up.
    """

    def __init__(self, length: int) -> None:
        self._left = MAX_COPIED + length
        self.table = {
            "_codecs.encode": Function(self._encode),
            "builtins.bytes": Function(self._bytes, "builtins.bytes"),
            "builtins.complex": Function(self._complex, "builtins.complex"),
            "builtins.frozenset": Function(partial(self._set, frozenset), "builtins.frozenset"),
            "builtins.set": Function(partial(self._set, set), "builtins.set"),
            "builtins.type": Function(self._type, "builtins.type"),
            "collections.Counter": Function(self._counter, "collections.Counter"),
            "collections.OrderedDict": Function(self._dict, "collections.OrderedDict"),
            "collections.defaultdict": Function(lambda _: {}, "collections.defaultdict"),
            "copyreg._reconstructor": Function(self._reconstructed, "copyreg._reconstructor"),
            "datetime.timedelta": Function(_timedelta, "datetime.timedelta"),
            "numpy._core.multiarray.scalar": Function(_scalar, "numpy.generic"),
            "numpy._core.numeric._frombuffer": Function(self._array, "numpy.ndarray"),
            "torch.Size": Function(self._size, "torch.Size"),
            "torch.device": Function(_device, "torch.device"),
            "torch.serialization._get_layout": Function(_layout, "torch.layout"),
        }

    def _copy(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise UnreadableError("is hostile: it copies values again and again.")

    def _encode(self, args: tuple[object, ...]) -> bytes:
        """``(text, "latin1")``: how protocol 2 writes bytes."""
        text, encoding = args if len(args) == 2 else (None, None)
        if type(text) is not str or encoding not in {"latin1", "latin-1"}:
            raise UnreadableError(f"has bytes in encoding {shown(encoding)}.")
        self._copy(len(text))
        return text.encode("latin-1")

    def _bytes(self, args: tuple[object, ...]) -> object:
        return Opaque("builtins.bytes") if args else b""

    def _complex(self, args: tuple[object, ...]) -> object:
        real, imag = args if len(args) == 2 else (None, None)
        if type(real) is float and type(imag) is float:
            return complex(real, imag)
        return Opaque("builtins.complex")

    def _set(self, kind: type[set[object] | frozenset[object]], args: tuple[object, ...]) -> object:
        name, items = f"builtins.{kind.__name__}", args[0] if args else ()
        if not isinstance(items, list | tuple):
            return Opaque(name)
        self._copy(BYTES_OF_ITEM * len(items))
        if all(type(item) in _ATOMS for item in items):
            return kind(items)
        return call(Global(name), *args)

    def _type(self, args: tuple[object, ...]) -> object:
        """``(None,)``: how pickle writes the class of a constant. With more, it makes a class."""
        if len(args) != 1:
            raise runner_error("builtins.type")
        return Opaque("builtins.NoneType" if args[0] is None else "builtins.type")

    def _reconstructed(self, args: tuple[object, ...]) -> object:
        """``(class, base, state of the base)``: how protocol 0 and 1 make an object."""
        kind = args[0] if args else None
        if isinstance(kind, Global):
            return Instance(
                kind, whole=args[2:] == (None,)
            )  # else with a dict's items, or the like
        return Opaque(getattr(kind, "qualname", "builtins.object"))

    def _counter(self, args: tuple[object, ...]) -> object:
        return args[0] if args and type(args[0]) is dict else {}

    def _array(self, args: tuple[object, ...]) -> object:
        """``(buffer, dtype, shape, order)`` of protocol 5, as protocol 2 says it: every NumPy loads
        that.
        """
        buffer, dtype, shape, order = args if len(args) == 4 else (None,) * 4
        if not isinstance(buffer, bytes | bytearray) or order not in ("C", "F"):
            return call(_FROM_BUFFER, *args)
        self._copy(len(buffer))
        made = call(_RECONSTRUCT, _ARRAY, (0,), b"b")
        made.state = (1, shape, dtype, order == "F", bytes(buffer))
        return made

    def _dict(self, args: tuple[object, ...]) -> OrderedDict[object, object]:
        """``()``, or ``([[key, value], …],)`` as Python 2 wrote it."""
        made = OrderedDict[object, object]()
        pairs = args[0] if args else ()
        if not isinstance(pairs, list | tuple):
            raise UnreadableError(f"has an OrderedDict made of {shown(pairs)}.")
        self._copy(BYTES_OF_ITEM * len(pairs))
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[0]) not in _ATOMS:
                raise UnreadableError("has an OrderedDict that is not a list of pairs.")
            made[pair[0]] = pair[1]
        return made

    def _size(self, args: tuple[object, ...]) -> Size:
        return Size(as_counts(args[0] if args else (), "a torch.Size"))


def _device(args: tuple[object, ...]) -> object:
    """``(type,)`` or ``(type, index)``."""
    kind, index = args if len(args) == 2 else (*args[:1], None)
    known = is_word(kind) and kind.isidentifier() and kind.isascii() and len(args) in (1, 2)
    if not known or type(index) not in (int, type(None)):
        return Opaque("torch.device")
    return TorchValue(
        f"torch.device({kind!r})" if index is None else f"torch.device('{kind}:{index}')"
    )


def _timedelta(args: tuple[object, ...]) -> object:
    """``(days, seconds, microseconds)``, as Python keeps them."""
    days, seconds, micros = args if len(args) == 3 else (None, None, None)
    if type(days) is not int or type(seconds) is not int or type(micros) is not int:
        return Opaque("datetime.timedelta")
    if abs(days) >= 10**9 or not 0 <= seconds < 86_400 or not 0 <= micros < 10**6:
        return Opaque("datetime.timedelta")
    return TorchValue(f"datetime.timedelta({days}, {seconds}, {micros})")


def _scalar(args: tuple[object, ...]) -> object:
    """``(dtype, bytes)``: a scalar of NumPy, such as a float64 among hyper-parameters."""
    dtype, data = args if len(args) == 2 else (None, None)
    code = _type_code(dtype)
    made = numpy_scalars.text_of(code, data) if isinstance(data, bytes) else None
    return call(_SCALAR, *args) if made is None else TorchValue(made)


def _type_code(dtype: object) -> str:
    """``f8`` or the like, of ``("<f8", False, True)`` or of ``("f8", …)`` and a byte order.

    "" for all but the simple types: their states have fields.
    """
    if not isinstance(dtype, Instance) or dtype.cls != _DTYPE or not dtype.args:
        return ""
    text, state = dtype.args[0], dtype.state
    if not is_word(text) or (state is not None and state not in _LITTLE_ENDIAN):
        return ""
    if text[:1] in ("<", "|"):
        return text[1:]
    return "" if state is None else text


def _layout(args: tuple[object, ...]) -> object:
    """The text of a layout, such as ``torch.strided``."""
    known = len(args) == 1 and type(args[0]) is str and args[0] in LAYOUTS
    return TorchValue(args[0]) if known else Opaque("torch.layout")


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
        self._values = ClosedValues(is_allowed, self._text, length)
        flaw = unknown_error(unknown) if unknown else None
        self._unknown = {name: Opaque(Global(name).qualname, flaw=flaw) for name in unknown}
        self._modules: dict[str, Opaque] = {}
        self._closed: dict[int, Opaque | TorchValue | PickledValue] = {}

    def settle(self, value: object, depth: int) -> object:
        """The settled value."""
        self._count(1)
        if type(value) in _NUMBERS:
            return value
        if type(value) not in _CONTAINERS:
            return self._leaf(value)
        if depth > MAX_DEPTH:
            raise UnreadableError(f"is nested more than {MAX_DEPTH} deep.")
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
            if id(value) not in self._closed:
                self._closed[id(value)] = self._of_closed(value)
            return self._closed[id(value)]
        if isinstance(value, StoredPieces):
            self._count(VALUES_OF_PIECE * len(value.sizes))
        if type(value) is str and not is_text(value):
            return Opaque("builtins.str")
        if type(value) in _ATOMS or isinstance(value, Stored | Opaque | Size | TorchValue):
            return value
        return Opaque(value.qualname if isinstance(value, Function) else type(value).__name__)

    def _of_closed(
        self, value: Instance | Global | bytearray
    ) -> Opaque | TorchValue | PickledValue:
        """The value as its pickle, or as one that is not opened, and why it cannot be used; or a
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

    def _pickled(
        self, value: Instance | Global | bytearray, qualname: str
    ) -> Opaque | PickledValue:
        try:
            return self._values.pickled(value, qualname)
        except NotPicklableError as error:
            odd = error.value
        holds_tensor = isinstance(odd, Stored) or (
            isinstance(odd, Opaque) and (odd.is_tensor or odd.qualname == "torch.Tensor")
        )
        tensors = holds_tensor and qualname != "torch.Tensor"
        return Opaque(f"{qualname} with tensors" if tensors else qualname)

    def _container(self, value: object, depth: int) -> object:
        if isinstance(value, OrderedDict):
            return OrderedDict((self._key(key), self.settle(i, depth)) for key, i in value.items())
        if isinstance(value, dict):
            return {self._key(key): self.settle(item, depth) for key, item in value.items()}
        if isinstance(value, list | tuple) and _NUMBERS.issuperset(map(type, value)):
            self._count(len(value))
            return value
        if isinstance(value, list):
            return [self.settle(item, depth) for item in value]
        if isinstance(value, tuple):
            return tuple(self.settle(item, depth) for item in value)
        items = value if isinstance(value, set | frozenset) else ()
        self._count(len(items))
        for item in items:
            self._text.meet(item)
        if not all(type(item) in _ATOMS for item in items):
            return Opaque(f"builtins.{type(value).__name__}")
        return frozenset(items) if isinstance(value, frozenset) else set(items)

    def _key(self, key: object) -> object:
        """A key that is plain; of a tuple, every item is."""
        self._text.meet(key)
        if type(key) is str:
            return key if key.isascii() and len(key) <= MAX_NAME else as_name(key)
        parts = key if type(key) is tuple else (key,)
        if not all(type(part) in _ATOMS for part in parts):
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
