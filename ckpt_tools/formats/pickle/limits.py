"""Every limit on what a pickle may cost, and on what may come out of it.

A few bytes of a pickle can ask for gigabytes or for hours. So the machine looks at the memo, at
objects and at keys before they are made or hashed, a function of the tables at what it copies, and
a walk at the depth and at what it meets. What torch writes is far below.

A walk counts each text as often as it meets it, as a reference of two bytes repeats a megabyte. All
of them may be four times as long as the pickle, and 64 MB more: a large config passes, and a walk
ends within a second. A name is at most 64 KB long (`core.text.is_name`); what is a name nowhere, as
that of a class, a few characters.
"""

from __future__ import annotations

from typing import TypeGuard

from ckpt_tools.errors import UnreadableError

# A pickle in a stream, in bytes; of one that is a file, or a record of an archive, all is read.
MAX_PICKLE = 1 << 30

# The machine. A container costs one byte or two, a call three, and 60 to 400 in memory; of what is
# real, each has four bytes and more, with its keys and memo numbers.
FREE_OBJECTS = 50_000
BYTES_PER_OBJECT = 4
OBJECTS_OF_CALL = 2
MAX_MARKS = 10_000
MAX_GAPS = 500_000  # numbers of a memo that is no list: cPickle of Python 2 began at 1
# How much work it is to hash a key: 0 costs nothing, this too much. What a call made, and a long
# number, weighs a little.
HEAVY_KEY = 250
MADE_KEY = 8
MAX_HEAVY_KEYS = 5000

# Names and small values.
MAX_WORD = 255
MAX_SHOWN = 160
# Python refuses to print numbers of thousands of digits.
MAX_LONG = 128
MAX_INT_BITS = 8 * MAX_LONG
MAX_KEY_BITS = 512
MAX_NDIM = 64  # as many as torch allows
MAX_NAMES = 1000  # of classes and functions, those of ours too
# A call costs three bytes and can copy a long text or list: so many bytes and items in all, beside
# the length of the pickle, and half of that.
MAX_COPIED = 64 << 20
FREE_ITEMS = 2 << 20
# Closed values are pickled again, each with all that it shares: so many opcodes in all, which take
# half a microsecond each, and two for each byte.
FREE_OPCODES = 500_000

# Values. They are counted as often as they are met: one per byte, were none shared.
FREE_VALUES = 10_000
VALUES_PER_BYTE = 16
VALUES_OF_PIECE = 16
MAX_CLOSED_DEPTH = 100
MAX_CONFIG_VALUES = 100_000  # of all configs of one pickle

# State dicts. What a key is repeated in: the names of all that is in its dict, which may be 256
# bytes long on average, and 64 MB more in all.
USUAL_NAME, FREE_NAMES = 256, 64_000_000
# A pickle of a few KB can say one list so often that its items are more than memory holds.
MAX_REPEATED = 200_000
# Python's and numpy's generators have 625 numbers, a sampler's state may list an epoch's samples.
MAX_PLAIN = 2_000_000
MAX_PLAIN_IN_ALL = 10_000_000

_FREE_TEXT = 64_000_000
_TEXT_PER_BYTE = 4


class Bound:
    """How much of something may still be met in a walk; ``what`` names it in the error."""

    def __init__(self, most: int, what: str) -> None:
        self._most = self.left = most
        self._what = what

    def take(self, size: int) -> None:
        """Count so much. Raises UnreadableError when it is too much."""
        self.left -= size
        if self.left < 0:
            raise UnreadableError(f"unfolds to more than {self._most:,} {self._what}.")

    def meet(self, value: object) -> None:
        """Count a value when it is a text. Raises UnreadableError when that is too much."""
        if isinstance(value, str | bytes | bytearray):
            self.take(len(value))


def text_bound(length: int) -> Bound:
    """The text, in characters or bytes, of a pickle of ``length`` bytes."""
    return Bound(_FREE_TEXT + _TEXT_PER_BYTE * length, "bytes of text")


def is_word(value: object) -> TypeGuard[str]:
    """Whether this is a text as short as the names of classes, devices and records are."""
    return type(value) is str and len(value) <= MAX_WORD
