"""How the containers of Python, and small values of it, of torch and of NumPy, are made.

A small value is the text that makes it, and `node_of` says it as a pickle does. Hyper-parameters
and metrics often are ``numpy.float64``, which is no float to a pickle. The text
``numpy.float64(0.1)`` is exact: a scalar whose text would not give its bytes again has none, and
stays a node.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial

from ckpt_tools.core.plain_values import Size, TorchValue
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle.allowed_globals import runner_error
from ckpt_tools.formats.pickle.limits import is_word
from ckpt_tools.formats.pickle.nodes import ATOMS, Function, Global, Instance, Opaque, call, shown
from ckpt_tools.formats.pickle.stored import LAYOUTS, as_counts

_SCALAR = Global("numpy._core.multiarray.scalar")
_RECONSTRUCT, _ARRAY = Global("numpy._core.multiarray._reconstruct"), Global("numpy.ndarray")
_LAYOUT = Global("torch.serialization._get_layout")
_FROM_BUFFER, _DTYPE = Global("numpy._core.numeric._frombuffer"), Global("numpy.dtype")
# The types of scalars: their codes in a pickle, and the formats of their bytes.
# fmt: off
_SCALARS = {
    "bool": ("b1", "<?"), "float16": ("f2", "<e"), "float32": ("f4", "<f"), "float64": ("f8", "<d"),
    "int8": ("i1", "<b"), "int16": ("i2", "<h"), "int32": ("i4", "<i"), "int64": ("i8", "<q"),
    "uint8": ("u1", "<B"), "uint16": ("u2", "<H"), "uint32": ("u4", "<I"), "uint64": ("u8", "<Q"),
}
# fmt: on
_LITTLE_ENDIAN: tuple[object, ...] = (
    (3, "<", None, None, None, -1, -1, 0),
    (3, "|", None, None, None, -1, -1, 0),
)


def _encode(args: tuple[object, ...]) -> bytes:
    """``(text, "latin1")``: how protocol 2 writes bytes."""
    text, encoding = args if len(args) == 2 else (None, None)
    if type(text) is not str or encoding not in {"latin1", "latin-1"}:
        raise UnreadableError(f"has bytes in encoding {shown(encoding)}.")
    return text.encode("latin-1")


def _bytes(args: tuple[object, ...]) -> object:
    return Opaque("builtins.bytes") if args else b""


def _complex(args: tuple[object, ...]) -> object:
    real, imag = args if len(args) == 2 else (None, None)
    if type(real) is float and type(imag) is float:
        return complex(real, imag)
    return Opaque("builtins.complex")


def _set(kind: type[set[object] | frozenset[object]], args: tuple[object, ...]) -> object:
    name, items = f"builtins.{kind.__name__}", args[0] if args else ()
    if not isinstance(items, list | tuple):
        return Opaque(name)
    return kind(items) if ATOMS.issuperset(map(type, items)) else call(Global(name), *args)


def _type(args: tuple[object, ...]) -> object:
    """``(None,)``: how pickle writes the class of a constant. With more, it makes a class."""
    if len(args) != 1:
        raise runner_error("builtins.type")
    return Opaque("builtins.NoneType" if args[0] is None else "builtins.type")


def _reconstructed(args: tuple[object, ...]) -> object:
    """``(class, base, state of the base)``: how a class makes an object that says so itself."""
    kind = args[0] if args else None
    if isinstance(kind, Global):  # whole but with a dict's items, or the like
        return Instance(kind, whole=args[2:] == (None,))
    return Opaque(getattr(kind, "qualname", "builtins.object"))


def _counter(args: tuple[object, ...]) -> object:
    return args[0] if args and type(args[0]) is dict else {}


def _array(args: tuple[object, ...]) -> object:
    """``(buffer, dtype, shape, order)`` of protocol 5, as protocol 2 says it: every NumPy loads
    that.
    """
    buffer, dtype, shape, order = args if len(args) == 4 else (None,) * 4
    if not isinstance(buffer, bytes | bytearray) or order not in ("C", "F"):
        return call(_FROM_BUFFER, *args)
    made = call(_RECONSTRUCT, _ARRAY, (0,), b"b")
    made.state = (1, shape, dtype, order == "F", bytes(buffer))
    return made


def _ordered_dict(args: tuple[object, ...]) -> OrderedDict[object, object]:
    """``()``, or ``([[key, value], …],)`` as Python 2 wrote it."""
    pairs = args[0] if args else ()
    if not isinstance(pairs, list | tuple):
        raise UnreadableError(f"has an OrderedDict made of {shown(pairs)}.")
    made = OrderedDict[object, object]()
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or type(pair[0]) not in ATOMS:
            raise UnreadableError("has an OrderedDict that is not a list of pairs.")
        made[pair[0]] = pair[1]
    return made


def _size(args: tuple[object, ...]) -> Size:
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
    name, form = next(((n, form) for n, (c, form) in _SCALARS.items() if c == code), ("", ""))
    if name and isinstance(data, bytes) and len(data) == struct.calcsize(form):
        text = f"numpy.{name}({struct.unpack(form, data)[0]!r})"
        if _code_and_bytes(text)[1] == data:  # unlike of a NaN with bits of its own
            return TorchValue(text)
    return call(_SCALAR, *args)


def _code_and_bytes(text: str) -> tuple[str, bytes]:
    """Of ``numpy.float64(0.1)``: ``f8``, and the bytes of the number."""
    name, _, value = text.removeprefix("numpy.").rstrip(")").partition("(")
    code, form = _SCALARS[name]
    if code == "b1":
        return code, struct.pack(form, value == "True")
    return code, struct.pack(form, float(value) if code.startswith("f") else int(value))


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


def node_of(value: TorchValue) -> Global | Instance:
    """How a pickle says such a value: a dtype by its name, others by a call of their class."""
    if value in LAYOUTS:
        return call(_LAYOUT, str(value))
    made, _, inner = value.partition("(")
    if made == "datetime.timedelta":
        return call(Global(made), *map(int, inner[:-1].split(", ")))
    if made.startswith("numpy."):
        code, data = _code_and_bytes(value)
        dtype = Instance(_DTYPE, (f"<{code}", False, True), called=True)
        return call(_SCALAR, dtype, data)
    if made == "torch.torch_version.TorchVersion":
        return Instance(Global(made), (inner.strip("')"),))
    if made == "torch.device":
        kind, _, index = inner.strip("')").partition(":")
        return call(Global(made), *((kind, int(index)) if index else (kind,)))
    return Global(str(value))


CONTAINER_FUNCTIONS: Mapping[str, Function] = {
    "_codecs.encode": Function(_encode),
    "builtins.bytes": Function(_bytes, "builtins.bytes"),
    "builtins.complex": Function(_complex, "builtins.complex"),
    "builtins.frozenset": Function(partial(_set, frozenset), "builtins.frozenset"),
    "builtins.set": Function(partial(_set, set), "builtins.set"),
    "builtins.type": Function(_type, "builtins.type"),
    "collections.Counter": Function(_counter, "collections.Counter"),
    "collections.OrderedDict": Function(_ordered_dict, "collections.OrderedDict"),
    "collections.defaultdict": Function(lambda _: {}, "collections.defaultdict"),
    "copyreg._reconstructor": Function(_reconstructed, "copyreg._reconstructor"),
    "datetime.timedelta": Function(_timedelta, "datetime.timedelta"),
    "numpy._core.multiarray.scalar": Function(_scalar, "numpy.generic"),
    "numpy._core.numeric._frombuffer": Function(_array, "numpy.ndarray"),
    "torch.Size": Function(_size, "torch.Size"),
    "torch.device": Function(_device, "torch.device"),
    "torch.serialization._get_layout": Function(_layout, "torch.layout"),
}
