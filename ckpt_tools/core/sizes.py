"""Amounts of bytes as people write them: 5GB is 5 x 10^9 bytes, 5GiB is 5 x 2^30.

It knows nothing of files or tensors.
"""

from __future__ import annotations

import re
from decimal import Decimal

from ckpt_tools.errors import UsageError

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50}
_UNITS = {"": 1} | _DECIMAL | _BINARY
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """The number of bytes that ``5GB`` (decimal), ``2GiB`` (binary), ``1.5 MB`` or ``1024`` means.

    Capitals do not matter. A part of a byte is cut off. Raises UsageError for anything else, for
    less than one byte, and for ``5G``, which people mean both ways.
    """
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"The size {text!r} cannot be read.",
            hint="Write 5GB (5 x 10^9 bytes), 5GiB (5 x 2^30 bytes), 500MB or a number of bytes.",
        )
    size = int(Decimal(match[1]) * factor)
    if size < 1:
        raise UsageError(f"The size {text!r} is less than one byte.")
    return size


def format_size(nbytes: int) -> str:
    """The same for reading, in decimal units and three digits: ``512 B``, ``4.98 KB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    unit = [unit for unit, factor in _DECIMAL.items() if nbytes >= factor][-1]
    value = nbytes / _DECIMAL[unit]
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"
