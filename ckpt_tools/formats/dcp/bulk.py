"""Many items at once: a million items that are like one that was read take no Python step each.

It compares the bytes that `dcp_templates` compares, for all items in a block of a file together.
What it cannot tell is left to whoever looks at items one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np  # noqa: TID253 - only a checkpoint of many items comes here

from ckpt_tools.core.index import Grid, TensorEntry
from ckpt_tools.formats.dcp.chunks import StoredChunks
from ckpt_tools.formats.dcp.templates import Found, Template, Templates
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Octets = npt.NDArray[np.uint8]

_BLOCK = 8 << 20
# Whole items are read, of which those who look at one read the first and last two KiB.
_MAX_ITEM = 16 << 10
_MAX_GAP = 64 << 10
_MAX_LENGTHS = 256

Learn = Callable[[int, int], None]


class _Items(NamedTuple):
    """Items in the order of the tensors: number of the file, start and length in bytes."""

    files: Ints
    starts: Ints
    lengths: Ints


class Bulk:
    """The tensors of which all items are like some that were read.

    ``entries`` have StoredChunks, ``sizes`` are those of the files. ``learn`` reads one item, by
    the numbers of its tensor and chunk,
    so that ``templates`` knows it; whatever it raises is raised.
    """

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        files: Files,
        sizes: Mapping[str, int],
        templates: Templates,
        learn: Learn,
    ) -> None:
        self._entries = entries
        self._files = files
        self._sizes = sizes
        self._templates = templates
        self._learn = learn
        self._paths: list[str] = []
        self._founds: list[Found] = []
        self._numbers: dict[int, int] = {}
        chunks = [entry.chunks for entry in entries if isinstance(entry.chunks, StoredChunks)]
        self._bounds = np.concatenate(([0], np.cumsum([len(those) for those in chunks])))
        self._items = _Items(
            self._file_numbers([those.grid for those in chunks]),
            np.concatenate([np.asarray(those.starts, np.int64) for those in chunks]),
            np.concatenate([np.asarray(those.lengths, np.int64) for those in chunks]),
        )
        self._which = np.full(len(self._items.starts), -1)
        self._checked: dict[tuple[int, str, bytes], Sequence[int] | None] = {}

    def _file_numbers(self, grids: Sequence[Grid]) -> Ints:
        """The file of every item, as its number among the paths."""
        numbers: dict[str, int] = {}
        known = {id(grid): grid for grid in grids}
        columns = {
            key: np.array([numbers.setdefault(path, len(numbers)) for path in grid.paths])
            for key, grid in known.items()
        }
        self._paths = list(numbers)
        return np.concatenate([columns[id(grid)] for grid in grids])

    def resolved(self) -> Iterator[StoredChunks | None]:
        """The raw chunks of each tensor; None for one that is to be looked at item by item."""
        files, starts, lengths = self._items
        order = np.lexsort((starts, files))
        order = order[lengths[order] <= _MAX_ITEM]
        edges = np.flatnonzero(np.diff(files[order])) + 1
        for rows in np.split(order, edges):
            if len(rows):
                self._look_at(self._paths[int(files[rows[0]])], rows)
        offsets = np.array([found.offset for found in self._founds] or [0])
        at = (starts + offsets[self._which]).data  # meaningless for an item that is not known
        bounds = self._bounds.tolist()
        for entry, low, high in zip(self._entries, bounds, bounds[1:], strict=False):
            yield self._raw(entry, at[low:high], self._which[low:high])

    def _look_at(self, path: str, rows: Ints) -> None:
        """Look at items of one file, in the order in which they lie there."""
        starts, lengths = self._items.starts[rows], self._items.lengths[rows]
        ends = np.maximum.accumulate(starts + lengths)
        gaps = np.append(np.flatnonzero(starts[1:] - ends[:-1] > _MAX_GAP) + 1, len(rows))
        size = self._sizes.get(path, 0)
        at = 0
        while at < len(rows):
            start = int(starts[at])
            last = int(gaps[np.searchsorted(gaps, at, side="right")])
            after = max(at + 1, int(np.searchsorted(ends, start + _BLOCK, side="right")))
            after = min(after, last)
            end = int(ends[after - 1])
            if end > size:
                return
            self._compare(self._files.read(path, start, end - start), start, rows[at:after])
            at = after

    def _compare(self, block: bytes, start: int, rows: Ints) -> None:
        """Compare the items that lie in a block with those of their length that were read."""
        lengths = self._items.lengths[rows]
        different = np.unique(lengths).tolist()
        for length in different if len(different) <= _MAX_LENGTHS else ():
            those = rows[lengths == length]
            tried = 0
            while len(those):
                if tried == len(self._templates.of_length(length)):
                    self._learn_one(int(those[0]))
                if tried == len(self._templates.of_length(length)):
                    break  # it is like none, and nothing is known by it
                template = self._templates.of_length(length)[tried]
                tried += 1
                is_like = _are_like(block, self._items.starts[those] - start, template)
                self._which[those[is_like]] = self._number(template.found)
                those = those[~is_like]

    def _learn_one(self, row: int) -> None:
        tensor = int(np.searchsorted(self._bounds, row, side="right")) - 1
        self._learn(tensor, row - int(self._bounds[tensor]))

    def _number(self, found: Found) -> int:
        number = self._numbers.setdefault(id(found), len(self._founds))
        if number == len(self._founds):
            self._founds.append(found)
        return number

    def _raw(self, entry: TensorEntry, starts: Sequence[int], which: Ints) -> StoredChunks | None:
        grid = entry.grid
        if grid is None:
            return None
        key = id(grid), entry.dtype.name, which.tobytes()
        if key not in self._checked:
            founds = [self._founds[number] for number in which.tolist() if number >= 0]
            fits = len(founds) == len(which) and _fit(entry, grid, founds)
            raw = np.array([found.length for found in founds])
            self._checked[key] = raw.data if fits and len(which) else None
        lengths = self._checked[key]
        return None if lengths is None else StoredChunks(grid, starts, lengths, None)


def _fit(entry: TensorEntry, grid: Grid, founds: Sequence[Found]) -> bool:
    """Whether items that say this of themselves are these chunks, packed and with no sign."""
    return all(
        found.stored.dtype == entry.dtype.name
        and found.stored.shape == box.sizes
        and found.stored.sign is None
        and found.strides is None
        for found, box in zip(founds, grid.boxes, strict=True)
    )


def _are_like(block: bytes, places: Ints, template: Template) -> npt.NDArray[np.bool_]:
    """Whether the items at these places of a block have all the bytes of a template."""
    is_like = np.ones(len(places), np.bool_)
    parts = [(0, template.head), *((template.tail_at + at, data) for at, data in template.parts)]
    for at, data in parts:
        if data:
            is_like &= _begin_with(block, places + at, data)
    return is_like


def _begin_with(block: bytes, places: Ints, data: bytes) -> npt.NDArray[np.bool_]:
    width = len(data)
    if len(block) < width:
        return np.zeros(len(places), np.bool_)
    views = np.ndarray((len(block) - width + 1,), f"V{width}", block, strides=(1,))
    taken = views[places].view(np.uint8).reshape(-1, width)
    equal: npt.NDArray[np.bool_] = (taken == np.frombuffer(data, np.uint8)).all(axis=1)
    return equal
