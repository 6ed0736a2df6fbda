"""How much text a pickle may be walked through for: a reference of two bytes repeats a megabyte.

A walk counts each text as often as it meets it. All of them may be four times as long as the
pickle, and 64 MB more: a large config passes, and a walk ends within a second. A name is at most
64 KB long (`core.text.is_name`); what is a name nowhere, as that of a class, a few characters.
"""

from __future__ import annotations

from typing import TypeGuard

from ckpt_tools.errors import UnreadableError

_FREE = 64_000_000
_TIMES = 4
_MAX_WORD = 255


class TextBound:
    """The text, in characters or bytes, that may still be met in a pickle of ``length`` bytes."""

    def __init__(self, length: int) -> None:
        self._most = self.left = _FREE + _TIMES * length

    def meet(self, value: object) -> None:
        """Count what is met, when it is a text. Raises UnreadableError when it is too much."""
        if isinstance(value, str | bytes | bytearray):
            self.take(len(value))

    def take(self, size: int) -> None:
        """Count so much text at once. Raises UnreadableError when it is too much."""
        self.left -= size
        if self.left < 0:
            raise UnreadableError(f"unfolds to more than {self._most:,} bytes of text.")


def is_word(value: object) -> TypeGuard[str]:
    """Whether this is a text as short as the names of classes, devices and records are."""
    return type(value) is str and len(value) <= _MAX_WORD
