"""Elements into Python numbers: a handful to look at, without numpy and without torch.

torch's types that `struct` lacks (bfloat16, the float8 kinds) are decoded from their bits.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType

Number = bool | int | float | complex

_CODES = {
    "float64": "d",
    "float32": "f",
    "float16": "e",
    "int64": "q",
    "int32": "i",
    "int16": "h",
    "int8": "b",
    "uint64": "Q",
    "uint32": "I",
    "uint16": "H",
    "uint8": "B",
    "bool": "?",
}
_HALVES = {"complex128": "d", "complex64": "f", "complex32": "e"}


class _Float8(NamedTuple):
    """Bits of the exponent and of the fraction, the bias, and which bytes are no numbers."""

    exponent: int
    fraction: int
    bias: int
    nans: frozenset[int]
    infinities: frozenset[int] = frozenset()


# The kinds of the OCP 8-bit floating point specification, and the "fnuz" ones that have neither
# infinities nor a negative zero.
_FLOAT8 = {
    "float8_e4m3fn": _Float8(4, 3, 7, frozenset({0x7F, 0xFF})),
    "float8_e5m2": _Float8(
        5, 2, 15, frozenset({*range(0x7D, 0x80), *range(0xFD, 0x100)}), frozenset({0x7C, 0xFC})
    ),
    "float8_e4m3fnuz": _Float8(4, 3, 8, frozenset({0x80})),
    "float8_e5m2fnuz": _Float8(5, 2, 16, frozenset({0x80})),
}


def decode(data: bytes, dtype: DType) -> list[Number]:
    """The elements in these little-endian bytes; a type without numbers gives its bytes."""
    count = len(data) // dtype.itemsize
    if dtype.name in _CODES:
        return list(struct.unpack(f"<{count}{_CODES[dtype.name]}", data))
    if dtype.name in _HALVES:
        parts = struct.unpack(f"<{2 * count}{_HALVES[dtype.name]}", data)
        return [complex(real, imag) for real, imag in zip(parts[::2], parts[1::2], strict=True)]
    if dtype.name == "bfloat16":
        halves = struct.unpack(f"<{count}H", data)
        return list(
            struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(h << 16 for h in halves)))
        )
    if dtype.name == "float8_e8m0fnu":
        return [float("nan") if byte == 0xFF else 2.0 ** (byte - 127) for byte in data]
    if dtype.name in _FLOAT8:
        table = _float8_table(dtype.name)
        return [table[byte] for byte in data]
    return list(data)


@lru_cache
def _float8_table(name: str) -> tuple[float, ...]:
    return tuple(_float8(byte, _FLOAT8[name]) for byte in range(256))


def _float8(byte: int, kind: _Float8) -> float:
    if byte in kind.nans:
        return float("nan")
    sign = -1.0 if byte & 0x80 else 1.0
    if byte in kind.infinities:
        return sign * float("inf")
    exponent = (byte >> kind.fraction) & ((1 << kind.exponent) - 1)
    fraction = (byte & ((1 << kind.fraction) - 1)) / (1 << kind.fraction)
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - kind.bias))
    return float(sign * (1 + fraction) * 2.0 ** (exponent - kind.bias))
