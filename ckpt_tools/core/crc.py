"""CRC-32 as zip archives have it, and of bytes that several threads see in parts."""

from __future__ import annotations

from functools import lru_cache

try:  # up to ten times as fast as zlib's
    from isal.isal_zlib import crc32
except ImportError:  # a processor that it is not made for
    from zlib import crc32

__all__ = ["combine", "crc32"]

# The polynomial of zip's CRC-32 (ISO 3309), bit-reversed: bit 31 is the coefficient of x^0.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31


def combine(first: int, second: int, *, length: int) -> int:
    """The CRC-32 of two byte strings in a row, of their own CRCs and the second's length in bytes.

    Appending n bytes to a message multiplies its polynomial by x^(8n); the rest is a sum.
    """
    return _multiply(first, _shift(length)) ^ second


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=256)
def _shift(length: int) -> int:
    """x^(8 * length), modulo the CRC's polynomial, by repeated squaring."""
    power, square = _ONE, _ONE >> 8
    while length:
        if length & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        length >>= 1
    return power
