"""Amounts and lists as people write and read them: sizes, counts, the first of many, ranks.

5GB is 5 x 10^9 bytes, 5GiB is 5 x 2^30. It knows nothing of files or tensors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BINARY = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50}
_UNITS = {"": 1} | _DECIMAL | _BINARY
_SMALLEST_BARE = 1_000  # a bare number below this is no number of bytes
_SIZE = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z]*)\s*")


def parse_size(text: str) -> int:
    """The number of bytes that ``5GB`` (decimal), ``2GiB`` (binary), ``1.5 MB`` or ``1024`` means.

    Capitals do not matter. A part of a byte is cut off. Raises ValueError for anything else, for
    less than one byte, for a bare number that is surely none of bytes, and for ``5G``, which people
    mean both ways.
    """
    if text.strip().isdigit() and 0 < int(text) < _SMALLEST_BARE:
        raise ValueError(f"{text} of what? Write {text}GB, {text}GiB or {text}MB.")
    match = _SIZE.fullmatch(text)
    factor = _UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError(
            f"The size {text!r} cannot be read. "
            "Write 5GB (5 x 10^9 bytes), 5GiB (5 x 2^30 bytes), 500MB or a number of bytes."
        )
    whole, _, part = match[1].partition(".")
    size: int = int(whole + part) * factor // 10 ** len(part)
    if size < 1:
        raise ValueError(f"The size {text!r} is less than one byte.")
    return size


def format_size(nbytes: int) -> str:
    """The same for reading, in decimal units and three digits: ``512 B``, ``4.98 KB``."""
    if nbytes < 1000:
        return f"{nbytes} B"
    unit = [unit for unit, factor in _DECIMAL.items() if nbytes >= factor][-1]
    value = nbytes / _DECIMAL[unit]
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def counted(number: int, noun: str) -> str:
    """``1 tensor``, ``94 tensors``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def is_text(text: str) -> bool:
    """Whether a str can be written as UTF-8: pickles and JSON can hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Bytes of a name: no real one is nearly as long, and a pickle can repeat one a million times.
MAX_NAME = 64 << 10


def is_name(text: str) -> bool:
    """Whether a str can be the name of an entry: text, and not too long."""
    return len(text) <= MAX_NAME and is_text(text)


def are(number: int) -> str:
    """``is`` for one, ``are`` for any other number."""
    return "is" if number == 1 else "are"


def ago(seconds: float) -> str:
    """How long ago something was: ``just now``, ``5 minutes ago``, ``2 days ago``."""
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def some(words: Sequence[str], most: int = 5) -> str:
    """The first few of them in one line, and how many more there are: ``a, b and 3 more``."""
    more = f" and {len(words) - most:,} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def first_of(lines: Sequence[str], most: int = 5) -> list[str]:
    """The first few of them, and as the last line how many more there are: ``and 3 more``."""
    more = [f"and {len(lines) - most:,} more"] if len(lines) > most else []
    return [*lines[:most], *more]


def rank_spans(ranks: Sequence[int], comma: str = ",") -> str:
    """Numbers in ascending order as spans: ``0-3,7``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return comma.join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def utc(seconds: float) -> str:
    """A time in seconds since 1970 as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


class Shown:
    """A result that shows itself as its `__str__` does, at most 15 lines, in a notebook, too."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The same lines."""
        return str(self)

    def _repr_html_(self) -> str:
        """The same lines, as HTML."""
        from html import escape  # late: only notebooks ask for it

        return f"<pre>{escape(str(self))}</pre>"
