"""Meshes, placements and the box of each rank: what a sharding means, in integers.

The rule of a split is torch's own `Shard`: chunks of ceil(n / parts) elements, so that 10 over 4
gives 3, 3, 3, 1 and the last ranks may hold nothing. Nothing here knows of files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from ckpt_tools.core.geometry import Box, row_major_strides
from ckpt_tools.errors import UnsupportedError, UsageError


class Shard(NamedTuple):
    """The tensor is cut along ``dim``, one piece for each coordinate of the mesh dimension."""

    dim: int

    def __str__(self) -> str:
        """As torch prints it: ``Shard(0)``."""
        return f"Shard({self.dim})"


class Replicate(NamedTuple):
    """Every coordinate of the mesh dimension holds the same elements."""

    def __str__(self) -> str:
        """As torch prints it, short: ``Replicate``."""
        return "Replicate"


Placement = Shard | Replicate


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks, numbered row-major, with a name for each dimension or none at all."""

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.shape):
            raise UsageError(f"A mesh needs sizes of 1 or more, found {self.shape}.")
        if self.dim_names is not None and len(self.dim_names) != len(self.shape):
            raise UsageError(f"{len(self.shape)} mesh dimensions, but names {self.dim_names}.")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its dimensions, ``dim0`` and so on where it has none."""
        return self.dim_names or tuple(f"dim{dim}" for dim in range(len(self.shape)))

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where this rank (0 to size - 1) sits, one index per mesh dimension."""
        steps = row_major_strides(self.shape)
        return tuple(rank // step % size for step, size in zip(steps, self.shape, strict=True))

    def coordinates(self) -> Iterator[tuple[int, ...]]:
        """Every coordinate, in the order of the ranks."""
        return product(*(range(size) for size in self.shape))

    def __str__(self) -> str:
        """``2x4`` or ``dp_replicate=2,dp_shard=4``."""
        if self.dim_names is None:
            return "x".join(map(str, self.shape))
        pairs = zip(self.dim_names, self.shape, strict=True)
        return ",".join(f"{name}={size}" for name, size in pairs)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one tensor lies on a mesh: a placement per mesh dimension, and which of them cuts first.

    ``order`` lists the mesh dimensions from the first cut to the last. It is left to right unless
    a format says otherwise: FSDP2 over tensor parallelism cuts by tp first, then by dp inside.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.placements) != len(self.mesh.shape):
            raise UsageError(
                f"{len(self.placements)} placements for {len(self.mesh.shape)} mesh dimensions."
            )
        if not self.order:
            object.__setattr__(self, "order", tuple(range(len(self.placements))))
        if sorted(self.order) != list(range(len(self.placements))):
            raise UsageError(f"The order {self.order} does not name each mesh dimension once.")

    def box(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """The elements of a tensor of this shape that the rank at ``coordinate`` holds.

        Raises UnsupportedError when a placement names a dimension that the tensor does not have.
        """
        offsets = [0] * len(shape)
        sizes = list(shape)
        for mesh_dim in self.order:
            placement = self.placements[mesh_dim]
            if isinstance(placement, Replicate):
                continue
            dim = placement.dim
            if not 0 <= dim < len(shape):
                raise UnsupportedError(f"{placement} of a tensor of shape {tuple(shape)}.")
            start, size = split(sizes[dim], self.mesh.shape[mesh_dim], coordinate[mesh_dim])
            offsets[dim] += start
            sizes[dim] = size
        return Box(tuple(offsets), tuple(sizes))

    def split_factor(self, mesh_dim: int) -> int:
        """Into how many parts mesh dimensions to the right cut the tensor before this one does.

        1 is a plain `Shard`; more is torch's `_StridedShard` with this split factor.
        """
        before = self.order[: self.order.index(mesh_dim)]
        placement = self.placements[mesh_dim]
        cut = [dim for dim in before if dim > mesh_dim and self.placements[dim] == placement]
        return prod(self.mesh.shape[dim] for dim in cut)

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """The box of every rank, in the order of the ranks."""
        return [self.box(shape, coordinate) for coordinate in self.mesh.coordinates()]

    def __str__(self) -> str:
        """``Replicate, Shard(0)``."""
        return ", ".join(map(str, self.placements))


def on_mesh(layout: Layout, mesh: Mesh) -> Layout | None:
    """The same layout on a mesh that has more dimensions: along those, every rank holds the same.

    None when the names of the dimensions do not say which they are.
    """
    if layout.mesh.shape == mesh.shape:
        return Layout(mesh, layout.placements, layout.order)
    few, many = layout.mesh.dim_names, mesh.dim_names
    if few is None or many is None or not set(few) <= set(many):
        return None
    at = {name: dim for dim, name in enumerate(many)}
    placements: list[Placement] = [Replicate() for _ in many]
    for name, size, placement in zip(few, layout.mesh.shape, layout.placements, strict=True):
        if mesh.shape[at[name]] != size:
            return None
        placements[at[name]] = placement
    order = [at[few[dim]] for dim in layout.order]
    rest = [dim for dim in range(len(many)) if dim not in order]
    return Layout(mesh, tuple(placements), (*order, *rest))


def split(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and size of piece ``index`` when ``size`` elements are cut into ``parts``.

    Pieces have ceil(size / parts) elements, the last ones fewer or none; an empty piece starts at
    ``size``. This is the rule of torch's `Shard` (and of `torch.chunk`, which leaves empty pieces
    out).
    """
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(size, start + step) - start


def strided_order(
    mesh_shape: Sequence[int], dims: Sequence[int | None], factors: Sequence[int]
) -> tuple[int, ...]:
    """The order of the cuts that torch's `_StridedShard` split factors mean.

    ``dims[i]`` is the tensor dimension that mesh dimension i shards (None: replicated), and
    ``factors[i]`` its split factor, 1 for a plain `Shard`. A factor of f says that mesh dimensions
    to the right, of f pieces together, cut the same tensor dimension before this one does.

    Raises UnsupportedError when no order gives these factors.
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(dims))):
        before, place = 1, 0  # among the dimensions to its right, which are in order already
        while before != factors[mesh_dim]:
            if place == len(order):
                raise UnsupportedError(
                    f"A strided shard with split factor {factors[mesh_dim]} on mesh "
                    f"{tuple(mesh_shape)}: no mesh dimensions to its right cut the tensor into "
                    "that many pieces."
                )
            other = order[place]
            before *= mesh_shape[other] if dims[other] == dims[mesh_dim] else 1
            place += 1
        order.insert(place, mesh_dim)
    return tuple(order)
