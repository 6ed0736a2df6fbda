"""Ranks that hold replicas of others: one whole group of ranks that shard is a whole checkpoint.

Under HSDP a job may save its first replica group alone. What the ranks that are absent held is
known from the layouts: the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from ckpt_tools.core.index import TensorEntry
from ckpt_tools.core.layout import Layout, Replicate
from ckpt_tools.core.text import rank_spans
from ckpt_tools.formats.rank_files.file_names import Family, holds_other_state


def are_whole(family: Family, world: int, tensors: Sequence[TensorEntry]) -> bool:
    """Whether ranks are absent, and those that are there are one or more whole replica groups."""
    there = len(family.files)
    return there < world and sum(map(len, whole_groups(family, world, tensors))) == there


def whole_groups(family: Family, world: int, tensors: Sequence[TensorEntry]) -> list[list[int]]:
    """The ranks of each replica group of which every file is there.

    Every DTensor must be on one mesh of all ranks, of which some dimensions replicate all of them:
    only then is it known that the ranks of other groups held nothing else.
    """
    have = [file.rank for file in family.files]
    layouts = {entry.layout for entry in tensors if entry.layout is not None}
    meshes = {layout.mesh for layout in layouts}
    if max(have) >= world or len(meshes) != 1:
        return []
    (mesh,) = meshes
    dims = _replicated(layouts, len(mesh.shape))
    if mesh.size != world or not dims:
        return []
    in_group = mesh.size // prod(mesh.shape[dim] for dim in dims)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in have:
        place = mesh.coordinate(rank)
        groups.setdefault(tuple(place[dim] for dim in dims), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) == in_group]


def _replicated(layouts: set[Layout], ndim: int) -> list[int]:
    """The mesh dimensions along which every tensor is replicated."""
    return [
        dim
        for dim in range(ndim)
        if all(isinstance(layout.placements[dim], Replicate) for layout in layouts)
    ]


def notes(families: Sequence[Family], world: int) -> Iterator[str]:
    """A note on the ranks that are absent."""
    for family in families:
        have = {file.rank for file in family.files}
        absent = [rank for rank in range(world) if rank not in have]
        own = (
            " State that each of them saved for itself is missing."
            if holds_other_state(family.name)
            else ""
        )
        yield (
            f"{family.pattern}: the replicas of ranks {rank_spans(absent)} are absent; the "
            f"{len(have)} files that are there hold every row.{own}"
        )
