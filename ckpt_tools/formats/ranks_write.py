"""Plans per-rank torch.save files of DTensors, as `torch.save(state_dict)` leaves on every rank.

Each file holds its rank's shards with the mesh as that rank has it, and every plain tensor and
object. It loads without a process group, also from a mesh of GPUs on a machine that has none.

A shard is saved on the bare device type (``cuda``, no index), which torch takes as the current
device of the loading process; a real job saves its own index. Plain tensors are saved on the CPU.
`.data/serialization_id` and the order of the records differ as well.

This room plans; it opens no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.errors import UsageError
from ckpt_tools.formats import rank_names
from ckpt_tools.formats.dtensor_out import (
    NEWEST,
    RankMesh,
    TorchVersion,
    check_version,
    dtensor_node,
    mesh_ranks,
    rank_mesh,
)
from ckpt_tools.formats.nesting import nested
from ckpt_tools.formats.pickle_out import Node, dumps, object_node, tensor_node
from ckpt_tools.formats.torch_write import archive_name
from ckpt_tools.formats.zip_layout import lay_out
from ckpt_tools.geometry import Box
from ckpt_tools.index import ObjectEntry, Path
from ckpt_tools.layout import Mesh
from ckpt_tools.plan import FilePlan, Finder, Target, WriteItem


@dataclass(frozen=True, slots=True)
class RankFileStyle:
    """How the files are named, and the torch that is to read them.

    ``naming`` has ``{rank}``, and may have ``{world}`` and ``{family}``. With ``{family}`` and a
    state dict that consists of well-known parts (model, optim, extra_state…) each part has its own
    files, without the part's name in the nesting, as verl writes them; all else is one family,
    ``model``. Each torch reads only the DeviceMesh of its own time: of 2.5 to 2.9, of 2.10 to 2.12,
    or from 2.13 on.
    """

    naming: str = "{family}_world_size_{world}_rank_{rank}.pt"
    torch_version: TorchVersion = NEWEST


class _Family(NamedTuple):
    """What goes into the files of one name; ``depth`` parts of each path are left to the name."""

    name: str
    depth: int
    targets: list[Target]
    objects: list[ObjectEntry]


class _Job(NamedTuple):
    """What all ranks have in common."""

    mesh: Mesh
    device_type: str
    torch_version: TorchVersion


def plan_files(
    targets: Sequence[Target],
    objects: Sequence[ObjectEntry],
    *,
    mesh: Mesh,
    device_type: str,
    style: RankFileStyle = RankFileStyle(),
) -> list[FilePlan]:
    """One file for each rank of the mesh, or one for each rank and each part of the checkpoint.

    Raises UsageError when a layout's mesh has another size than ``mesh`` or the naming has no
    rank, IncompleteError when the source's chunks do not cover a tensor, UnsupportedError for an
    object that was not opened and for paths that exclude each other.
    """
    check_version(style.torch_version)
    job = _Job(mesh, device_type, style.torch_version)
    for target in targets:
        _check(target, mesh)
    finders = {target.fqn: Finder(target.entry) for target in targets}
    plans: list[FilePlan] = []
    for family in _families(targets, objects, naming=style.naming):
        for rank in range(mesh.size):
            path = _filename(style.naming, family=family.name, world=mesh.size, rank=rank)
            plans.append(_plan(family, job, rank=rank, path=path, finders=finders))
    return plans


def _check(target: Target, mesh: Mesh) -> None:
    if target.layout is not None and target.layout.mesh.size != mesh.size:
        raise UsageError(
            f"{target.fqn}: a mesh of {target.layout.mesh.size} ranks ({target.layout.mesh}) in a "
            f"checkpoint for {mesh.size}."
        )


def _filename(naming: str, *, family: str, world: int, rank: int) -> str:
    if "{rank}" not in naming:
        raise UsageError(f"The naming {naming!r} of rank files has no {{rank}}.")
    path = naming.replace("{family}", family).replace("{world}", str(world))
    return path.replace("{rank}", str(rank))


def _families(
    targets: Sequence[Target], objects: Sequence[ObjectEntry], *, naming: str
) -> Iterator[_Family]:
    """The families of files: one for each part of the checkpoint, or one for all."""
    paths = [target.path for target in targets] + [entry.path for entry in objects]
    tops = dict.fromkeys(str(path[0]) for path in paths)
    if "{family}" not in naming or len(tops) < 2 or not _are_parts(paths):
        yield _Family("model", 0, list(targets), list(objects))
        return
    for top in tops:
        yield _Family(
            top,
            1,
            [target for target in targets if target.path[0] == top],
            [entry for entry in objects if entry.path[0] == top],
        )


def _are_parts(paths: Iterable[Path]) -> bool:
    """Whether each path stands in a container that a family of rank files can be named after."""
    known = ("model", "optim", "optimizer")
    return all(
        len(path) > 1 and (path[0] in known or rank_names.holds_other_state(str(path[0])))
        for path in paths
    )


def _plan(
    family: _Family, job: _Job, *, rank: int, path: str, finders: dict[str, Finder]
) -> FilePlan:
    """The file of one rank."""
    shards = _Shards(job, rank=rank)
    leaves = [(t.path[family.depth :], shards.add(t)) for t in family.targets]
    leaves += [(entry.path[family.depth :], object_node(entry)) for entry in family.objects]
    archive = lay_out(dumps(nested(leaves)), shards.storages, archive=archive_name(path))
    items = tuple(
        WriteItem(
            target.fqn,
            path,
            slot.offset,
            box,
            target.entry.dtype,
            target.dtype,
            finders[target.fqn].reads(box),
            slot.crc_at,
        )
        for (target, box), slot in zip(shards.held, archive.slots, strict=True)
        if slot.length
    )
    return FilePlan(path, archive.length, archive.literals, items)


class _Shards:
    """The tensors of one file: ``storages`` by their keys, ``held`` what fills those to come."""

    def __init__(self, job: _Job, *, rank: int) -> None:
        self.storages: list[int | bytes] = []
        self.held: list[tuple[Target, Box]] = []
        self._job = job
        self._rank = rank
        self._meshes: dict[Mesh, RankMesh] = {}

    def add(self, target: Target) -> Node:
        """The node of a tensor, for whose elements a storage is added."""
        if target.layout is None:
            box = Box.whole(target.entry.shape)
            return tensor_node(target.dtype, box.sizes, key=self._hold(target, box))
        layout = target.layout
        box = layout.box(target.entry.shape, layout.mesh.coordinate(self._rank))
        key = self._hold(target, box)
        place = self._job.device_type
        local = tensor_node(target.dtype, box.sizes, key=key, location=place)
        mesh = self._mesh(layout.mesh)
        return dtensor_node(target.dtype, target.entry.shape, local=local, layout=layout, mesh=mesh)

    def _hold(self, target: Target, box: Box) -> int:
        self.storages.append(box.numel * target.dtype.itemsize)
        self.held.append((target, box))
        return len(self.storages) - 1

    def _mesh(self, mesh: Mesh) -> RankMesh:
        known = self._meshes.get(mesh)
        if known is None:
            known = self._meshes[mesh] = rank_mesh(
                mesh,
                rank=self._rank,
                device_type=self._job.device_type,
                key=len(self.storages),
                torch_version=self._job.torch_version,
            )
            self.storages.append(mesh_ranks(mesh))
        return known
