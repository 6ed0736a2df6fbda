"""What boxes tell of a mesh: the layout that a format does not state.

A DCP directory stores which boxes there are and who saved each, not the mesh they came from. This
room looks for the simplest mesh and placements that give exactly these boxes to exactly these
ranks. Its answers are inferred, never confirmed: 8 pieces of 8 ranks may also have been 2 x 4. It
opens no file and knows no format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations, product
from typing import Literal, NamedTuple

from ckpt_tools.core.geometry import Box, cut_dims
from ckpt_tools.core.index import Grid, TensorEntry
from ckpt_tools.core.layout import Layout, Mesh, Placement, Replicate, Shard
from ckpt_tools.core.records import Json, record_json

Status = Literal["confirmed", "inferred"]
# Who saved a box is checked on so many tensors of each kind; in a kind all have the same cut.
_SAMPLES = 4


# A shape, and each box with who saved it: as they are, or as the grid that they are shared by.
Held = tuple[tuple[int, ...], Grid | tuple[tuple[Box, int | None], ...]]


class _Tiling(NamedTuple):
    """How a tensor is cut: its shape, the boxes that hold elements, and the cut dimensions.

    A dimension counts as cut, too, when some rank saved an empty piece of it.
    """

    shape: tuple[int, ...]
    boxes: frozenset[Box]
    dims: tuple[int, ...]


def cut_of(entry: TensorEntry) -> _Tiling | None:
    """How this tensor is cut, or None when it is stored in one piece."""
    shape = entry.shape
    boxes = list(set(entry.boxes))
    if len(boxes) < 2 and all(box.sizes == shape for box in boxes):
        return None
    solid = frozenset(box for box in boxes if 0 not in box.sizes)
    dims = tuple(cut_dims(boxes, shape))
    return _Tiling(shape, solid, dims) if dims and solid else None


@dataclass(repr=False, slots=True)
class FoundMesh:
    """A mesh, and whether the checkpoint states it or only its boxes tell it.

    ``usual`` are the layouts on an inferred one that some tensors speak of without a doubt, most
    frequent first.
    """

    mesh: Mesh
    status: Status
    usual: tuple[Layout, ...] = ()
    # Thousands of tensors have the same cut, and looking costs more than finding that again.
    _known: dict[Held, Layout | None] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        """``2x4, inferred from the boxes that each rank saved``."""
        if self.status == "confirmed":
            return f"{self.mesh}, confirmed by the files"
        return f"{self.mesh}, inferred from the boxes that each rank saved"

    __repr__ = __str__  # what it knows is as long as the checkpoint

    def to_dict(self) -> dict[str, Json]:
        """The mesh as JSON has it."""
        return mesh_json(self.mesh, self.status)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the mesh's dimensions."""
        return self.mesh.shape

    def layout_of(self, entry: TensorEntry) -> Layout | None:
        """The layout on this mesh, or on all its ranks in one line, that gives the tensor's boxes.

        Among several, those that give each box to the rank that saved it come first, then those
        that other tensors have. None when the tensor is in one piece, or cut as no layout cuts.
        """
        held = entry.shape, entry.grid or tuple((chunk.box, chunk.rank) for chunk in entry.chunks)
        if held not in self._known:
            cut = cut_of(entry)
            layouts = () if cut is None else _layouts_on(cut, self.mesh)
            fitting = [layout for layout in layouts if _saved_by_owners(entry, layout)] or layouts
            usual = (layout for layout in self.usual if layout in fitting)
            self._known[held] = next(usual, fitting[0] if fitting else None)
        return self._known[held]


def mesh_json(mesh: Mesh | None, status: Status | None) -> dict[str, Json]:
    """A mesh with how it is known, as JSON; all null for none, so that a table has its columns."""
    known = {"shape": None, "dim_names": None} if mesh is None else record_json(mesh)
    return {**known, "status": status}


def infer(tensors: Sequence[TensorEntry], *, world_size: int | None) -> FoundMesh | None:
    """The mesh that explains most of these tensors with the fewest dimensions, or None.

    Without a world size, the most pieces that a tensor is cut into stand for it.
    """
    kinds: dict[_Tiling, list[TensorEntry]] = {}
    known: dict[tuple[Grid | None, tuple[int, ...]], _Tiling | None] = {}
    for entry in tensors:
        kind = entry.grid, entry.shape
        if entry.grid is None or kind not in known:
            known[kind] = cut_of(entry)
        cut = known[kind]
        if cut is not None:
            kinds.setdefault(cut, []).append(entry)
    ranks = world_size or max((len(cut.boxes) for cut in kinds), default=1)
    if ranks < 2:
        return None
    mesh = _best(kinds, ranks, by_rank=True) or _best(kinds, ranks, by_rank=False)
    if mesh is None:
        return None
    usual: Counter[Layout] = Counter()
    for cut, entries in kinds.items():
        fitting = _fitting(cut, entries, mesh)
        if len(fitting) == 1:
            usual[fitting[0]] += len(entries)
    return FoundMesh(mesh, "inferred", tuple(layout for layout, _ in usual.most_common()))


def _fitting(cut: _Tiling, entries: Sequence[TensorEntry], mesh: Mesh) -> list[Layout]:
    """The layouts that give this cut, and each box of a few of its tensors to who saved it."""
    sample = entries[:_SAMPLES]
    return [
        layout
        for layout in _layouts_on(cut, mesh)
        if all(_saved_by_owners(entry, layout) for entry in sample)
    ]


def _best(kinds: dict[_Tiling, list[TensorEntry]], ranks: int, *, by_rank: bool) -> Mesh | None:
    """The mesh of so many ranks that explains most tensors; fewer dimensions win a draw."""
    total = sum(map(len, kinds.values()))
    best: Mesh | None = None
    best_score = (0, 0)
    for ndim in (1, 2, 3):
        for shape in _factorings(ranks, ndim):
            mesh = Mesh(shape)
            score = _score(kinds, mesh, by_rank=by_rank)
            if score[0] > best_score[0] or (
                score > best_score and best and len(best.shape) == ndim
            ):
                best, best_score = mesh, score
        if best_score[0] == total:
            break
    return best


def _score(
    kinds: dict[_Tiling, list[TensorEntry]], mesh: Mesh, *, by_rank: bool
) -> tuple[int, int]:
    """How many tensors the mesh explains, and how many of them in the usual order."""
    explained = usual = 0
    for cut, entries in kinds.items():
        layouts = _fitting(cut, entries, mesh) if by_rank else _layouts_on(cut, mesh)
        if layouts:
            explained += len(entries)
            # Replicas first, then cuts by ascending dimension, as FSDP2 numbers its own meshes.
            cuts = ([p.dim if isinstance(p, Shard) else -1 for p in x.placements] for x in layouts)
            usual += len(entries) * any(dims == sorted(dims) for dims in cuts)
    return explained, usual


def _factorings(number: int, ndim: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``number`` as a product of ``ndim`` factors above 1, in order."""
    if ndim == 1:
        yield (number,)
        return
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorings(number // first, ndim - 1):
                yield (first, *rest)


def _layouts_on(cut: _Tiling, mesh: Mesh) -> tuple[Layout, ...]:
    """The layouts that give this cut: on the mesh itself, else on its ranks in one line."""
    layouts = _layouts(cut, mesh)
    return layouts if layouts or len(mesh.shape) == 1 else _layouts(cut, Mesh((mesh.size,)))


@lru_cache(maxsize=4096)
def _layouts(cut: _Tiling, mesh: Mesh) -> tuple[Layout, ...]:
    """Every layout on this mesh whose boxes are exactly those of the cut."""
    pieces = {dim: len({box.offsets[dim] for box in cut.boxes}) for dim in cut.dims}
    options: list[Placement] = [Replicate(), *map(Shard, cut.dims)]
    fitting = []
    for placements in product(options, repeat=len(mesh.shape)):
        parts: dict[int, int] = {}
        ranges, sharded = [], 0
        for one, size in zip(placements, mesh.shape, strict=True):
            ranges.append(range(size if isinstance(one, Shard) else 1))
            if isinstance(one, Shard):
                parts[one.dim] = parts.get(one.dim, 1) * size
                sharded += 1
        # Where parts are unequal, the last of them may be empty: then there are fewer pieces.
        if parts.keys() != pieces.keys() or not all(
            pieces[dim] == count or (cut.shape[dim] % count and pieces[dim] < count)
            for dim, count in parts.items()
        ):
            continue
        dims = range(len(placements))
        # The order of cutting matters only where two mesh dimensions cut the same.
        for order in permutations(dims) if sharded > len(parts) else [tuple(dims)]:
            layout = Layout(mesh, placements, order)
            boxes = {layout.box(cut.shape, coordinate) for coordinate in product(*ranges)}
            if {box for box in boxes if 0 not in box.sizes} == cut.boxes:
                fitting.append(layout)
    return tuple(fitting)


def _saved_by_owners(entry: TensorEntry, layout: Layout) -> bool:
    """Whether every box was saved by a rank that holds it; boxes of unknown rank say nothing."""
    for chunk in entry.chunks:
        if chunk.rank is None or 0 in chunk.box.sizes:
            continue
        if chunk.rank >= layout.mesh.size:
            return False
        if layout.box(entry.shape, layout.mesh.coordinate(chunk.rank)) != chunk.box:
            return False
    return True
