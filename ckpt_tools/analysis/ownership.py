"""Who holds which box of every tensor, before and after a reshard: what pictures are drawn from.

Where a layout is known it says what each rank holds, replicas included; elsewhere it is who saved
each box, and for formats without ranks which file has it. It opens no file and draws nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpt_tools.analysis.infer_mesh import FoundMesh, Status
from ckpt_tools.analysis.summary import layout_of, placement_names
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.layout import Layout, Mesh, on_mesh

Unit = Literal["rank", "file"]


class HeldBox(NamedTuple):
    """A box, the numbers of its holders, and that of its file (None for a target)."""

    box: Box
    holders: tuple[int, ...]
    file: int | None = None


class HeldTensor(NamedTuple):
    """One tensor in pieces; tensors with the same cut and holders share the same ``pieces``.

    ``placements`` are torch's words, empty where nothing tells them.
    """

    fqn: str
    dtype: DType
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    pieces: tuple[HeldBox, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Holdings:
    """Every tensor of a checkpoint with its holders, which are ranks, or files by their numbers.

    ``missing`` are the numbers of files that are not there.
    """

    unit: Unit
    holders: int
    mesh: Mesh | None
    status: Status | None
    files: tuple[str, ...]
    tensors: tuple[HeldTensor, ...]
    missing: frozenset[int] = frozenset()


def holdings_of(index: CheckpointIndex, known_mesh: FoundMesh | None) -> Holdings:
    """Who holds what of a checkpoint, as far as its headers tell; ``known_mesh`` is its mesh."""
    ranks = {chunk.rank for entry in index.tensors for chunk in entry.chunks}
    unit: Unit = "rank" if known_mesh is not None or ranks - {None} else "file"
    numbers: dict[str, int] = {}
    used = sorted({chunk.data.path for entry in index.tensors for chunk in entry.chunks})
    for path in [*(file.path for file in index.files), *used]:
        numbers.setdefault(path, len(numbers))
    mesh = None if known_mesh is None else known_mesh.mesh
    pieces: dict[tuple[object, ...], tuple[HeldBox, ...]] = {}
    tensors = []
    for entry in index.tensors:
        layout, _ = layout_of(entry, known_mesh) or (None, None)
        # Thousands have the same cut, and pages list the same pieces once.
        kind = (layout, entry.shape, *((c.box, c.rank, c.data.path) for c in entry.chunks))
        if kind not in pieces:
            pieces[kind] = _pieces(entry, layout, mesh, unit, numbers)
        words = () if layout is None else tuple(placement_names(layout))
        tensors.append(HeldTensor(entry.fqn, entry.dtype, entry.shape, words, pieces[kind]))
    count = len(numbers)
    if unit == "rank":
        saved = max((rank for rank in ranks if rank is not None), default=-1) + 1
        count = max(index.world_size or 0, saved, 0 if mesh is None else mesh.size)
    status = None if known_mesh is None else known_mesh.status
    missing = frozenset(numbers[path] for path in index.missing)
    lead = index.root.rstrip(os.sep) + os.sep
    files = tuple(
        path[len(lead) :] if path.startswith(lead) else os.path.basename(path) for path in numbers
    )
    return Holdings(unit, count, mesh, status, files, tuple(tensors), missing)


def _pieces(
    entry: TensorEntry,
    layout: Layout | None,
    mesh: Mesh | None,
    unit: Unit,
    numbers: Mapping[str, int],
) -> tuple[HeldBox, ...]:
    """The boxes of a tensor and who holds them: by its layout, else who saved them."""
    if layout is not None and mesh is not None and layout.mesh.size != mesh.size:
        layout = on_mesh(layout, mesh)  # it lies on a part, whose ranks it counts
    owners = {} if layout is None or unit == "file" else owners_of(layout, entry.shape)
    chunks: dict[Box, list[Chunk]] = {}
    for chunk in entry.chunks:
        chunks.setdefault(chunk.box, []).append(chunk)
    pieces = []
    for box, same in chunks.items():
        if 0 not in box.sizes:
            files = [numbers[chunk.data.path] for chunk in same]
            savers = files if unit == "file" else [c.rank for c in same if c.rank is not None]
            holders = owners.get(box) or tuple(sorted(set(savers)))
            pieces.append(HeldBox(box, holders, files[0]))
    return tuple(sorted(pieces))


def owners_of(layout: Layout, shape: Sequence[int]) -> dict[Box, tuple[int, ...]]:
    """The ranks that hold each box which is not empty."""
    owners: dict[Box, list[int]] = {}
    for rank, box in enumerate(layout.boxes(shape)):
        if 0 not in box.sizes:
            owners.setdefault(box, []).append(rank)
    return {box: tuple(ranks) for box, ranks in owners.items()}


def after(before: Holdings, mesh: Mesh, layouts: Mapping[str, Layout | None]) -> Holdings:
    """The same tensors on another mesh; one without a layout is held whole by every rank.

    Tensors that ``layouts`` does not name are left out.
    """
    pieces: dict[tuple[object, ...], tuple[HeldBox, ...]] = {}
    tensors = []
    for held in before.tensors:
        if held.fqn not in layouts:
            continue
        layout = layouts[held.fqn]
        kind = (layout, held.shape)
        if kind not in pieces:
            every = {Box.whole(held.shape): tuple(range(mesh.size))} if 0 not in held.shape else {}
            owners = every if layout is None else owners_of(layout, held.shape)
            pieces[kind] = tuple(sorted(HeldBox(box, ranks) for box, ranks in owners.items()))
        words = () if layout is None else tuple(placement_names(layout))
        tensors.append(HeldTensor(held.fqn, held.dtype, held.shape, words, pieces[kind]))
    return Holdings("rank", mesh.size, mesh, None, (), tuple(tensors))


def bytes_held(holdings: Holdings) -> list[int]:
    """Bytes of all tensors that each holder has, by its number; replicas count each time."""
    kinds: Counter[tuple[int, int]] = Counter()
    pieces: dict[int, tuple[HeldBox, ...]] = {}
    for held in holdings.tensors:
        kinds[id(held.pieces), held.dtype.itemsize] += 1
        pieces[id(held.pieces)] = held.pieces
    totals = [0] * holdings.holders
    for (kind, itemsize), count in kinds.items():
        for piece in pieces[kind]:
            for holder in piece.holders:
                totals[holder] += piece.box.numel * itemsize * count
    return totals


class Moved(NamedTuple):
    """Who holds what after a reshard, and bytes that the old rank of the same number did not hold.

    ``by_tensor`` is in the order of the tensors after, ``by_rank`` in that of the new ranks.
    """

    holdings: Holdings
    by_tensor: tuple[int, ...]
    by_rank: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """All bytes that move."""
        return sum(self.by_rank)


def moved(before: Holdings, target: Holdings) -> Moved:
    """What must move so that each rank of the target holds its boxes.

    Rank n is taken to run where rank n ran before; ranks that are new have everything to get.
    """
    source = {held.fqn: held.pieces for held in before.tensors}
    known: dict[tuple[int, int], dict[int, int]] = {}
    by_tensor, by_rank = [], [0] * target.holders
    for held in target.tensors:
        old = source[held.fqn] if before.unit == "rank" else ()
        kind = (id(old), id(held.pieces))
        if kind not in known:
            known[kind] = _missing(old, held.pieces)
        by_tensor.append(sum(known[kind].values()) * held.dtype.itemsize)
        for rank, numel in known[kind].items():
            by_rank[rank] += numel * held.dtype.itemsize
    return Moved(target, tuple(by_tensor), tuple(by_rank))


def _missing(old: Sequence[HeldBox], new: Sequence[HeldBox]) -> dict[int, int]:
    """Elements that each new rank does not have yet."""
    had: dict[int, list[Box]] = {}
    for piece in old:
        for rank in piece.holders:
            had.setdefault(rank, []).append(piece.box)
    missing: Counter[int] = Counter()
    for piece in new:
        for rank in piece.holders:
            shared = (piece.box.intersect(box) for box in had.get(rank, ()))
            kept = sum(box.numel for box in shared if box is not None)
            missing[rank] += piece.box.numel - kept
    return dict(missing)
