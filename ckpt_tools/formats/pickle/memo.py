"""The memo of a pickle: what it has made before, by number.

`pickle` numbers what it makes without gaps. Of entries that were replayed, the memo keeps one
record that finds each of their values when it is asked for: that is rare, and a million entries
have ten million numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Protocol

from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle.limits import MAX_MEMO_GAP


class Passed(Protocol):
    """What entries that were replayed have put into the memo."""

    def value(self, number: int) -> object:
        """The value of a number. Raises IndexError when there is none."""


_UNSET = object()


class Memo:
    """Values by number; ``is_dense`` when each has had the next number, once.

    ``get`` gives the value of a number and raises IndexError when there is none; ``append``
    remembers a value under the number of values that are known. As long as nothing was replayed
    they are those of a list: most opcodes of a pickle call one of them.
    """

    append: Callable[[object], None]
    get: Callable[[int], object]

    def __init__(self) -> None:
        self._first = 0
        self._starts: list[int] = []
        self._parts: list[Passed] = []
        self._known = 0
        self._again: dict[int, object] = {}  # put by a damaged pickle in place of replayed ones
        self.is_dense = True
        self._values: list[object] = []  # from number `_first` on
        self.append, self.get = self._values.append, self._values.__getitem__

    def __len__(self) -> int:
        return self._first + len(self._values)

    def put(self, number: int, value: object) -> None:
        """Remember a value under a number, which is not far behind the values that are known."""
        if self.is_dense:
            if number == self._first + len(self._values):
                self.append(value)
                return
            self.is_dense, self._known = False, len(self)
            self.append, self.get = self._append, self._get
        if number > self._known + MAX_MEMO_GAP:
            raise UnreadableError(f"is hostile: a memo of {number:,} for {self._known:,} values.")
        place = number - self._first
        if place < 0:
            self._again[number] = value
            return
        self._values += [_UNSET] * (place + 1 - len(self._values))
        self._known += self._values[place] is _UNSET
        self._values[place] = value

    def _append(self, value: object) -> None:
        self.put(self._known, value)

    def _get(self, number: int) -> object:
        if number in self._again:
            return self._again[number]
        if number < self._first:
            return self._parts[bisect_right(self._starts, number) - 1].value(number)
        value = self._values[number - self._first]
        if value is _UNSET:
            raise IndexError
        return value

    def skip(self, part: Passed, count: int) -> None:
        """Take ``count`` values into account that ``part`` knows."""
        if self._values:
            self._starts.append(self._first)
            self._parts.append(_Kept(self._first, self._values))
            self._first, self._values = len(self), []
        self._starts.append(self._first)
        self._parts.append(part)
        self._first += count
        self.append, self.get = self._values.append, self._get


class _Kept:
    """Values that were interpreted, before others that were replayed."""

    def __init__(self, first: int, values: list[object]) -> None:
        self._first = first
        self._values = values

    def value(self, number: int) -> object:
        """The value of a number."""
        return self._values[number - self._first]
