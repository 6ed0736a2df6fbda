"""Raw elements as numbers that numpy can add up: float64, or complex128 for complex types.

Every type narrower than 64 bits is exact in them. It knows nothing of tensors or files.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np  # noqa: TID253 - only whoever looks at values comes here, and late

from ckpt_tools.core.dtypes import DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Reals = NDArray[np.float64]
    Numbers = NDArray[np.float64] | NDArray[np.complex128]

# As numpy reads them; what it has no type for is decoded below.
_WORDS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "u1",
    "complex64": "<c8",
    "complex128": "<c16",
}
# Integers that float64 cannot hold exactly.
_WIDE = frozenset({"int64", "uint64"})


class _Float8(NamedTuple):
    """Bits of exponent and fraction, the exponent's bias, and the codes that are no numbers."""

    exponent: int
    fraction: int
    bias: int
    nans: tuple[int, ...]
    infinities: tuple[int, ...] = ()


# OCP 8-bit Floating Point Specification 1.0; the fnuz kinds have one NaN and no negative zero.
_FLOAT8 = {
    "float8_e4m3fn": _Float8(4, 3, 7, (0x7F, 0xFF)),
    "float8_e5m2": _Float8(5, 2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), (0x7C, 0xFC)),
    "float8_e4m3fnuz": _Float8(4, 3, 8, (0x80,)),
    "float8_e5m2fnuz": _Float8(5, 2, 16, (0x80,)),
}


def has_numbers(dtype: DType) -> bool:
    """Whether the elements of this type are numbers; packed 4-bit floats are not taken apart."""
    return dtype.kind != "raw"


def numbers(piece: memoryview, dtype: DType) -> Numbers:
    """The elements in these bytes as float64, complex ones as complex128."""
    if dtype.name == "bfloat16":
        upper: Reals = (np.frombuffer(piece, "<u2").astype("<u4") << 16).view("<f4").astype("<f8")
        return upper
    if dtype.kind == "float" and dtype.bits == 8:
        values: Reals = _float8_table(dtype.name)[np.frombuffer(piece, "u1")]
        return values
    if dtype.name == "complex32":
        return np.frombuffer(piece, "<f2").astype(np.float64).view(np.complex128)
    words = np.frombuffer(piece, _WORDS[dtype.name])
    if dtype.kind == "complex":
        return words.astype(np.complex128)
    return words.astype(np.float64)


def exact_extremes(piece: memoryview, dtype: DType) -> tuple[int, int] | None:
    """Least and greatest of 64-bit integers, which float64 cannot hold; None for other types."""
    if dtype.name not in _WIDE:
        return None
    words = np.frombuffer(piece, _WORDS[dtype.name])
    return int(words.min()), int(words.max())


@lru_cache(maxsize=8)
def _float8_table(name: str) -> Reals:
    """The value of each of the 256 codes."""
    codes = np.arange(256)
    if name == "float8_e8m0fnu":
        powers = np.ldexp(1.0, codes - 127)
        powers[0xFF] = np.nan
        return powers
    kind = _FLOAT8[name]
    exponent = (codes >> kind.fraction) & ((1 << kind.exponent) - 1)
    fraction = (codes & ((1 << kind.fraction) - 1)) / (1 << kind.fraction)
    values = np.where(
        exponent == 0,
        np.ldexp(fraction, 1 - kind.bias),
        np.ldexp(1 + fraction, exponent - kind.bias),
    )
    values[list(kind.infinities)] = np.inf
    values = np.where(codes & 0x80, -values, values)
    values[list(kind.nans)] = np.nan
    return values
