"""Columns of texts and of sizes of entries of one shape, references followed.

A reference of an entry is to what another entry remembers, of the same shape or of another, or to
what the rest of the pickle does. All are followed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np  # noqa: TID253 - only large metadata comes here

from ckpt_tools.formats.pickle.condensed import Condensed
from ckpt_tools.formats.pickle.entry_columns import Columns, UnlikeError
from ckpt_tools.formats.pickle.entry_values import (
    Call,
    Constant,
    Filled,
    Fixed,
    Items,
    Node,
    Number,
    Record,
    Reference,
    Text,
    values_of,
)
from ckpt_tools.formats.pickle.guard_shapes import Run
from ckpt_tools.formats.pickle.torch_stubs import StandIn

if TYPE_CHECKING:
    from ckpt_tools.formats.pickle.entry_columns import Ints


class Sizes(NamedTuple):
    """Tuples of numbers, one in each row, padded with zeros; ``ndim`` is -1 for None."""

    values: Ints
    ndim: Ints


class Alike:
    """All entries of one shape: their columns, and the values that each leaves and remembers."""

    def __init__(self, data: bytes, runs: Sequence[Run]) -> None:
        self.columns = Columns(data, runs)
        self.values, self.memo = values_of(self.columns.tokens)
        self.rows = sum(run.entries for run in runs)
        self.texts: dict[int, Ints] = {}


class RunRows(StandIn):
    """The entries of one run: rows ``start`` to ``end`` of their shape."""

    __slots__ = ("alike", "end", "start")

    def __init__(self, alike: Alike, start: int, end: int) -> None:
        self.alike = alike
        self.start = start
        self.end = end


def rows_of(data: bytes, runs: Sequence[Run]) -> list[RunRows]:
    """The entries of each run. Raises UnlikeError where they cannot be told apart."""
    by_shape: dict[bytes, list[Run]] = {}
    for run in runs:
        by_shape.setdefault(run.shape, []).append(run)
    alike = {shape: Alike(data, those) for shape, those in by_shape.items()}
    ends = dict.fromkeys(by_shape, 0)
    rows = []
    for run in runs:
        start = ends[run.shape]
        ends[run.shape] = start + run.entries
        rows.append(RunRows(alike[run.shape], start, start + run.entries))
    return rows


class Memo:
    """The memo of a whole pickle: of the rest, by the unpickler, and of the entries of the runs.

    ``size`` is what makes a torch.Size of a tuple. All raise UnlikeError for values that are not of
    the kind that was asked for.
    """

    def __init__(
        self, runs: Sequence[Run], rows: Sequence[RunRows], condensed: Condensed, size: object
    ) -> None:
        self.names: list[str] = []
        self._ids: dict[str, int] = {}
        self._runs = runs
        self._rows = rows
        self._condensed = condensed
        self._size = size
        self._assumed: dict[tuple[int, int], tuple[Alike, Node]] = {}
        self._rest: Mapping[int, object] = {}
        self._is_complete = False

    def persistent(self, pid: object) -> object:
        """What stands for a run, or a value that an entry of one remembers."""
        if type(pid) is not int:
            raise UnlikeError
        return self._rows[pid] if pid >= 0 else self._value(self._condensed.wanted[-1 - pid])

    def complete(self, rest: Mapping[int, object]) -> None:
        """Take the memo of the unpickler; what was taken for a torch.Size must be one."""
        self._rest = rest
        self._is_complete = True
        for alike, function in self._assumed.values():
            self._check_size(alike, function)

    def _check_size(self, alike: Alike, function: Node) -> None:
        if self.constant(alike, function) is not self._size:
            raise UnlikeError

    def _value(self, memo: int) -> object:
        """One value that an entry remembers: a text or a size."""
        number = self._condensed.run_of(memo)
        if number is None:
            raise UnlikeError
        run, rows = self._runs[number], self._rows[number]
        entry, slot = divmod(memo - run.memo, run.memos)
        alike, row = rows.alike, rows.start + entry
        node = alike.memo[slot]
        if isinstance(node, Text):
            return alike.columns.text(node.token, row)
        if not isinstance(node, Call):
            raise UnlikeError
        if (id(alike), slot) not in self._assumed:
            self._assumed[id(alike), slot] = alike, node.function
            if self._is_complete:
                self._check_size(alike, node.function)
        return tuple(int(alike.columns[token].values[row]) for token in _numbers(node))

    def constant(self, alike: Alike, node: Node) -> object:
        """A value that is the same in all entries."""
        if isinstance(node, Constant):
            return node.value
        if isinstance(node, Fixed):
            return self._lookup(node.memo)
        if isinstance(node, Items):
            return tuple(self.constant(alike, item) for item in node.items)
        if isinstance(node, Number | Reference):
            column = alike.columns[node.token].values
            if column.min() != column.max():
                raise UnlikeError
            first = int(column[0])
            return first if isinstance(node, Number) else self._lookup(first)
        return self._made(alike, node)

    def _made(self, alike: Alike, node: Node) -> object:
        if isinstance(node, Call):
            function = self.constant(alike, node.function)
            arguments = self.constant(alike, node.arguments)
            if callable(function) and isinstance(arguments, tuple):
                return function(*arguments)
        elif isinstance(node, Record) and node.state is not None:
            kind = self.constant(alike, node.kind)
            if isinstance(kind, type) and issubclass(kind, StandIn):
                made = kind()
                made.__setstate__(self.constant(alike, node.state))
                return made
        raise UnlikeError

    def _lookup(self, memo: int) -> object:
        if self._condensed.run_of(memo) is not None:
            return self._value(memo)
        return self._rest[self._condensed.number(memo)]

    def record(self, alike: Alike, node: Node, kind: type) -> dict[object, Node]:
        """The state of an object of this class, by its keys."""
        if not isinstance(node, Record) or self.constant(alike, node.kind) is not kind:
            raise UnlikeError
        state = node.state
        if not isinstance(state, Filled) or not state.is_dict:
            raise UnlikeError
        keys = [self.constant(alike, key) for key in state.items[::2]]
        return dict(zip(keys, state.items[1::2], strict=True))

    def numbers(self, alike: Alike, node: Node | None) -> Ints:
        """A column of numbers."""
        if not isinstance(node, Number):
            raise UnlikeError
        return alike.columns[node.token].values

    def name(self, text: object) -> int:
        """The number of a text among ``names``."""
        if type(text) is not str:
            raise UnlikeError
        number = self._ids.setdefault(text, len(self._ids))
        if number == len(self.names):
            self.names.append(text)
        return number

    def texts(self, alike: Alike, node: Node | None) -> Ints:
        """A column of texts, as their numbers among ``names``."""
        if isinstance(node, Fixed):
            return np.broadcast_to(np.int64(self.name(self._lookup(node.memo))), alike.rows)
        if not isinstance(node, Text | Reference):
            raise UnlikeError
        column = alike.texts.get(node.token)
        if column is None:
            if isinstance(node, Text):
                column = self._own_texts(alike, node)
            else:
                references = alike.columns[node.token].values
                column = self._followed(references, self.name, self.texts)
            alike.texts[node.token] = column
        return column

    def _own_texts(self, alike: Alike, node: Text) -> Ints:
        starts, lengths = alike.columns[node.token]
        if lengths is None:
            raise UnlikeError
        data, name = alike.columns.data, self.name
        ends = (starts + lengths).tolist()
        words = [data[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
        known = {word: name(word.decode("utf-8")) for word in dict.fromkeys(words)}
        return np.fromiter(map(known.__getitem__, words), np.int64, len(words))

    def sizes(self, alike: Alike, node: Node | None) -> Sizes:
        """A column of sizes, or of None."""
        if isinstance(node, Constant | Fixed):
            values, ndim = rows_from([self.constant(alike, node)])
            values = np.broadcast_to(values, (alike.rows, values.shape[1]))
            return Sizes(values, np.broadcast_to(ndim, alike.rows))
        if isinstance(node, Reference):
            return self._followed_sizes(alike.columns[node.token].values)
        if not isinstance(node, Call):
            raise UnlikeError
        self._check_size(alike, node.function)
        columns = [alike.columns[token].values for token in _numbers(node)]
        values = np.column_stack(columns) if columns else np.empty((alike.rows, 0), np.int64)
        return Sizes(values, np.full(alike.rows, len(columns)))

    def _followed_sizes(self, references: Ints) -> Sizes:
        """The sizes that these references are to: each that is referred to is looked at once."""
        table: list[object] = []

        def one(value: object) -> int:
            table.append(value)
            return len(table) - 1

        def many(alike: Alike, node: Node | None) -> Ints:
            values, ndim = self.sizes(alike, node)
            start = len(table)
            table.extend(tuples_of(values, ndim))
            return np.arange(start, len(table))

        column = self._followed(references, one, many)
        values, ndim = rows_from(table)
        return Sizes(values[column], ndim[column])

    def _followed(
        self,
        references: Ints,
        one: Callable[[object], int],
        many: Callable[[Alike, Node | None], Ints],
    ) -> Ints:
        """What these references are to: ``one`` value of the rest, ``many`` those of a shape."""
        unique, inverse = _unique(references)
        found = np.empty(len(unique), np.int64)
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        shapes: dict[int, Alike] = {}
        for place, memo in enumerate(unique.tolist()):
            number = self._condensed.run_of(memo)
            if number is None:
                found[place] = one(self._rest[self._condensed.number(memo)])
                continue
            run, rows = self._runs[number], self._rows[number]
            entry, slot = divmod(memo - run.memo, run.memos)
            shapes[id(rows.alike)] = rows.alike
            groups.setdefault((id(rows.alike), slot), []).append((place, rows.start + entry))
        for (shape, slot), pairs in groups.items():
            places, entries = zip(*pairs, strict=True)
            column = many(shapes[shape], shapes[shape].memo[slot])
            found[list(places)] = column[list(entries)]
        return found[inverse]


def _unique(column: Ints) -> tuple[Ints, Ints]:
    """The values of a column, sorted, and which of them each is; neighbours are often the same."""
    edges = np.flatnonzero(column[1:] != column[:-1]) + 1
    firsts = np.concatenate(([0], edges))
    unique, inverse = np.unique(column[firsts], return_inverse=True)
    return unique, np.repeat(inverse, np.diff(np.append(firsts, len(column))))


def _numbers(node: Call) -> list[int]:
    """The tokens of the numbers in a call with one tuple of numbers."""
    arguments = node.arguments
    if not isinstance(arguments, Items) or len(arguments.items) != 1:
        raise UnlikeError
    inner = arguments.items[0]
    if not isinstance(inner, Items):
        raise UnlikeError
    tokens = [item.token for item in inner.items if isinstance(item, Number)]
    if len(tokens) != len(inner.items):
        raise UnlikeError
    return tokens


def rows_from(table: Sequence[object]) -> Sizes:
    """These tuples as rows. They may be from anywhere, so each number is looked at."""
    width = 0
    for item in table:
        if item is not None:
            if type(item) is not tuple or len(item) > 64 or not set(map(type, item)) <= {int}:
                raise UnlikeError
            width = max(width, len(item))
    values = np.zeros((len(table), width), np.int64)
    ndim = np.full(len(table), -1)
    for row, item in enumerate(table):
        if isinstance(item, tuple):
            if item and min(item) < 0:
                raise UnlikeError
            values[row, : len(item)] = item
            ndim[row] = len(item)
    return Sizes(values, ndim)


def tuples_of(values: Ints, ndim: Ints) -> list[tuple[int, ...] | None]:
    """The tuples of some rows."""
    width = values.shape[1]
    if (ndim == width).all():
        return list(map(tuple, values.tolist()))
    return [
        tuple(row[:size]) if size >= 0 else None
        for row, size in zip(values.tolist(), ndim.tolist(), strict=True)
    ]
