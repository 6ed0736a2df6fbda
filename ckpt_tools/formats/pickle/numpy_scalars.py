"""Scalars of NumPy as texts and as bytes, without NumPy.

Hyper-parameters and metrics often are ``numpy.float64``, which is no float to a pickle. The text
``numpy.float64(0.1)`` is exact: a value whose text would not give its bytes again has none.
"""

from __future__ import annotations

import struct

# The code in a pickle: the type's name, and the format of its bytes.
# fmt: off
_TYPES = {
    "b1": ("bool", "<?"), "f2": ("float16", "<e"), "f4": ("float32", "<f"), "f8": ("float64", "<d"),
    "i1": ("int8", "<b"), "i2": ("int16", "<h"), "i4": ("int32", "<i"), "i8": ("int64", "<q"),
    "u1": ("uint8", "<B"), "u2": ("uint16", "<H"), "u4": ("uint32", "<I"), "u8": ("uint64", "<Q"),
}
# fmt: on
_CODES = {name: (code, form) for code, (name, form) in _TYPES.items()}
PREFIX = "numpy."


def text_of(code: str, data: bytes) -> str | None:
    """``numpy.float64(0.1)``; None for another type, or a NaN with bits of its own."""
    name, form = _TYPES.get(code, ("", ""))
    if not name or len(data) != struct.calcsize(form):
        return None
    text = f"{PREFIX}{name}({struct.unpack(form, data)[0]!r})"
    return text if code_and_bytes(text)[1] == data else None


def code_and_bytes(text: str) -> tuple[str, bytes]:
    """The code and the bytes of a scalar whose text `text_of` gave."""
    name, _, value = text.removeprefix(PREFIX).rstrip(")").partition("(")
    code, form = _CODES[name]
    if code == "b1":
        return code, struct.pack(form, value == "True")
    return code, struct.pack(form, float(value) if code.startswith("f") else int(value))
