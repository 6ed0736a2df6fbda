"""Where a million items of a DCP directory lie, as columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np  # noqa: TID253 - only large metadata comes here

from ckpt_tools.formats.dcp.metadata import IndexRecord
from ckpt_tools.formats.dcp.storage import (
    Offsets,
    Places,
    Storage,
    StorageInfo,
    StorageKey,
    check_offsets,
)
from ckpt_tools.formats.pickle.entry_columns import UnlikeError
from ckpt_tools.formats.pickle.entry_values import Constant
from ckpt_tools.formats.pickle.memo_values import (
    Alike,
    Memo,
    RunRows,
    Sizes,
    rows_from,
    tuples_of,
)

if TYPE_CHECKING:
    from ckpt_tools.formats.pickle.entry_columns import Ints

_NONE = Constant(None)


class _Items(NamedTuple):
    """Some items: names and files as their numbers among the texts, starts and lengths in bytes."""

    names: Ints
    offsets: Sizes
    paths: Ints
    starts: Ints
    lengths: Ints


class StorageTable(Storage):
    """The items of each name are neighbours in the columns, in the order of the file."""

    __slots__ = ("_lengths", "_names", "_offsets", "_path_ids", "_paths", "_starts", "_texts")

    def __init__(self, texts: Sequence[str], items: _Items) -> None:
        self._texts = texts
        order = _grouping(items.names)
        names, offsets, paths, starts, lengths = items
        values, ndim = offsets
        if order is not None:
            names, paths, starts, lengths = (
                column[order] for column in (names, paths, starts, lengths)
            )
            values, ndim = values[order], ndim[order]
        self._path_ids = paths
        self._starts, self._lengths = starts.data, lengths.data
        self._offsets: dict[bytes, list[Offsets | None]] = {}
        self._paths: dict[bytes, tuple[str, ...]] = {}
        edges = np.flatnonzero(np.diff(names)) + 1
        bounds = [0, *edges.tolist(), len(names)] if len(names) else [0]
        self._names = {
            texts[int(names[low])]: (low, high, self._cut(values[low:high], ndim[low:high]))
            for low, high in pairwise(bounds)
        }

    def _cut(self, values: Ints, ndim: Ints) -> list[Offsets | None]:
        """The offsets of the items of one name: those of names that are cut alike are one list."""
        key = values.tobytes() + ndim.tobytes()
        known = self._offsets.get(key)
        if known is None:
            known = self._offsets[key] = tuples_of(values, ndim)
            check_offsets(known)
        return known

    @property
    def paths(self) -> set[str]:
        """The files that are named."""
        return {self._texts[number] for number in np.unique(self._path_ids).tolist()}

    def places(self, fqn: str, offsets: Sequence[Offsets]) -> Places | list[StorageInfo | None]:
        """The places of these items: columns, or one by one with None for one that has none."""
        low, high, known = self._names.get(fqn, (0, 0, []))
        if known != offsets:
            rows = dict(zip(known, range(low, high), strict=True))
            found = map(rows.get, offsets)
            return [None if row is None else self._info(row) for row in found]
        if not known:
            return []
        numbers = self._path_ids[low:high]
        key = numbers.tobytes()
        paths = self._paths.get(key)
        if paths is None:
            paths = self._paths[key] = tuple(self._texts[number] for number in numbers.tolist())
        return Places(paths, self._starts[low:high], self._lengths[low:high], ())

    def _info(self, row: int) -> StorageInfo:
        info = StorageInfo()
        info.relative_path = self._texts[int(self._path_ids[row])]
        info.offset, info.length = self._starts[row], self._lengths[row]
        info.transforms = ()
        return info

    def __getitem__(self, key: StorageKey) -> StorageInfo:
        """The place of one item."""
        low, _, offsets = self._names[key[0]]
        if key[1] not in offsets:
            raise KeyError(key)
        return self._info(low + offsets.index(key[1]))

    def __iter__(self) -> Iterator[StorageKey]:
        """Name and offsets of every item, name by name."""
        return ((fqn, at) for fqn, (_, _, offsets) in self._names.items() for at in offsets)

    def __len__(self) -> int:
        """Number of items."""
        return len(self._starts)


def _grouping(names: Ints) -> Ints | None:
    """The order in which items of one name are neighbours, None when they are."""
    if (names[1:] >= names[:-1]).all():
        return None
    return np.argsort(names, kind="stable")


def storage_of(places: Mapping[object, object], memo: Memo) -> StorageTable:
    """The items of ``storage_data``, of which some are runs of them.

    Raises UnlikeError for items that are not as torch writes them.
    """
    parts: list[_Items] = []
    singles: list[tuple[object, object]] = []
    known: dict[int, _Items] = {}
    for key, info in places.items():
        if not isinstance(key, RunRows):
            singles.append((key, info))
            continue
        if singles:
            parts.append(_singles(singles, memo))
            singles = []
        whole = known.get(id(key.alike))
        if whole is None:
            whole = known[id(key.alike)] = _placed(key.alike, memo)
        parts.append(_part(whole, slice(key.start, key.end)))
    if singles:
        parts.append(_singles(singles, memo))
    return StorageTable(memo.names, _joined(parts))


def _placed(alike: Alike, memo: Memo) -> _Items:
    """The items of all entries of one shape."""
    key = memo.record(alike, alike.values[0], IndexRecord)
    info = memo.record(alike, alike.values[1], StorageInfo)
    if info.get("transform_descriptors", _NONE) != _NONE:
        raise UnlikeError
    return _Items(
        memo.texts(alike, key["fqn"]),
        memo.sizes(alike, key.get("offset", _NONE)),
        memo.texts(alike, info["relative_path"]),
        memo.numbers(alike, info["offset"]),
        memo.numbers(alike, info["length"]),
    )


def _part(items: _Items, part: slice[int, int, None]) -> _Items:
    names, (values, ndim), paths, starts, lengths = items
    return _Items(
        names[part], Sizes(values[part], ndim[part]), paths[part], starts[part], lengths[part]
    )


def _singles(pairs: Sequence[tuple[object, object]], memo: Memo) -> _Items:
    """Items that are objects."""
    names, offsets, paths, starts, lengths = [], [], [], [], []
    for index, info in pairs:
        if type(index) is not IndexRecord or type(info) is not StorageInfo or info.transforms:
            raise UnlikeError
        names.append(memo.name(index.fqn))
        offsets.append(index.offset)
        paths.append(memo.name(info.relative_path))
        starts.append(info.offset)
        lengths.append(info.length)
    columns = (np.array(column, np.int64) for column in (names, paths, starts, lengths))
    first, second, third, fourth = columns
    return _Items(first, rows_from(offsets), second, third, fourth)


def _joined(parts: Sequence[_Items]) -> _Items:
    """All of these items, offsets as wide as the widest."""
    if not parts:
        raise UnlikeError
    names, offsets, paths, starts, lengths = zip(*parts, strict=True)
    width = max(values.shape[1] for values, _ in offsets)
    values = np.zeros((sum(map(len, names)), width), np.int64)
    at = 0
    for rows, _ in offsets:
        values[at : at + len(rows), : rows.shape[1]] = rows
        at += len(rows)
    ndim = np.concatenate([ndim for _, ndim in offsets])
    return _Items(
        np.concatenate(names),
        Sizes(values, ndim),
        np.concatenate(paths),
        np.concatenate(starts),
        np.concatenate(lengths),
    )
