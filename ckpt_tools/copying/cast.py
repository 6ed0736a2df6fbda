"""Casts, means and decoding of raw elements by ml_dtypes: casts as torch's ``tensor.to(dtype)``.

Rounds to nearest, ties to even; everything but float64 to and from float32 goes through float32, as
in torch. Torch (2.13, CPU) and ml_dtypes differ in two types, and torch is followed:

- float8_e4m3fn: what is too large, infinity too, becomes ±448; ml_dtypes gives NaN, as torch did
  before its pull request 178817 of April 2026.
- float8_e8m0fnu: the sign is dropped, and 0 becomes 2^-127; ml_dtypes gives NaN for both. These
  are the exponents of block scales: the command line casts no weights to them.

The other kinds overflow as torch's: infinity in float8_e5m2, NaN in the fnuz kinds. NaN stays NaN;
which of its bit patterns is not promised. Files and tensors are not known here. The import costs
numpy and ml_dtypes, so it comes late where values may not be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

import ml_dtypes  # noqa: TID253 - see above
import numpy as np  # noqa: TID253 - see above

from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.plan import Mean
from ckpt_tools.errors import UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.generic[object]]
    Reals = NDArray[np.float64]
    Numbers = NDArray[np.float64] | NDArray[np.complex128]
    Step = Callable[[Words, Words], None]

# Elements in one step. Smaller blocks would lie in the L2, but threads then spend their time on
# handing the interpreter to one another between the short steps.
BLOCK = 128 << 10

# Integers that float64 cannot hold exactly.
_WIDE = frozenset({"int64", "uint64"})


class Caster:
    """Casts buffers of one floating type to another; has scratch memory: one for each thread.

    It works through ``block`` elements at a time, with up to 16 bytes of scratch for each. Raises
    UnsupportedError when there is no such cast.
    """

    def __init__(self, source: DType, target: DType, *, block: int = BLOCK) -> None:
        if {source.kind, target.kind} != {"float"} or source == target:
            floats = ", ".join(name for name, row in BY_NAME.items() if row.kind == "float")
            raise UnsupportedError(
                f"There is no cast from {source.name} to {target.name}.",
                hint=f"Casts are between {floats}; keep the type of anything else.",
            )
        self._source, self._target, self._block = _words(source), _words(target), block
        self._step = _step(source, target, block)
        self._infinities = _infinity(source), _infinity(target)
        self._may_overflow = _largest(source) > _largest(target) and self._infinities[1] is not None

    def cast(self, source: memoryview, target: memoryview) -> bool:
        """Cast all elements of ``source`` (raw bytes) to the start of ``target``; gives whether a
        finite one became infinite.
        """
        words = np.frombuffer(source, self._source)
        out = np.frombuffer(target, self._target, count=len(words))
        overflows = False
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            for start in range(0, len(words), self._block):
                end = start + self._block
                self._step(words[start:end], out[start:end])
                overflows = overflows or self._overflows(words[start:end], out[start:end])
        return overflows

    def _overflows(self, words: Words, out: Words) -> bool:
        """Whether a finite element became infinite: then more are infinite than were before. Two
        maxima say for nearly all blocks that nothing is infinite or NaN.
        """
        before, after = self._infinities
        if not self._may_overflow or after is None or not len(out):
            return False
        bits, sign = out.view(f"u{out.itemsize}"), 1 << (8 * out.itemsize - 1)
        if max(int(bits.view(f"i{out.itemsize}").max()), int(bits.max()) - sign) < after:
            return False
        return _count_of(out, after) > (0 if before is None else _count_of(words, before))


def has_numbers(dtype: DType) -> bool:
    """Whether the elements of this type are numbers; packed 4- and 6-bit floats stay packed."""
    return dtype.kind != "raw"


def numbers(piece: memoryview, dtype: DType) -> Numbers:
    """The elements in these bytes as float64, complex ones as complex128.

    All types narrower than 64 bits are exact in them.
    """
    if dtype.name == "complex32":
        return np.frombuffer(piece, np.float16).astype(np.float64).view(np.complex128)
    if dtype.kind == "float" and dtype.bits == 8:
        values: Reals = _values(dtype.name).astype(np.float64)[np.frombuffer(piece, np.uint8)]
        return values
    words = np.frombuffer(piece, np.uint8 if dtype.kind == "bool" else _words(dtype))
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return words.astype(np.complex128 if dtype.kind == "complex" else np.float64)


def exact_extremes(piece: memoryview, dtype: DType) -> tuple[int, int] | None:
    """Least and greatest of 64-bit integers, which float64 cannot hold; None for other types."""
    if dtype.name not in _WIDE:
        return None
    words = np.frombuffer(piece, dtype.name)
    return int(words.min()), int(words.max())


def decode(data: bytes, dtype: DType) -> list[complex]:
    """The elements as Python numbers; of a type without numbers its bits, lowest byte first."""
    if dtype.kind in ("float", "complex"):
        values: list[complex] = numbers(memoryview(data), dtype).tolist()
        return values
    if not has_numbers(dtype):
        starts = range(0, len(data), dtype.itemsize)
        return [int.from_bytes(data[at : at + dtype.itemsize], "little") for at in starts]
    whole: list[complex] = np.frombuffer(data, _words(dtype)).tolist()
    return whole


def _words(dtype: DType) -> np.dtype[np.generic[object]]:
    """The elements as numpy has them, with ml_dtypes; bare codes for the floats of one byte."""
    if dtype.kind == "float" and dtype.bits == 8:
        return np.dtype(np.uint8)
    return np.dtype(getattr(ml_dtypes, dtype.name, dtype.name))


def _infinity(dtype: DType) -> int | None:
    """The bits of infinity in a type, None where it has none."""
    infinity = np.array(np.inf, getattr(ml_dtypes, dtype.name, dtype.name))
    return int(infinity.view(f"u{dtype.itemsize}")) if np.isinf(infinity) else None


def _largest(dtype: DType) -> float:
    return float(ml_dtypes.finfo(dtype.name).max)  # type: ignore[no-untyped-call]


def _count_of(words: Words, bits: int) -> int:
    """How many elements have these bits, whatever their sign."""
    unsigned = words.view(f"u{words.itemsize}")
    return int(np.count_nonzero((unsigned & ((1 << (8 * words.itemsize - 1)) - 1)) == bits))


def _step(source: DType, target: DType, block: int) -> Step:
    """The cast of one block. To and from 8 bits by tables: ml_dtypes itself is 1.4 to 4 x slower.

    float32 needs no table of its own: its upper half, with a 1 in the last place for any bit that
    is lost, rounds to the same 8 bits. 0x3F880001 (1.0625…1) -> 0x3F89 -> 0x39 in float8_e4m3fn.
    """
    if source.bits == 8:
        return _look_up(_encode(_values(source.name), target))
    if source.bits == 64 and target.bits < 32:
        rest, middle = _step(BY_NAME["float32"], target, block), np.empty(block, np.float32)

        def through_float32(words: Words, out: Words) -> None:
            part = middle[: len(words)]
            part[...] = words
            rest(part, out)

        return through_float32
    if target.bits > 8:
        return _by_ml_dtypes
    if source.bits == 16:
        every = np.arange(1 << 16, dtype=np.uint16).view(_words(source))
        return _look_up(_encode(every.astype(np.float32), target))
    rest = _step(BY_NAME["bfloat16"], target, block)
    upper, lost = np.empty(block, np.uint16), np.empty(block, np.bool_)

    def round_to_odd(words: Words, out: Words) -> None:
        halves, count = words.view(np.uint16), len(words)
        np.not_equal(halves[::2], 0, out=lost[:count])
        np.bitwise_or(halves[1::2], lost[:count], out=upper[:count])
        rest(upper[:count], out)

    return round_to_odd


def _by_ml_dtypes(words: Words, out: Words) -> None:
    out[...] = words


def _look_up(table: Words) -> Step:
    """The element of this table for each code of 8 or 16 bits, as its length tells."""
    bits = table.view(f"u{table.itemsize}")
    index = np.uint8 if len(table) == 256 else np.uint16

    def look_up(words: Words, out: Words) -> None:
        np.take(bits, words.view(index), out=out.view(bits.dtype))

    return look_up


@lru_cache
def _values(name: str) -> NDArray[np.float32]:
    """The value of each of the 256 codes of a float of one byte."""
    values: NDArray[np.float32] = (
        np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)
    )
    return values


def _encode(values: NDArray[np.float32], target: DType) -> Words:
    """A cast by ml_dtypes, and what torch does another way."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if target.name == "float8_e8m0fnu":
            # The float32's exponent: 1.5 and more round up, of subnormal numbers what is above
            # 2^-127. By hand, because ml_dtypes 0.5 rounds otherwise than 0.6.
            size = values.view(np.uint32) & 0x7FFFFFFF
            exponents = (size + 0x3FFFFF + (size > 0x7FFFFF)) >> 23
            codes: Words = np.minimum(exponents, 0xFF).astype(np.uint8)
            return codes
        out = values.astype(getattr(ml_dtypes, target.name, target.name))
        if target.name == "float8_e4m3fn":
            too_large = np.isnan(out) & ~np.isnan(values)
            out.view(np.uint8)[too_large] -= 1  # 0x7F or 0xFF, to the code before: ±448
        return out


def write_mean(raws: Iterable[memoryview], mean: Mean, dtype: DType, out: memoryview) -> None:
    """Average raw elements of a type into ``out``; ``raws`` are those of each term, in order.

    They may share one buffer: each is used before the next one is asked for. 16 bytes of memory
    are taken for each element, 32 for a complex one.
    """
    total: NDArray[np.float64] | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for (weight, _), raw in zip(mean.terms, raws, strict=True):
            part = numbers(raw, dtype).view(np.float64)  # a complex number is two of these
            part *= weight
            if total is not None:
                total *= mean.keep
                part += total
            total = part
        if total is not None:
            total /= mean.divisor
            write_rounded(total, dtype, out)


def write_rounded(total: NDArray[np.float64], dtype: DType, out: memoryview) -> None:
    """Write numbers, two for each complex one, into ``out`` as raw elements of a type."""
    component = BY_NAME[f"float{dtype.bits // 2}"] if dtype.kind == "complex" else dtype
    raw = total.data.cast("B")
    if component.name == "float64":
        out[:] = raw
    else:
        Caster(BY_NAME["float64"], component).cast(raw, out)
