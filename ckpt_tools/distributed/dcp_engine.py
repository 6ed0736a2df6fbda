"""The engine `dcp`: torch's own distributed checkpoint, with one rank for each of the target's.

Every rank makes empty DTensors in the new placement, `dcp.load` fills them, `dcp.save` writes them:
what a training job would do, without its model. Each rank holds its own shards, all at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools import formats
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.reshard import ReshardOptions
from ckpt_tools.convert.write import Locate, WriteOptions
from ckpt_tools.copying.parallel import Listener
from ckpt_tools.copying.resume import OutputPlace, writing
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.index import CheckpointIndex, ObjectEntry
from ckpt_tools.core.plan import Target
from ckpt_tools.core.text import some
from ckpt_tools.distributed import devices
from ckpt_tools.distributed.agreement import begin
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import (
    CheckpointError,
    UnreadableError,
    UnsupportedError,
    UsageError,
    WriteError,
)
from ckpt_tools.formats import ReadOptions, read_written
from ckpt_tools.formats.dcp.write import archive_of
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

_COPY_DOES_IT = "--engine copy does it: it reads every format, and needs no torchrun."


@contextmanager
def executor(
    options: ReshardOptions, group: Group, write: WriteOptions, listener: Listener
) -> Iterator[_LoadAndSave]:
    """All ranks of a job, with torch's process group, as what executes a reshard.

    Reading the index raises UsageError when the job has not one rank for each of the target mesh,
    UnsupportedError when torch cannot load the source; running UnsupportedError when torch would
    place a shard wrong.
    """
    with group.collective(), devices.process_group(group) as device_type:
        yield _LoadAndSave(group, options, write, listener, device_type)


@dataclass(frozen=True, slots=True)
class _LoadAndSave:
    """Executes a plan on every rank by torch's own functions."""

    group: Group
    options: ReshardOptions
    write: WriteOptions
    listener: Listener
    device_type: str
    locate: Locate = formats.locate_later

    def read_index(self, path: str, options: ReadOptions) -> CheckpointIndex:
        """The index of a path. Raises what torch's own functions cannot do with it."""
        index = formats.read_index(path, options)
        _refuse(index.closed(), self.options, world_size=self.group.size)
        return index

    def run(
        self,
        index: CheckpointIndex,
        plan: Plan,
        place: OutputPlace,
        seen: KnownCrcs,  # noqa: ARG002 (torch reads)
    ) -> None:
        """Load into empty tensors in their new placement, save them, see that all is there."""
        if begin(self.group, plan.files, place, self.write.sizes, source=index):
            with writing(place):
                self._run(index, plan, place)

    def _run(self, index: CheckpointIndex, plan: Plan, place: OutputPlace) -> None:
        group = self.group
        mesh = devices.device_mesh(self.options.mesh, self.device_type)
        mine = [target.entry for target in plan.targets[group.rank :: group.size]]
        with group.collective(), Files() as files:  # no rank may be missing in a collective
            inside = frozenset().union(*(one.held for one in index.packed))
            parts = [target.fqn for target in plan.targets if target.fqn in inside]
            if parts:
                raise UnsupportedError(
                    f"{some(parts)}: inside of an item of {index.root}, which dcp.load loads as a "
                    "whole.",
                    hint=_COPY_DOES_IT,
                )
            formats.located_in(plan.source, mine, files)  # torch loads items of wrong shapes, too
            state = {
                target.fqn: _empty(target, mesh, self.device_type, rank=group.rank)
                for target in plan.targets
            }
        _load_and_save(state, index.closed(), plan, place.unfinished)
        own = plan.files.files[group.rank :: group.size]
        self.listener.on_bytes(sum(file.length for file in own))
        with group.collective():
            if group.rank == 0:
                _require_saved(plan, place.unfinished)
                for name in os.listdir(place.unfinished):
                    place.finish(name)


def _refuse(index: CheckpointIndex, options: ReshardOptions, *, world_size: int) -> None:
    """Raise UnsupportedError or UsageError for what torch's own functions cannot do."""
    devices.require_world(world_size, options.mesh, engine="dcp", whose="the target mesh")
    if options.format != "dcp":
        raise UsageError(
            f"--engine dcp writes --format dcp, not {options.format}.", hint=_COPY_DOES_IT
        )
    if index.format != "dcp" or not os.path.exists(os.path.join(index.root, ".metadata")):
        raise UnsupportedError(
            f"{index.root} is not a DCP directory with a .metadata, so dcp.load cannot read it.",
            hint=_COPY_DOES_IT,
        )
    beside = [e.fqn for e in index.objects if not e.opened and _is_beside(e)]
    if beside:
        raise UnsupportedError(
            f"{index.root} keeps {some(beside)} beside its DCP files, which dcp.load cannot read.",
            hint=_COPY_DOES_IT,
        )
    chunks = [chunk for entry in index.tensors for chunk in entry.chunks[:1]]
    foreign = sorted({str(c.codec) for c in chunks if c.codec not in (None, "torch.save")})
    if foreign:
        raise UnsupportedError(
            f"{index.root} holds {', '.join(foreign)} items, which dcp.load may not read.",
            hint=_COPY_DOES_IT,
        )


def _is_beside(entry: ObjectEntry) -> bool:
    """Whether an object is in a file of its own, as what Lightning keeps in meta.pt."""
    return entry.codec is None or not entry.data.path.endswith(".distcp")


def _empty(target: Target, mesh: DeviceMesh, device_type: str, *, rank: int) -> torch.Tensor:
    """An empty tensor in its new placement: a DTensor, or a plain one where all ranks hold all."""
    import torch

    shape, layout = target.entry.shape, target.layout
    dtype = getattr(torch, target.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"torch {torch.__version__} has no element type {target.dtype.name}."
        )
    if layout is None:
        return torch.empty(shape, dtype=dtype, device=device_type)
    if layout.mesh.shape != tuple(mesh.shape):
        raise UnsupportedError(
            f"{target.fqn} lies on a mesh of its own, {layout.mesh}, and not on the target's.",
            hint=_COPY_DOES_IT,
        )
    sizes = devices.check_box(layout, shape, mesh, fqn=target.fqn, rank=rank)
    local = torch.empty(sizes, dtype=dtype, device=device_type)
    return devices.dtensor(local, layout, mesh, shape=shape)


def _require_saved(plan: Plan, folder: str) -> None:
    """Raise WriteError unless every file that the new .metadata names is there, and every tensor.

    `dcp.save` chooses its own file names and lengths, so the plan's are not compared.
    """
    try:
        saved = read_written(folder)
        saved.require_whole()
    except CheckpointError as error:
        raise WriteError(
            f"{folder} is incomplete: {error.message}",
            hint="OUT was not created. Do all ranks see the same file system?",
        ) from error
    expected = {(t.fqn, t.dtype.name, t.entry.shape) for t in plan.targets}
    missing = expected - {(e.fqn, e.dtype.name, e.shape) for e in saved.tensors}
    if missing:
        raise WriteError(
            f"{folder} is incomplete: {len(missing)} of {len(expected)} tensors are not in "
            f"its .metadata as planned, e.g. {min(missing)[0]}."
        )


def _load_and_save(
    state: dict[str, torch.Tensor], index: CheckpointIndex, plan: Plan, folder: str
) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from ckpt_tools.distributed.dcp_planners import LoadPlanner, SavePlanner, Writer

    chosen = {entry.fqn for entry in plan.objects}
    objects = [entry for entry in index.objects if entry.fqn in chosen]
    unordered: dict[str, object] = {**state, **{entry.fqn: b"" for entry in objects}}
    places = {
        fqn: place for place, fqn in enumerate(index.nesting.leaves())
    }  # torch goes by this order, too
    names = sorted(unordered, key=lambda fqn: (places.get(fqn, len(places)), fqn))
    whole = {fqn: unordered[fqn] for fqn in names}
    # What a file beside holds is no item to load; its value is saved as the other engines do.
    beside = {e.fqn: archive_of(e) for e in objects if _is_beside(e)}
    loaded = {fqn: value for fqn, value in whole.items() if fqn not in beside}
    with _one_line_errors(UnreadableError, f"dcp.load of {index.root}"):
        load(loaded, storage_reader=FileSystemReader(index.root), planner=LoadPlanner())
    whole |= loaded | beside
    paths = {target.fqn: target.path for target in plan.targets}
    paths |= {entry.fqn: entry.path for entry in objects}
    with _one_line_errors(WriteError, f"dcp.save to {folder}"):
        save(whole, storage_writer=Writer(folder), planner=SavePlanner(paths))


@contextmanager
def _one_line_errors(kind: type[UnreadableError | WriteError], what: str) -> Iterator[None]:
    """Say in one line what torch raises for all ranks together, with a traceback of each."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        lines = str(failure).splitlines() or [""]
        raise kind(
            f"{what} failed on rank {rank}: {type(failure).__name__}: {lines[0]}",
            hint="--engine copy does the same without torch, with more precise errors.",
        ) from error
