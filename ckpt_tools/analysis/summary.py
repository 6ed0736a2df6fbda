"""What `inspect` says of a checkpoint: an index in, facts out.

It opens no file and prints nothing. Facts that the format states are confirmed; what only the
boxes tell is inferred, and says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ckpt_tools.analysis.infer_mesh import FoundMesh, Status, cut_of, infer
from ckpt_tools.core.index import (
    SECTIONS,
    CheckpointIndex,
    Count,
    Entry,
    ObjectEntry,
    Section,
    TensorEntry,
    count_of,
)
from ckpt_tools.core.layout import Layout, Shard
from ckpt_tools.core.plain_values import TorchValue
from ckpt_tools.core.text import counted
from ckpt_tools.errors import CheckpointError

# The likeliest first. Composer counts steps as ``batch`` of a Timestamp, whose ``iteration`` is
# something else.
_STEP_NAMES = (
    *("global_step", "global_steps", "step", "_step"),
    *("batch", "iteration", "iteration_count"),
)
UNEVEN = "uneven over"  # of placements, and how many ranks
CUT_FREELY = "cut in a way that no mesh explains"  # of placements: uneven shards of the user's own
_NUMPY_INT = re.compile(r"numpy\.u?int\d+\((-?\d+)\)")


class Step(NamedTuple):
    """How many steps were done, and the name of the entry that says so."""

    value: int
    fqn: str


class _FileLoad(NamedTuple):
    """What one file holds: who saved it if known, chunks, their bytes, and its own length."""

    path: str
    rank: int | None
    chunks: int
    nbytes: int
    length: int | None


def mesh_of(index: CheckpointIndex) -> FoundMesh | None:
    """The mesh of the whole checkpoint, or None when neither files nor boxes show one.

    Where tensors lie on several meshes and the format names no main one, it is the one with most
    dimensions, then the one of most tensors.
    """
    if index.mesh is not None:
        return FoundMesh(index.mesh, "confirmed")
    stated = Counter(entry.layout.mesh for entry in index.tensors if entry.layout is not None)
    if stated:
        mesh = max(stated, key=lambda mesh: (len(mesh.shape), mesh.size, stated[mesh]))
        return FoundMesh(mesh, "confirmed")
    return infer(index.tensors, world_size=index.world_size)


def layout_of(entry: TensorEntry, known_mesh: FoundMesh | None) -> tuple[Layout, Status] | None:
    """The layout of one tensor, stated or inferred on this mesh; None when nothing tells it."""
    if entry.layout is not None:
        return entry.layout, "confirmed"
    if known_mesh is None or known_mesh.status == "confirmed":
        return None
    layout = known_mesh.layout_of(entry)
    return None if layout is None else (layout, "inferred")


def placements_of(index: CheckpointIndex, known_mesh: FoundMesh | None) -> list[tuple[str, int]]:
    """Placements as text, with the number of tensors that have them; most first."""
    counts: Counter[str] = Counter()
    for entry in index.tensors:
        layout, _ = layout_of(entry, known_mesh) or (None, None)
        text = "in one piece"
        if layout is not None:
            text = ", ".join(placement_names(layout))
            if known_mesh is not None and layout.mesh != known_mesh.mesh:
                text += f" on {layout.mesh}"
        elif len(entry.chunks) > 1:
            # One dimension, a box for each rank: Megatron-FSDP's cut, which no mesh makes.
            cut, ranks = cut_of(entry), {chunk.rank for chunk in entry.chunks if chunk.box.numel}
            ranks -= {None}
            one_each = cut is not None and len(cut.dims) == 1 and len(ranks) == len(cut.boxes)
            text = f"{UNEVEN} {counted(len(ranks), 'rank')}" if one_each else CUT_FREELY
        counts[text] += 1
    return counts.most_common()


def placement_names(layout: Layout) -> list[str]:
    """What torch calls the placements: ``Replicate``, ``Shard(0)``, ``_StridedShard(0, 2)``.

    A strided shard is one that a mesh dimension to its right has cut first; the second number is
    torch's split factor, the number of those first pieces.
    """
    factors = map(layout.split_factor, range(len(layout.placements)))
    return [
        f"_StridedShard({placement.dim}, {factor})"
        if isinstance(placement, Shard) and factor > 1
        else str(placement)
        for placement, factor in zip(layout.placements, factors, strict=True)
    ]


def sections_of(index: CheckpointIndex) -> dict[Section, Count]:
    """What each section holds, empty ones included, in the order of `SECTIONS`."""
    return {
        section: count_of([entry for entry in index.entries if entry.section == section])
        for section in SECTIONS
    }


def step_entries(index: CheckpointIndex) -> list[Entry]:
    """Entries that may count the training's steps, the likeliest first.

    They have one of the usual names, one element if they are tensors, and do not belong to the
    optimizer, which counts for each parameter.
    """
    entries = [
        entry
        for entry in index.entries
        if entry.path[-1] in _STEP_NAMES
        and entry.section != "optim"
        and (isinstance(entry, ObjectEntry) or entry.numel == 1)
    ]
    return sorted(entries, key=lambda e: (_STEP_NAMES.index(str(e.path[-1])), len(e.path), e.fqn))


def step_of(index: CheckpointIndex, read: Callable[[Entry], object]) -> Step | None:
    """The step that the likeliest entry gives, which ``read`` reads; None when none gives one.

    An entry that cannot be read is skipped: verifying reports damage.
    """
    for entry in step_entries(index):
        try:
            value = read(entry)
        except CheckpointError:
            continue
        count = _NUMPY_INT.fullmatch(value) if isinstance(value, TorchValue) else None
        if count is not None:
            return Step(int(count[1]), entry.fqn)
        if type(value) is int or (isinstance(value, float) and value.is_integer()):
            return Step(int(value), entry.fqn)
    return None


def file_loads(index: CheckpointIndex) -> list[_FileLoad]:
    """What each file holds, replicas included, in the order of ranks and then of paths."""
    lengths = {file.path: file.length for file in index.files}
    ranks: dict[str, int | None] = {}
    chunks: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for entry in index.tensors:
        for chunk in entry.chunks:
            ranks.setdefault(chunk.data.path, chunk.rank)
            for place in (chunk.data, *chunk.replicas):
                chunks[place.path] += 1
                nbytes[place.path] += chunk.box.numel * entry.dtype.itemsize
    loads = [
        _FileLoad(path, ranks.get(path), chunks[path], nbytes[path], lengths.get(path))
        for path in {**lengths, **chunks}
    ]
    return sorted(loads, key=lambda one: (one.rank is None, one.rank or 0, one.path))


def skew_of(totals: Sequence[int]) -> float | None:
    """How many times the average the fullest holder has; None when nobody holds anything."""
    return max(totals) * len(totals) / sum(totals) if sum(totals) else None
