"""Casts between floating types on raw bytes, to the bit as torch's ``tensor.to(dtype)`` does it.

Rounds to nearest, ties to even. Everything but float64 to and from float32 goes through float32, as
in torch. Works in blocks that stay in the processor's cache. It knows nothing of files or tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np  # noqa: TID253 - only whoever writes casts; inspect and ls never come here

from ckpt_tools.core.dtypes import DType
from ckpt_tools.errors import UnsupportedError

if TYPE_CHECKING:
    Words = np.ndarray[tuple[int, ...], np.dtype[np.generic[object]]]
    Step = Callable[[Words, Words], None]

# Elements in one step. Smaller blocks would lie in the L2, but threads then spend their time on
# handing the interpreter to one another between the short steps.
BLOCK = 128 << 10

# How each type lies in memory, for numpy.
_WORDS = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
}

# By the size of a float: an integer of that size, and the bit that makes a NaN a quiet one.
_QUIET = {
    2: (np.uint16, np.uint16(1 << 9)),
    4: (np.uint32, np.uint32(1 << 22)),
    8: (np.uint64, np.uint64(1 << 51)),
}


_TO_HALF = np.float32(2.0**112)


class Caster:
    """Casts buffers of one type to another; it has scratch memory, so each thread needs its own.

    It works through ``block`` elements at a time, with up to 16 bytes of scratch for each. Raises
    UnsupportedError when there is no such cast.
    """

    def __init__(self, source: DType, target: DType, *, block: int = BLOCK) -> None:
        refuse_cast(source, target)
        self._source, self._target, self._block = source, target, block
        self._step = _step(source.name, target.name, block)

    def cast(self, source: memoryview, target: memoryview) -> None:
        """Cast all elements of ``source`` (raw bytes) to the start of ``target``."""
        words = np.frombuffer(source, _WORDS[self._source.name])
        out = np.frombuffer(target, _WORDS[self._target.name], count=len(words))
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, len(words), self._block):
                end = start + self._block
                self._step(words[start:end], out[start:end])


def refuse_cast(source: DType, target: DType) -> None:
    """Raise UnsupportedError unless elements of ``source`` can be cast to ``target`` here."""
    if source.name not in _WORDS or target.name not in _WORDS or source == target:
        raise UnsupportedError(
            f"There is no cast from {source.name} to {target.name}.",
            hint=f"Casts are between {', '.join(_WORDS)}; keep the type of anything else.",
        )


def _step(source: str, target: str, block: int) -> Step:
    """The cast of one block, which uses scratch memory of its own."""
    if source == "float32":
        return _encoder(target, block, nan=0xFFFF)
    if target == "float32":
        return _decoder(source)
    decode = _decoder(source)
    encode = _encoder(target, block, nan=0xFFFF if source == "float64" else 0x7FC0)
    middle = np.empty(block, np.float32)

    def through_float32(words: Words, out: Words) -> None:
        part = middle[: len(words)]
        decode(words, part)
        encode(part, out)

    return through_float32


def _by_numpy(words: Words, out: Words) -> None:
    """As the processor does it, signalling NaNs made quiet."""
    out[...] = words
    if np.isnan(np.maximum.reduce(words)):
        _quieted(out)


def _quieted(values: Words) -> Words:
    bits, quiet = _QUIET[values.dtype.itemsize]
    values.view(bits)[np.isnan(values)] |= quiet
    return values


# ------------------------------------------------------------------------------ another → float32


def _decoder(source: str) -> Step:
    if source == "float64":
        return _by_numpy
    if source == "float16":
        return _widen_half
    if source == "bfloat16":
        return _widen
    table = _float8_values(source)

    def look_up(words: Words, out: Words) -> None:
        np.take(table, words.view(np.uint8), out=out)

    return look_up


def _widen(words: Words, out: Words) -> None:
    """A bfloat16 is the upper half of a float32."""
    np.left_shift(words, 16, out=out.view(np.uint32), dtype=np.uint32)


def _widen_half(words: Words, out: Words) -> None:
    """The bits of a float16 moved to their places mean 2^112 times less as a float32."""
    halves, bits = words.view(np.uint16), out.view(np.uint32)
    np.left_shift(halves & 0x7FFF, 13, out=bits, dtype=np.uint32)
    np.multiply(out, _TO_HALF, out=out)
    np.bitwise_or(bits, np.left_shift(halves & 0x8000, 16, dtype=np.uint32), out=bits)
    special = (halves & 0x7C00) == 0x7C00
    if special.any():
        out[special] = _quieted(words[special].astype(np.float32))


def _float8_values(name: str) -> Words:
    """The value of each of the 256 bit patterns."""
    codes = np.arange(256, dtype=np.uint16)
    if name == "float8_e5m2":
        with np.errstate(invalid="ignore"):
            return _quieted((codes << 8).view(np.float16).astype(np.float32))
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(np.int32) - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    signed = np.where(codes & 128, -values, values).astype(np.float32)
    signed.view(np.uint32)[127::128] = (0x7FF00000, 0xFFF00000)  # torch's NaNs for this type
    return signed


# ------------------------------------------------------------------------------ float32 → another


def _encoder(target: str, block: int, *, nan: int) -> Step:
    """``nan`` is what every NaN becomes in bfloat16."""
    if target == "float64":
        return _by_numpy
    if target == "bfloat16":
        return _bfloat16_encoder(block, nan)
    return _small_encoder(_SMALL[target], block)


def _bfloat16_encoder(block: int, nan: int) -> Step:
    """Add half of the last bit kept, a hair less when that bit is 0, and keep the upper half."""
    scratch = np.empty(block, np.uint32)

    def encode(words: Words, out: Words) -> None:
        bits, sums = words.view(np.uint32), scratch[: len(words)]
        np.right_shift(bits, 16, out=sums)
        np.bitwise_and(sums, 1, out=sums)
        np.add(sums, 0x7FFF, out=sums)
        np.add(sums, bits, out=sums)
        np.right_shift(sums, 16, out=out, casting="unsafe")
        if np.isnan(np.maximum.reduce(words)):
            out[np.isnan(words)] = nan

    return encode


class _Small(NamedTuple):
    """A float of 16 bits or fewer: bits of its mantissa, bias of its exponent, and odd codes.

    What is too large becomes ``largest``; a NaN becomes ``nan`` and those upper bits of its own
    mantissa that ``payload`` lets through.
    """

    bits: int
    mantissa: int
    bias: int
    largest: int
    nan: int
    payload: int = 0


_SMALL = {
    "float16": _Small(16, 10, 15, 0x7C00, 0x7E00, 0x1FF),
    "float8_e4m3fn": _Small(8, 3, 7, 0x7E, 0x7F),
    "float8_e5m2": _Small(8, 2, 15, 0x7C, 0x7F),
}


def _small_encoder(small: _Small, block: int) -> Step:
    """Rebias the exponent and round the mantissa, all in integers; subnormal numbers apart."""
    sizes, codes = np.empty(block, np.uint32), np.empty(block, np.uint32)
    tiny = np.empty(block, np.bool_)
    shift, to_sign = 23 - small.mantissa, 32 - small.bits
    add = np.uint32(((1 << (shift - 1)) - 1 - ((127 - small.bias) << 23)) & 0xFFFFFFFF)
    smallest = (128 - small.bias) << 23
    # Added to what is below the smallest normal number, it leaves the rounding to the processor.
    magic = np.float32(2.0 ** (1 - small.bias + shift))

    def encode(words: Words, out: Words) -> None:
        count = len(words)
        bits, size, code = words.view(np.uint32), sizes[:count], codes[:count]
        np.bitwise_and(bits, 0x7FFFFFFF, out=size)
        np.right_shift(size, shift, out=code)
        np.bitwise_and(code, 1, out=code)
        np.add(code, size, out=code)
        np.add(code, add, out=code)
        np.right_shift(code, shift, out=code)
        np.minimum(code, small.largest, out=code)
        if np.less(size, smallest, out=tiny[:count]).any():
            np.add(size.view(np.float32), magic, out=size.view(np.float32))
            np.subtract(size, magic.view(np.uint32), out=size)
            np.copyto(code, size, where=tiny[:count])
        np.right_shift(bits, to_sign, out=size)
        np.bitwise_and(size, 1 << (small.bits - 1), out=size)
        out = out.view(f"u{small.bits // 8}")
        np.bitwise_or(code, size, out=out, casting="unsafe")
        if np.isnan(np.maximum.reduce(words)):
            where = np.isnan(words)
            payload = (bits[where] >> 13) & small.payload
            out[where] = size[where] | small.nan | payload

    return encode
