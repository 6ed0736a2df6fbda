"""The engine `gather`: as many ranks as the source has, each of which opens only its own files.

The files may lie on local disks of the ranks' nodes. Headers are exchanged, so that every rank
makes the same plan; then torch gathers one tensor at a time from DTensors on the source's mesh, and
each rank writes its part of the output. Memory is that of the largest tensor.

The gathered tensor is checked: each rank finds its own shard in it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from ckpt_tools import formats
from ckpt_tools.convert import check as checking
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.write import Locate, WriteOptions
from ckpt_tools.copying.parallel import Listener, ignore_bytes
from ckpt_tools.copying.resume import Finisher, OutputPlace, finishing, writing
from ckpt_tools.copying.tasks import MIN_MEMORY
from ckpt_tools.copying.write import write_files
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.plan import FilePlan, LazyPlans, WriteItem
from ckpt_tools.distributed import devices
from ckpt_tools.distributed.agreement import begin, require_all_written, stopping
from ckpt_tools.distributed.gathering import Gathering
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.rank_files import exchange as rank_exchange
from ckpt_tools.formats.rank_files.read import RankHeaders
from ckpt_tools.proof.damage import check_copied
from ckpt_tools.storage.reader import Files

T = TypeVar("T")


@contextmanager
def executor(group: Group, write: WriteOptions, listener: Listener) -> Iterator[_Gatherer]:
    """All ranks of a job, with torch's process group, as what executes a reshard of rank files.

    Reading the index raises UsageError when the job has not one rank for each of the source,
    IncompleteError when a rank does not find its files.
    """
    with group.collective(), devices.process_group(group) as device_type:
        yield _Gatherer(group, write, listener, device_type)


@dataclass(frozen=True, slots=True)
class _Gatherer:
    """Executes a plan on every rank; ``headers`` are those of each, once the index is read.

    Rank 0 may not see what it would have to compare, so that all ranks do it themselves.
    """

    group: Group
    write: WriteOptions
    listener: Listener
    device_type: str
    headers: list[RankHeaders] = field(default_factory=list)
    locate: Locate = formats.locate

    def read_index(self, path: str, options: ReadOptions) -> CheckpointIndex:
        """The index of all ranks' files, each of which is read by its own rank alone."""
        families = rank_exchange.families_of(_exchanged(rank_exchange.listing(path)), where=path)
        source = Mesh((rank_exchange.world_size(families),))
        devices.require_world(self.group.size, source, engine="gather", whose="the source")
        with self.group.collective():
            mine = rank_exchange.read_headers(
                families, rank=self.group.rank, where=path, options=options
            )
        self.headers[:] = _exchanged(mine)
        return rank_exchange.joined_index(path, self.headers, families)

    def run(
        self, index: CheckpointIndex, plan: Plan, place: OutputPlace, seen: KnownCrcs
    ) -> tuple[str, ...]:
        """Copy what was saved whole, gather the rest, and check that all is written."""
        left = begin(self.group, plan.files, place, self.write.sizes)
        if not left:
            return ()
        with writing(place):
            self._fill(index, left, place, seen)
            seen.overflowed.update(*_exchanged(seen.overflowed))
            return self._compared(index, plan, place.folder, seen)

    def _fill(
        self, index: CheckpointIndex, plans: LazyPlans, place: OutputPlace, seen: KnownCrcs
    ) -> None:
        group, options = self.group, self.write
        uncut, cut, planned = self._part_of(plans, index)
        on_bytes, done = stopping(group, self.listener.on_bytes), 0

        def write(plans: Sequence[FilePlan], files: Files) -> None:
            nonlocal done
            done += write_files(
                LazyPlans.of(plans),
                root=place.unfinished,
                files=files,
                threads=options.threads,
                max_memory=options.max_memory,
                on_bytes=on_bytes,
                on_file=lambda path, _: finisher.written(path, is_whole=False),
                on_run=seen.add if options.checks_source else None,
                on_overflow=seen.overflowed.add,
            )

        with finishing(place) as finisher:
            _create(group, plans, place.unfinished, finisher)
            # No rank may be missing in a collective.
            with group.collective(), Files(sizes=options.sizes) as files:
                write(uncut, files)
            with Files(sizes=options.sizes) as files:
                parts = rank_exchange.parts_in(self.headers[group.rank])
                Gathering(group, self.device_type, index, parts, files, seen).run(cut, write)
        require_all_written(group, plans, place, nbytes=done, planned=planned)

    def _compared(
        self, index: CheckpointIndex, plan: Plan, folder: str, seen: KnownCrcs
    ) -> tuple[str, ...]:
        """Have every rank compare what it holds of the source; notes say what is proven."""
        group, threads = self.group, self.write.threads
        own = self.headers[group.rank].sizes
        if not self.write.check and not self.write.checks_source:
            return ()
        with group.collective(), Files(sizes=self.write.sizes) as files:
            if not self.write.check:
                held = checking.held_in(index, own)
                return check_copied(held, files, seen=seen, threads=threads)
            statement = checking.check(folder, plan, files, threads=threads, own=own)
        if group.rank == 0:
            checking.record(folder, plan, statement)
        return (statement,)

    def _part_of(
        self, plans: LazyPlans, index: CheckpointIndex
    ) -> tuple[list[FilePlan], dict[str, list[FilePlan]], int]:
        """The parts of files that this rank copies, those of each tensor that all ranks gather, and
        the bytes of all ranks: in one pass over all plans, each of which is made for it.
        """
        group = self.group
        owners = {path: rank for rank, one in enumerate(self.headers) for path in one.sizes}
        tensors = frozenset(e.fqn for e in index.tensors if e.layout is not None)
        uncut: list[FilePlan] = []
        cut: dict[str, list[FilePlan]] = {}
        planned = 0  # the rest is there from the start
        for number, plan in enumerate(plans):
            planned += sum(item.box.numel * item.target.itemsize for item in plan.items)
            items = [i for i in plan.items if i.fqn not in tensors]
            items = [i for i in items if _owner(i, owners) == group.rank]
            if items:
                uncut.append(plan._replace(literals=(), items=tuple(items)))
            for item in plan.items:
                if item.fqn in tensors:
                    mine = cut.setdefault(item.fqn, [])  # every rank takes part in gathering it
                    if number % group.size == group.rank:
                        mine.append(plan._replace(literals=(), items=(item,)))
        return uncut, cut, planned


def _exchanged(mine: T) -> list[T]:
    """The values of all ranks, in their order."""
    import torch.distributed as dist

    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return [one for one in values if one is not None]


def _create(group: Group, plans: LazyPlans, folder: str, finisher: Finisher) -> None:
    """Rank 0 makes every file with its length, and all that is known of it already."""
    if group.rank == 0:
        with Files() as files:
            for plan in plans:
                write_files(
                    LazyPlans.of([plan._replace(items=())]),
                    root=folder,
                    files=files,
                    threads=1,
                    max_memory=MIN_MEMORY,
                    on_bytes=ignore_bytes,
                    on_file=lambda path, _: finisher.written(path, is_whole=False),
                )
    group.barrier()


def _owner(item: WriteItem, owners: Mapping[str, int]) -> int:
    """The rank that can read what an item needs."""
    ranks = {owners.get(read.chunk.data.path) for read in item.reads}
    if len(ranks) > 1 or None in ranks:
        raise UnsupportedError(
            f"{item.fqn}: no rank alone has all of it, and it is not a DTensor.",
            hint="Bring all rank files into one folder, and use --engine copy.",
        )
    rank = next(iter(ranks), 0)
    return 0 if rank is None else rank
