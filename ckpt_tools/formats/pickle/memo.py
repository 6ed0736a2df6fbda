"""The memo of a pickle: what it has made before, by number.

`pickle` numbers what it makes without gaps. Of entries that were replayed, the memo keeps one
function that finds each of their values when it is asked for: that is rare, and a million entries
have ten million numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

# The value of a number, counted from the first one that it knows.
Find = Callable[[int], object]


class Memo:
    """Values by number; ``is_dense`` when each has had the next number, once.

    ``get`` gives the value of a number and raises IndexError when there is none; ``append``
    remembers a value under the number of values that are known. As long as nothing was replayed
    they are those of a list: most opcodes of a pickle call one of them.
    """

    append: Callable[[object], None]
    get: Find

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[Find] = []
        self._first = 0
        self._values: list[object] = []  # from number `_first` on
        # By other numbers: `pickletools.optimize` leaves gaps, a damaged pickle repeats one.
        self._others: dict[int, object] = {}
        self._behind_gaps = 0
        self.is_dense = True
        self.append, self.get = self._values.append, self._values.__getitem__

    def __len__(self) -> int:
        return self._first + len(self._values) + self._behind_gaps

    def put(self, number: int, value: object) -> None:
        """Remember a value under a number."""
        place = number - self._first
        if place == len(self._values) and not self._others:
            self.append(value)
            return
        self.is_dense = False
        if 0 <= place < len(self._values):
            self._values[place] = value
            return
        self._behind_gaps += place >= 0 and number not in self._others
        self._others[number] = value
        self.append, self.get = self._append, self._get

    def _append(self, value: object) -> None:
        self.put(len(self), value)

    def _get(self, number: int) -> object:
        if number in self._others:
            return self._others[number]
        if number < self._first:
            part = bisect_right(self._starts, number) - 1
            return self._parts[part](number - self._starts[part])
        return self._values[number - self._first]

    def skip(self, find: Find, count: int) -> None:
        """Take ``count`` values into account that ``find`` knows."""
        if self._values:
            self._keep(self._values.__getitem__, len(self._values))
        self._keep(find, count)
        self._values = []
        self.append, self.get = self._values.append, self._get

    def _keep(self, find: Find, count: int) -> None:
        self._starts.append(self._first)
        self._parts.append(find)
        self._first += count
