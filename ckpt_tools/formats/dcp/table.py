"""Large `.metadata` read by columns: entries that are alike are never made into objects.

It gives what `dcp_metadata.metadata_of` gives, or says that it cannot, so that the file is read
entry by entry. Only what it takes for well-formed is its business, errors are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - only large metadata comes here

from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.dcp import metadata as dcp
from ckpt_tools.formats.dcp.storage import Offsets
from ckpt_tools.formats.dcp.storage_table import storage_of
from ckpt_tools.formats.pickle.condensed import Condensed
from ckpt_tools.formats.pickle.containers import as_name
from ckpt_tools.formats.pickle.entry_columns import UnlikeError
from ckpt_tools.formats.pickle.entry_values import Filled, Node
from ckpt_tools.formats.pickle.guard_shapes import Run
from ckpt_tools.formats.pickle.memo_values import (
    Alike,
    Memo,
    RunRows,
    Sizes,
    rows_from,
    rows_of,
)
from ckpt_tools.formats.pickle.unpickler import DAMAGE, Resolve, load_with_memo

if TYPE_CHECKING:
    from ckpt_tools.formats.pickle.entry_columns import Ints


def load_table(data: bytes, end: int, runs: Sequence[Run], resolve: Resolve) -> dcp.Metadata | None:
    """The metadata that a pickle of ``end`` bytes holds, which was walked and has these runs.

    None when it is not as torch writes it, for whatever reason.
    """
    try:
        rows = rows_of(data, runs)
        condensed = Condensed(data, end, runs)
        memo = Memo(runs, rows, condensed, dcp.SIZE)
        value, rest = load_with_memo(condensed.data, resolve, memo.persistent)
        memo.complete(rest)
        return _metadata(value, memo)
    except (UnlikeError, CheckpointError, *DAMAGE):
        return None


def _metadata(value: object, memo: Memo) -> dcp.Metadata:
    state = dcp.state_of(value)
    entries, places = state.get("state_dict_metadata"), state.get("storage_data")
    if type(entries) is not dict or type(places) is not dict:
        raise UnlikeError
    table = _Tensors(memo)
    for fqn, entry in entries.items():
        table.add(fqn, entry)
    return dcp.metadata_with(state, table.tensors, table.objects, storage_of(places, memo))


class _Tensors:
    """The tensors and objects of ``state_dict_metadata``, entries and runs of them in turn."""

    def __init__(self, memo: Memo) -> None:
        self.tensors: dict[str, dcp.TensorMeta] = {}
        self.objects: list[str] = []
        self._memo = memo
        self._cuts = dcp.Cuts()
        self._known: dict[tuple[Offsets, bytes, bytes], list[dcp.Row]] = {}
        # By the identity of what the memo keeps.
        self._boxes: dict[int, tuple[Sizes, Sizes]] = {}
        self._wide: dict[int, tuple[Ints, object, Sizes]] = {}

    def add(self, fqn: object, entry: object) -> None:
        """Take one entry, or a run of them."""
        if isinstance(fqn, RunRows):
            self._add_run(fqn)
            return
        name = as_name(fqn)
        if not isinstance(entry, dcp.TensorRecord):
            self.objects.append(dcp.object_name(name, entry))
            return
        dtype, shape, chunks = dcp.tensor_parts(name, entry)
        are_runs = any(type(chunk) is RunRows for chunk in chunks)
        rows = (self._mixed if are_runs else self._cuts.rows)(name, shape, chunks)
        self.tensors[name] = dcp.TensorMeta(dtype, shape, rows)

    def _mixed(self, fqn: str, shape: Offsets, chunks: Sequence[object]) -> list[dcp.Row]:
        """The chunks of a list of which some are runs; a run takes two places."""
        parts = [self._part(chunk) for chunk in _single(chunks)]
        ndim = len(shape)
        if any((side.ndim != ndim).any() for part in parts for side in part):
            raise UnlikeError
        offsets = np.concatenate([part[0].values[:, :ndim] for part in parts])
        sizes = np.concatenate([part[1].values[:, :ndim] for part in parts])
        key = shape, offsets.tobytes(), sizes.tobytes()
        known = self._known.get(key)
        if known is None:
            first, second = (list(map(tuple, side.tolist())) for side in (offsets, sizes))
            known = self._known[key] = dcp.checked_rows(fqn, shape, first, second)
        return known

    def _part(self, chunk: object) -> tuple[Sizes, Sizes]:
        """Offsets and sizes of one chunk, or of the chunks of a run, of which each entry is two."""
        if isinstance(chunk, dcp.ChunkRecord):
            return rows_from([chunk.offsets]), rows_from([chunk.sizes])
        if not isinstance(chunk, RunRows):
            raise UnlikeError
        alike, part = chunk.alike, slice(2 * chunk.start, 2 * chunk.end)
        known = self._boxes.get(id(alike))
        if known is None:
            pairs = [self._box(alike, node) for node in alike.values]
            offsets, sizes = (_interleaved(side) for side in zip(*pairs, strict=True))
            known = self._boxes[id(alike)] = offsets, sizes
        first, second = (Sizes(side.values[part], side.ndim[part]) for side in known)
        return first, second

    def _box(self, alike: Alike, node: Node) -> tuple[Sizes, Sizes]:
        state = self._memo.record(alike, node, dcp.ChunkRecord)
        sides = [self._memo.sizes(alike, state.get(key)) for key in ("offsets", "sizes")]
        return sides[0], sides[1]

    def _add_run(self, run: RunRows) -> None:
        """Take tensors whose chunks are all inside of their entries."""
        alike = run.alike
        known = self._wide.get(id(alike))
        if known is None:
            known = self._wide[id(alike)] = self._wide_rows(alike)
        names, properties, wide = known
        part = slice(run.start, run.end)
        values, ndim = wide.values[part], wide.ndim[part]
        rows: dict[bytes, tuple[str, Offsets, Sequence[dcp.Row]]] = {}
        texts = map(self._memo.names.__getitem__, names[part].tolist())
        for row, name in enumerate(texts):
            key = values[row].tobytes() + ndim[row].tobytes()
            found = rows.get(key)
            if found is None:
                shape, *boxes = _tuples(values[row], ndim[row])
                chunks = dcp.checked_rows(name, shape, boxes[::2], boxes[1::2])
                found = rows[key] = dcp.dtype_of(name, properties), shape, chunks
            self.tensors[as_name(name)] = dcp.TensorMeta(*found)

    def _wide_rows(self, alike: Alike) -> tuple[Ints, object, Sizes]:
        """Names, properties, and in one row the shape, and offsets and sizes of each chunk."""
        memo = self._memo
        state = memo.record(alike, alike.values[1], dcp.TensorRecord)
        chunks = state.get("chunks")
        if not isinstance(chunks, Filled) or chunks.is_dict:
            raise UnlikeError
        sides = [memo.sizes(alike, state.get("size"))]
        for node in chunks.items:
            sides += self._box(alike, node)
        properties = memo.constant(alike, state["properties"])
        return memo.texts(alike, alike.values[0]), properties, _stacked(sides)


def _stacked(sides: Sequence[Sizes]) -> Sizes:
    """Several columns side by side, the tuples of a row in turn."""
    width = max(side.values.shape[1] for side in sides)
    values = np.zeros((len(sides[0].values), len(sides), width), np.int64)
    for place, side in enumerate(sides):
        values[:, place, : side.values.shape[1]] = side.values
    return Sizes(values, np.stack([side.ndim for side in sides], axis=1))


def _interleaved(sides: Sequence[Sizes]) -> Sizes:
    """The rows of several columns in turn, as rows."""
    values, ndim = _stacked(sides)
    return Sizes(values.reshape(-1, values.shape[2]), ndim.reshape(-1))


def _tuples(values: Ints, ndim: Ints) -> list[Offsets]:
    """The tuples of one row, of which none may be None."""
    if ndim.min() < 0:
        raise UnlikeError
    return [tuple(row[:size]) for row, size in zip(values.tolist(), ndim.tolist(), strict=True)]


def _single(chunks: Sequence[object]) -> Iterator[object]:
    """The chunks of a list, and its runs once each."""
    items = iter(chunks)
    for chunk in items:
        yield chunk
        if isinstance(chunk, RunRows) and next(items, None) is not chunk:
            raise UnlikeError
