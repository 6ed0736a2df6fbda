"""Plans per-rank torch.save files of DTensors, as `torch.save(state_dict)` leaves on every rank.

Each file holds its rank's shards with the mesh as that rank has it, and every plain tensor and
object. It loads without a process group, also from a mesh of GPUs on a machine that has none.

A shard is saved on the bare device type (``cuda``, no index), which torch takes as the current
device of the loading process; a real job saves its own index. Plain tensors are saved on the CPU.
`.data/serialization_id` and the order of the records differ as well.

This room plans; it opens no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, repeat
from math import prod
from typing import NamedTuple

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ObjectEntry
from ckpt_tools.core.layout import Layout, Mesh
from ckpt_tools.core.plan import (
    FilePlan,
    FileReads,
    Finder,
    LazyPlans,
    PlannedFile,
    Target,
    placed_tree,
    reads_of,
    refuse_types_not_in_torch,
    require_mesh_size,
)
from ckpt_tools.core.state_tree import Branch, nested
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.pickle.dump import (
    Blank,
    Draft,
    PickleWriter,
    fill,
    object_node,
    tensor_node,
)
from ckpt_tools.formats.pickle.nodes import Instance
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.rank_files import file_names as rank_names
from ckpt_tools.formats.torch_file.dtensor_write import dtensor_node, mesh_ranks, rank_mesh
from ckpt_tools.formats.torch_file.generations import (
    NEWEST,
    Generation,
    generation_of,
    parse_version,
)
from ckpt_tools.formats.torch_file.write import archive_name, items_in
from ckpt_tools.formats.zip.layout import lay_out

_WITH_TENSORS = ("model", "optim", "optimizer")
_NAMING = "{family}_world_size_{world}_rank_{rank}.pt"


def plan_files(
    targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
) -> LazyPlans:
    """One file for each rank of the mesh, or one for each rank and each part of the checkpoint.

    ``rank_name`` has ``{rank}``, and may have ``{world}`` and ``{family}``. With ``{family}`` and a
    state dict that consists of well-known parts (model, optim, extra_state…) each part has its own
    files, without the part's name in the nesting, as verl writes them; all else is one family,
    ``model``. Each torch reads only the DeviceMesh of its own `generations`. Tensors and objects
    are where ``tree`` has their names, else at their paths.

    Raises UsageError for a torch that has none, when a layout's mesh has another size than ``mesh``
    or the naming has no rank, IncompleteError when the source's chunks do not cover a tensor,
    UnsupportedError for an object that was not opened and for paths that exclude each other.
    """
    mesh, naming = options.mesh, _NAMING if options.rank_name is None else options.rank_name
    generation = generation_of(parse_version(options.torch_version or str(NEWEST)))
    refuse_types_not_in_torch(targets)
    require_mesh_size(targets, mesh.size)
    files: list[PlannedFile] = []
    whole = placed_tree(targets, objects, options.tree)
    parts = {str(name): part for name, part in whole.pairs() if isinstance(part, Branch)}
    # One family for each part, where all is in containers that families are named after.
    are_families = len(parts) == len(whole.items) > 1 and all(
        name in _WITH_TENSORS or rank_names.holds_other_state(name) for name in parts
    )
    if "{family}" not in naming or not are_families:
        parts = {"model": whole}
    for family, part in parts.items():
        planner = _Planner(
            part, ranks=mesh.size, device_type=options.device_type, generation=generation
        )
        if "{rank}" not in naming:
            raise UsageError(f"The naming {naming!r} of rank files has no {{rank}}.")
        path = naming.replace("{family}", family).replace("{world}", str(mesh.size))
        files += [
            planner.planned(path.replace("{rank}", str(rank)), rank=rank)
            for rank in range(mesh.size)
        ]
    return LazyPlans(files)


class _Contents(NamedTuple):
    """What a rank's file holds but for the bytes of tensors: a pickle, storages, and its meshes.

    The first blank of the pickle is the rank; its coordinates on each of the meshes follow.
    """

    pickle: Draft
    storages: tuple[int | bytes, ...]
    meshes: tuple[Mesh, ...]


class _Planner:
    """Plans the files of one family; ranks whose shards have the same sizes share a pickle."""

    def __init__(
        self,
        tree: Branch[Target | ObjectEntry],
        *,
        ranks: int,
        device_type: str,
        generation: Generation,
    ) -> None:
        self._tree = tree
        self._targets = [leaf for leaf in tree.leaves() if isinstance(leaf, Target)]
        self._device_type = device_type
        self._generation = generation
        # Now, and not when files are half written, it is seen that the chunks are all there.
        self._finders = [Finder(target.entry).require_whole() for target in self._targets]
        known: dict[tuple[Layout | None, tuple[int, ...]], Sequence[Box]] = {}
        for layout, shape in {(one.layout, one.entry.shape) for one in self._targets}:
            boxes = [Box.whole(shape)] * ranks if layout is None else layout.boxes(shape)
            known[layout, shape] = boxes
        self._boxes = [known[one.layout, one.entry.shape] for one in self._targets]
        self._contents: dict[tuple[tuple[int, ...], ...], _Contents] = {}
        self._lengths: dict[tuple[tuple[tuple[int, ...], ...], int, int], int] = {}

    def planned(self, path: str, *, rank: int) -> PlannedFile:
        """The file of one rank, to be planned later: its pickle and sizes say all of it."""
        sizes = tuple([boxes[rank].sizes for boxes in self._boxes])
        pickle, storages = self._filled(sizes, rank)
        name = archive_name(path)
        key = sizes, len(pickle), len(name)
        if key not in self._lengths:
            self._lengths[key] = lay_out(pickle, storages, archive=name).length
        digest = blake2b(repr((sizes, name)).encode() + pickle).digest()
        make, read = partial(self.plan, path, rank=rank), partial(self._reads, rank)
        return PlannedFile(path, self._lengths[key], digest, make, read)

    def _reads(self, rank: int) -> FileReads:
        boxes = (boxes[rank] for boxes in self._boxes)
        return reads_of(zip(self._finders, boxes, repeat(1)))

    def _filled(
        self, sizes: tuple[tuple[int, ...], ...], rank: int
    ) -> tuple[bytes, tuple[int | bytes, ...]]:
        """The pickle and the storages of a rank whose shards have these sizes."""
        if sizes not in self._contents:
            self._contents[sizes] = self._new(sizes)
        contents = self._contents[sizes]
        values = [rank, *chain.from_iterable(m.coordinate(rank) for m in contents.meshes)]
        return fill(contents.pickle, values), contents.storages

    def plan(self, path: str, *, rank: int) -> FilePlan:
        """The file of one rank."""
        boxes = [boxes[rank] for boxes in self._boxes]
        pickle, storages = self._filled(tuple(box.sizes for box in boxes), rank)
        archive = lay_out(pickle, storages, archive=archive_name(path))
        filled = zip(self._targets, boxes, self._finders, strict=True)
        items = items_in(archive.slots, path, filled)
        return FilePlan(path, archive.length, archive.literals, tuple(items))

    def _new(self, sizes: tuple[tuple[int, ...], ...]) -> _Contents:
        shards = _Shards(self._device_type, self._generation)
        local = iter(sizes)

        def node(leaf: Target | ObjectEntry) -> object:
            return shards.add(leaf, next(local)) if isinstance(leaf, Target) else object_node(leaf)

        pickle = PickleWriter().draft(nested(self._tree, node))
        return _Contents(pickle, tuple(shards.storages), tuple(shards.meshes))


class _Shards:
    """Adds the tensors of one file, with ``storages`` by their keys, and the meshes they are on."""

    def __init__(self, device_type: str, generation: Generation) -> None:
        self.storages: list[int | bytes] = []
        self.meshes: dict[Mesh, Instance] = {}
        self._device_type = device_type
        self._generation = generation
        self._blanks = 1  # the first one is the rank

    def add(self, target: Target, sizes: tuple[int, ...]) -> object:
        """The node of a tensor whose shard has these sizes; a storage is added for it."""
        dtype = target.dtype
        key = len(self.storages)
        self.storages.append(prod(sizes) * dtype.itemsize)
        if target.layout is None:
            return tensor_node(dtype, sizes, key=key)
        local = tensor_node(dtype, sizes, key=key, location=self._device_type)
        mesh = self._mesh(target.layout.mesh)
        return dtensor_node(
            dtype,
            target.entry.shape,
            local=local,
            layout=target.layout,
            mesh=mesh,
            device_type=self._device_type,
            generation=self._generation,
        )

    def _mesh(self, mesh: Mesh) -> Instance:
        if mesh not in self.meshes:
            first = self._blanks
            self._blanks += len(mesh.shape)
            self.meshes[mesh] = rank_mesh(
                mesh,
                rank=Blank(0),
                coordinate=tuple(map(Blank, range(first, self._blanks))),
                device_type=self._device_type,
                key=len(self.storages),
                generation=self._generation,
            )
            self.storages.append(mesh_ranks(mesh))
        return self.meshes[mesh]
