"""Where the items of a DCP directory lie, by name: what ``storage_data`` of ``.metadata`` says.

A file can name a million items, so they are kept as columns. It opens no file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.pickle.torch_stubs import StandIn, shown
from ckpt_tools.storage.paths import inside

Offsets = tuple[int, ...]
StorageKey = tuple[str, Offsets | None]


class StorageInfo(StandIn):
    """Where an item lies: ``length`` bytes at ``offset`` of the file ``relative_path``.

    ``transforms`` name what was done to the bytes, such as ``stream.zstd/1``; empty for nothing.
    """

    __slots__ = ("length", "offset", "relative_path", "transforms")

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]

    def __setstate__(self, state: object) -> None:
        """Take the place, and check it here, where no second pass over a million is needed."""
        if type(state) is not dict:
            raise TypeError("a storage info without a state")
        path, offset, length = state["relative_path"], state["offset"], state["length"]
        if type(path) is not str or type(offset) is not int or type(length) is not int:
            raise TypeError("a storage info without path, offset or length")
        if offset < 0 or length < 0:
            raise ValueError("a storage info with a negative offset or length")
        self.relative_path = inside(path) if "/" in path else path
        self.offset = offset
        self.length = length
        transforms = state.get("transform_descriptors") if len(state) > 3 else None
        self.transforms = _transforms(transforms) if transforms else ()
        state.clear()


class Places(NamedTuple):
    """Where some items lie that have the same transforms: a column each, in bytes."""

    paths: tuple[str, ...]
    starts: Sequence[int]
    lengths: Sequence[int]
    transforms: tuple[str, ...]


class Storage(Mapping[StorageKey, StorageInfo]):
    """Where every item lies, by its name and offsets; those of an object are None."""

    __slots__ = ()

    @property
    @abstractmethod
    def paths(self) -> set[str]:
        """The files that are named."""

    @abstractmethod
    def places(self, fqn: str, offsets: Sequence[Offsets]) -> Places | list[StorageInfo | None]:
        """The places of these items: columns, or one by one with None for one that has none."""


class StorageLists(Storage):
    """Two lists of each name: the offsets and the places of its items.

    Raises UnreadableError when an item is placed twice, or at offsets that are none.
    """

    __slots__ = ("_by_name",)

    def __init__(self, items: Iterable[tuple[str, Offsets | None, StorageInfo]]) -> None:
        self._by_name: dict[str, tuple[list[Offsets | None], list[StorageInfo]]] = {}
        by_name = self._by_name
        for fqn, offset, info in items:
            columns = by_name.get(fqn)
            if columns is None:
                columns = by_name[fqn] = [], []
            columns[0].append(offset)
            columns[1].append(info)
        last: list[Offsets | None] = []
        for offsets, _ in by_name.values():
            if offsets != last:
                check_offsets(offsets)
                last = offsets

    @property
    def paths(self) -> set[str]:
        """The files that are named."""
        infos = chain.from_iterable(infos for _, infos in self._by_name.values())
        return set(map(_relative_path, infos))

    def places(self, fqn: str, offsets: Sequence[Offsets]) -> Places | list[StorageInfo | None]:
        """The places of these items: columns, or one by one with None for one that has none."""
        known, infos = self._by_name.get(fqn, ([], []))
        if known != offsets:
            return list(map(dict(zip(known, infos, strict=True)).get, offsets))
        transforms = set(map(_transforms_of, infos))
        if len(transforms) != 1:
            return [*infos]
        paths = tuple(map(_relative_path, infos))
        return Places(paths, list(map(_start, infos)), list(map(_length, infos)), transforms.pop())

    def __getitem__(self, key: StorageKey) -> StorageInfo:
        """The place of one item."""
        offsets, infos = self._by_name[key[0]]
        if key[1] not in offsets:
            raise KeyError(key)
        return infos[offsets.index(key[1])]

    def __iter__(self) -> Iterator[StorageKey]:
        """Name and offsets of every item, name by name."""
        return ((fqn, at) for fqn, (offsets, _) in self._by_name.items() for at in offsets)

    def __len__(self) -> int:
        """Number of items."""
        return sum(len(offsets) for offsets, _ in self._by_name.values())


_relative_path = attrgetter("relative_path")
_transforms_of = attrgetter("transforms")
_start = attrgetter("offset")
_length = attrgetter("length")


def check_offsets(offsets: Sequence[Offsets | None]) -> None:
    """Check the offsets of the items of one name: counts, and none twice."""
    if not set(map(type, chain.from_iterable(at for at in offsets if at))) <= {int}:
        raise UnreadableError("places items in a way that is not torch's.")
    if len(set(offsets)) < len(offsets):
        raise UnreadableError("places one item twice.")


def _transforms(value: object) -> tuple[str, ...]:
    if not isinstance(value, tuple | list) or not 0 < len(value) <= 16:
        raise TypeError("transform descriptors that are no short list")
    return tuple(str(item) if type(item) is str else shown(item) for item in value)
