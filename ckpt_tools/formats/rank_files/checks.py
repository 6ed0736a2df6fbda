"""Whether the rank files of one checkpoint are all there, and are who their names say.

A file states the mesh of its tensors and its own place on it; names state a rank and a world size.
Under HSDP a job may save its first replica group alone: one whole group of ranks that shard is a
whole checkpoint. What the ranks that are absent held is known from the layouts: the same rows.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import attrgetter
from typing import NamedTuple

from ckpt_tools.core.geometry import row_major_strides
from ckpt_tools.core.index import TensorEntry
from ckpt_tools.core.layout import Mesh, Replicate
from ckpt_tools.core.text import are, rank_spans
from ckpt_tools.errors import CheckpointError, IncompleteError, UnsupportedError
from ckpt_tools.formats.pickle.stored import Stored, StoredDTensor, StoredMesh
from ckpt_tools.formats.rank_files.file_names import Family, RankFile, holds_other_state
from ckpt_tools.formats.torch_file.dtensor_read import mesh_of
from ckpt_tools.formats.torch_file.generations import written_by

_LISTED = 32
_ROWS_SHOWN = 3


class _Seat(NamedTuple):
    """What a file says of itself: the largest mesh of its tensors, which rank of it saved the file
    and where on the mesh that sits, and which torch wrote it; None where it does not say.
    """

    file: RankFile
    mesh: Mesh
    rank: int | None
    at: tuple[int, ...] | None
    torch: str | None


@dataclass(slots=True)
class Ranks:
    """What the files say of the meshes that they are on, and of their own ranks."""

    seats: list[_Seat] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh | None:
        """The largest mesh, None where there is none."""
        return max((seat.mesh for seat in self.seats), key=attrgetter("size"), default=None)

    @property
    def torch(self) -> str | None:
        """Which torch wrote the meshes, where that is known."""
        return next((seat.torch for seat in self.seats if seat.torch is not None), None)

    def see(self, file: RankFile, stored: Sequence[Stored]) -> None:
        """Take in the meshes of one file's tensors."""
        meshes = {id(s.mesh): s.mesh for s in stored if isinstance(s, StoredDTensor)}
        if meshes:
            rank = next((r for r in map(own_rank, meshes.values()) if r is not None), None)
            largest = max(meshes.values(), key=lambda stored: mesh_of(stored).size)
            torch = written_by(largest.attributes)
            self.seats.append(_Seat(file, mesh_of(largest), rank, largest.coordinate, torch))

    def world_size(self, families: Sequence[Family]) -> int:
        """The number of ranks: as the names say, else as the meshes and the numbers have it."""
        for first in (family[0] for family in families):
            if first.world_size is not None:
                return first.world_size
        highest = max(family[-1].rank for family in families)
        return max(highest + 1, self.mesh.size if self.mesh is not None else 1)

    def problems(self, families: Sequence[Family], world: int) -> Iterator[CheckpointError]:
        """Files that are not who their names say, and meshes that do not fit."""
        beyond = [file.path for family in families for file in family if file.rank >= world]
        if beyond:
            yield UnsupportedError(
                f"{beyond[0]} is of a rank that a world of {world} does not have.", hint=_MIXED
            )
        on_mesh: dict[Mesh, list[int]] = {}
        for seat in self.seats:
            on_mesh.setdefault(seat.mesh, []).append(seat.file.rank)
        sizes = {mesh.size for mesh in on_mesh}
        if len(sizes) > 1:
            shown = "; ".join(f"{mesh} on ranks {listed(own)}" for mesh, own in on_mesh.items())
            yield UnsupportedError(
                f"The files are of saves with {len(sizes)} mesh sizes: {shown}.", hint=_MIXED
            )
        mesh = self.mesh
        if mesh is not None and mesh.size > world:
            yield UnsupportedError(
                f"The names say {world} ranks, but the files' mesh {mesh} has {mesh.size}.",
                hint=_MIXED,
            )
        wrong = [seat for seat in self.seats if seat.rank not in (None, seat.file.rank)]
        if wrong:
            file, rank = wrong[0].file, wrong[0].rank
            more = f" {len(wrong) - 1} more files are not of their rank." if len(wrong) > 1 else ""
            yield UnsupportedError(
                f"{file.path} is of rank {file.rank} by its name, but rank {rank} saved it.{more}",
                hint="It was copied or renamed. Bring back the file of that rank.",
            )
        yield from self._twins(world)

    def _twins(self, world: int) -> Iterator[CheckpointError]:
        seats: dict[tuple[str, Mesh, tuple[int, ...]], list[RankFile]] = {}
        for file, mesh, _, at, _ in self.seats:
            if at is not None:
                seats.setdefault((file.pattern, mesh, at), []).append(file)
        for (_, mesh, at), files in seats.items():
            if len(files) > 1 and mesh.size == world:
                one, other = files[:2]
                yield UnsupportedError(
                    f"{one.path} and {os.path.basename(other.path)} were both saved by the rank at "
                    f"{at} of mesh {mesh}.",
                    hint="One of them is a copy. Bring back the file of the other rank.",
                )
                return


_MIXED = "Files of several saves are mixed; choose those of one with a quoted glob."


def own_rank(mesh: StoredMesh) -> int | None:
    """The rank that saved a tensor, or None when the mesh does not tell it."""
    if mesh.rank is not None:
        return mesh.rank
    ranks = mesh.ranks()
    if ranks is None or mesh.coordinate is None:
        return None
    steps = zip(mesh.coordinate, row_major_strides(mesh.shape), strict=True)
    return ranks[sum(index * step for index, step in steps)]


def absent_ranks(family: Family, world: int) -> list[int]:
    """The ranks of which a family has no file."""
    have = {file.rank for file in family}
    return [rank for rank in range(world) if rank not in have]


def missing(
    family: Family, world: int, tensors: Sequence[TensorEntry], *, held: Collection[str]
) -> Iterator[IncompleteError]:
    """An error when files of a family are missing: of which ranks, and some rows that they held.

    ``tensors`` are those of all families, ``held`` the names in the files of this one.
    """
    absent = absent_ranks(family, world)
    if not absent:
        return
    rows: list[str] = []  # of the first, as the layouts of the tensors have them
    for entry in tensors:
        layout = entry.layout if entry.fqn in held else None
        if layout is not None and layout.mesh.size == world and len(rows) < _ROWS_SHOWN:
            box = layout.box(entry.shape, layout.mesh.coordinate(absent[0]))
            rows += [f"{entry.fqn} {box}"] if box.numel else []
    lost = f" Rank {absent[0]} held {'; '.join(rows)}." if rows else ""
    hint = f"Bring them from the nodes that wrote them, e.g. {family[0].path_of(absent[0])}."
    for group in whole_groups(family, world, tensors)[:1]:
        hint += (
            f"\nOr keep only those of ranks {rank_spans(group)}: they hold a replica of every row."
        )
    yield IncompleteError(
        f"{len(absent):,} of {world:,} files {family[0].pattern} {are(len(absent))} missing: "
        f"{'ranks' if len(absent) > 1 else 'rank'} {listed(absent)}.{lost}",
        hint=hint,
    )


def listed(ranks: Sequence[int]) -> str:
    """Ranks one by one, or as spans when they are many: ``0, 1, 5`` or ``0-99, 120``."""
    if len(ranks) <= _LISTED:
        return ", ".join(map(str, ranks))
    return rank_spans(ranks, comma=", ")


def are_whole_groups(family: Family, world: int, tensors: Sequence[TensorEntry]) -> bool:
    """Whether ranks are absent, and those that are there are one or more whole replica groups."""
    there = len(family)
    return there < world and sum(map(len, whole_groups(family, world, tensors))) == there


def whole_groups(family: Family, world: int, tensors: Sequence[TensorEntry]) -> list[list[int]]:
    """The ranks of each replica group of which every file is there.

    Every DTensor must be on one mesh of all ranks, or on some named dimensions of it (FSDP with TP
    keeps norms on those of FSDP), and one dimension or more replicate every one: only then is it
    known that the ranks of other groups held nothing else.
    """
    have = [file.rank for file in family]
    layouts = {entry.layout for entry in tensors if entry.layout is not None}
    meshes = {layout.mesh for layout in layouts}
    # Of two with as many ranks, one has more dimensions: those of size 1.
    mesh = max(meshes, key=lambda one: (one.size, len(one.shape)), default=None)
    if mesh is None or mesh.size != world or max(have) >= world:
        return []
    replicating = set(_dims(mesh))
    for layout in layouts:
        own = _dims(layout.mesh)
        if layout.mesh != mesh and not (mesh.dim_names and set(own) < set(_dims(mesh))):
            return []
        placed = zip(own, layout.placements, strict=True)
        replicating &= {dim for dim, placement in placed if isinstance(placement, Replicate)}
    dims = [at for at, dim in enumerate(_dims(mesh)) if dim in replicating]
    if not dims:
        return []
    in_group = mesh.size // prod(mesh.shape[dim] for dim in dims)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in have:
        place = mesh.coordinate(rank)
        groups.setdefault(tuple(place[dim] for dim in dims), []).append(rank)
    return [ranks for ranks in groups.values() if len(ranks) == in_group]


def _dims(mesh: Mesh) -> list[tuple[object, int]]:
    """The dimensions of a mesh by their names, else by their places, each with its size."""
    return list(zip(mesh.dim_names or range(len(mesh.shape)), mesh.shape, strict=True))


def absent_replicas(families: Sequence[Family], world: int) -> Iterator[str]:
    """A note on the ranks that are absent."""
    for family in families:
        absent = absent_ranks(family, world)
        is_own = holds_other_state(family[0].family)
        own = " State that each of them saved for itself is missing." if is_own else ""
        yield (
            f"{family[0].pattern}: the replicas of ranks {rank_spans(absent)} are absent; the "
            f"{len(family)} files that are there hold every row.{own}"
        )
