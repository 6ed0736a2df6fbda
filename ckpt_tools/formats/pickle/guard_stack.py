"""The stack and the memo of a pickle, as weights: what the walk over its opcodes keeps.

It knows how much a value costs to hash and how many objects there are, and nothing of opcodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle.guard_shapes import MAX_SHAPE, Shape, shape_of

# Weights: 0 costs nothing to hash, `HEAVY` too much. A tuple weighs what it holds, item by item.
HEAVY = 250
_UNSET = 255
# torch numbers the memo without gaps; pickletools.optimize and old writers leave small ones.
_MAX_MEMO_GAP = 1 << 16
_MAX_TUPLE_KEYS = 5000
# Empty containers cost one byte each, and 60 to 220 in memory.
_FREE_OBJECTS = 200_000
_BYTES_PER_OBJECT = 4
# Compiling a shape takes as long as walking about 20 KB without it.
_SHAPES_FROM = 1 << 20


class _Boundary(NamedTuple):
    """The state at the end of the last entry of a batch."""

    height: int
    at: int
    memo: int
    objects: int


class Walk:
    """The stack and the memo of weights at one point of a pickle."""

    __slots__ = (
        "_boundaries",
        "_credit",
        "_known",
        "_shapes",
        "_tuple_keys",
        "data",
        "marks",
        "memo",
        "objects",
        "stack",
    )

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo = bytearray()
        self.objects = 0
        self._known = 0
        self._tuple_keys = 0
        self._boundaries: list[_Boundary] = []
        self._shapes: dict[bytes, Shape | None] = {}
        # How often an entry may still turn out to be unlike the next one.
        self._credit = 1000

    def mark(self, at: int) -> None:
        """Begin a batch."""
        self.marks.append(len(self.stack))
        self._boundaries.append(_Boundary(len(self.stack), at, len(self.memo), self.objects))

    def above_mark(self) -> list[int]:
        """The items since the last mark, which are taken off the stack."""
        self._boundaries.pop()
        height = self.marks.pop()
        items = self.stack[height:]
        del self.stack[height:]
        return items

    def take(self, count: int) -> None:
        """Take items off the stack."""
        if count > len(self.stack):
            raise IndexError
        del self.stack[len(self.stack) - count :]

    def count_object(self) -> None:
        """One more container or object; a pickle can have so many for its length."""
        self.objects += 1
        if self.objects > _FREE_OBJECTS + len(self.data) // _BYTES_PER_OBJECT:
            raise UnreadableError(
                f"is hostile: {self.objects:,} objects in {len(self.data):,} bytes."
            )

    def push_tuple(self, items: Sequence[int]) -> None:
        """Push a tuple of items of these weights."""
        self.stack.append(min(HEAVY, 1 + len(items) + sum(items)))

    def check_keys(self, keys: Sequence[int]) -> None:
        """Check that values of these weights may be hashed."""
        if not any(keys):
            return
        self._tuple_keys += sum(1 for weight in keys if weight)
        if max(keys) >= HEAVY or self._tuple_keys > _MAX_TUPLE_KEYS:
            raise UnreadableError("is hostile: its dicts have keys that take too long to compare.")

    def memoize(self) -> None:
        """Remember the top of the stack under the next free number."""
        self._put(self._known, self.stack[-1])

    def put(self, index: int) -> None:
        """Remember the top of the stack under a number."""
        if index > self._known + _MAX_MEMO_GAP:
            raise UnreadableError(f"is hostile: a memo of {index:,} for {self._known:,} values.")
        self._put(index, self.stack[-1])

    def _put(self, index: int, weight: int) -> None:
        missing = index + 1 - len(self.memo)
        if missing > 0:
            self.memo.extend(bytes((_UNSET,)) * missing)
        if self.memo[index] == _UNSET:
            self._known += 1
        self.memo[index] = weight

    def get(self, index: int) -> None:
        """Push what is remembered under a number."""
        weight = self.memo[index]
        if weight == _UNSET:
            raise IndexError
        self.stack.append(weight)

    def skip_entries(self, at: int) -> int:
        """After an object was filled: skip what follows and has the shape of the last two objects.

        These are two chunks of a list, or a key and its value.
        """
        if len(self.data) < _SHAPES_FROM or not self._boundaries or self._credit <= 0:
            return at
        last = self._boundaries[-1]
        if len(self.stack) != last.height + 2:
            return at
        entry = self.data[last.at : at] if at - last.at <= MAX_SHAPE else b""
        if entry and self._known == len(self.memo):
            at = self._skip(entry, last, at)
        self._boundaries[-1] = _Boundary(len(self.stack), at, len(self.memo), self.objects)
        return at

    def _skip(self, entry: bytes, last: _Boundary, at: int) -> int:
        shape = shape_of(entry, self._shapes)
        end, count = shape.run(self.data, at) if shape else (at, 0)
        self._credit += count or -1
        self.stack.extend(self.stack[last.height :] * count)
        self.memo.extend(self.memo[last.memo :] * count)
        self._known = len(self.memo)
        self.objects += (self.objects - last.objects) * count
        return end
