"""The engine `gather`: as many ranks as the source has, each of which opens only its own files.

The files may lie on local disks of the ranks' nodes. Headers are exchanged, so that every rank
makes the same plan; then torch gathers one tensor at a time from DTensors on the source's mesh, and
each rank writes its part of the output. Memory is that of the largest tensor.

The gathered tensor is checked: each rank finds its own shard in it, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from ckpt_tools import formats
from ckpt_tools.convert.check import held_in
from ckpt_tools.convert.reshard import ReshardPlan, plan_reshard
from ckpt_tools.convert.write import Locate, Plan, WriteOptions
from ckpt_tools.copying.resume import OutputPlace, logged
from ckpt_tools.copying.write import write_files
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.known_crcs import KnownCrcs
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.plan import FilePlan, LazyPlans, WriteItem
from ckpt_tools.core.progress import ignore_bytes
from ckpt_tools.distributed import devices
from ckpt_tools.distributed.agreement import Progress, begin, require_all_written
from ckpt_tools.distributed.executors import lead_or_follow
from ckpt_tools.distributed.gathering import Gathering, Source
from ckpt_tools.distributed.group import Group
from ckpt_tools.distributed.job import Job
from ckpt_tools.errors import CkptError, UnsupportedError
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.formats.rank_files import exchange as rank_exchange
from ckpt_tools.formats.rank_files.exchange import RankHeaders
from ckpt_tools.formats.rank_files.file_names import Family
from ckpt_tools.proof.damage import check_copied
from ckpt_tools.storage.reader import Files

T = TypeVar("T")


def reshard_by_gather(group: Group, job: Job) -> ReshardPlan:
    """`reshard` from rank files that only their own ranks can open.

    Raises what `reshard` raises; UsageError when the job has not one rank for each of the source,
    IncompleteError when a rank does not find its files.
    """
    with group.collective(), devices.process_group(group) as device_type:
        index, headers = _exchange(group, job.ckpt, job.read)
        # Rank 0 may not see what it would have to compare, so that all ranks do it themselves.
        write = replace(job.write, check=False, resume=False, verify_source=False)
        alone = job._replace(write=write)
        gatherer = _Gatherer(group, index, headers, device_type, job)
        plan = lead_or_follow(group, alone.of(index), gatherer)
        return job.noting_resume(replace(plan, notes=(*plan.notes, *gatherer.proven)))


class _RanksPart(NamedTuple):
    """What a rank writes: parts of files that it copies, and those of each tensor that all ranks
    gather; ``planned`` bytes are those of all ranks.
    """

    uncut: list[FilePlan]
    cut: dict[str, list[FilePlan]]
    planned: int


@dataclass(frozen=True, slots=True)
class _Gatherer:
    """Executes a plan on every rank; ``proven`` says what --check has found."""

    group: Group
    index: CheckpointIndex
    headers: Sequence[RankHeaders]
    device_type: str
    job: Job
    proven: list[str] = field(default_factory=list)
    locate: Locate = formats.locate

    def run(self, plan: Plan, place: OutputPlace, seen: KnownCrcs) -> None:
        """Copy what was saved whole, gather the rest, and check that all is written."""
        plans = begin(self.group, plan.files, place, self.job.write.sizes)
        if plans:
            with logged(place, self.group.rank):  # another attempt waits for the lock
                self._run(plans, place.folder, seen)

    def _run(self, plans: LazyPlans, folder: str, seen: KnownCrcs) -> None:
        group, sizes = self.group, self.job.write.sizes
        _create(group, plans, folder)
        mine = self._part_of(plans)
        progress = Progress(group, self.job.listener.on_bytes)
        options, done = self.job.write, 0

        def write(plans: Sequence[FilePlan], files: Files) -> None:
            nonlocal done
            done += _write(
                plans, files, folder=folder, options=options, on_bytes=progress.add, seen=seen
            )

        # No rank may be missing in a collective.
        with group.collective(), Files(sizes=sizes) as files:
            write(mine.uncut, files)
        with Files(sizes=sizes) as files:
            source = Source(self.index, self.headers[group.rank].parts(), files, seen)
            Gathering(group, source, self.device_type).run(mine.cut, write)
        require_all_written(group, plans, folder, nbytes=done, planned=mine.planned)
        own = self.headers[group.rank].sizes
        if options.checks_source:
            with group.collective(), Files(sizes=sizes) as files:
                held, threads = held_in(self.index, own), options.threads
                unchecked = check_copied(held, files, seen=seen, threads=threads)
            self.proven.extend(unchecked)
        if options.check:
            self.proven.append(_check(group, self.index, self.job, folder, own=own))

    def _part_of(self, plans: LazyPlans) -> _RanksPart:
        """What this rank writes, in one pass over all plans; each of them is made for it."""
        group = self.group
        owners = {path: one.rank for one in self.headers for path in one.sizes}
        tensors = frozenset(e.fqn for e in self.index.tensors if e.layout is not None)
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
        return _RanksPart(uncut, cut, planned)


def _check(
    group: Group, index: CheckpointIndex, job: Job, folder: str, *, own: Collection[str]
) -> str:
    """Have every rank compare what it holds of the source with the output; says what is proven."""
    from ckpt_tools.convert import check as checking  # the proofs: only --check pays for them

    with group.collective(), Files(sizes=job.write.sizes) as files:
        plan = plan_reshard(index, job.options)
        statement = checking.check(
            folder,
            checking.Written(plan.targets),
            files,
            source=plan.chosen,
            threads=job.write.threads,
            own=own,
        )
    if group.rank == 0:
        checking.record_beside(folder, statement, source=index)
    return statement


def plan_by_gather(group: Group, job: Job) -> ReshardPlan:
    """What `reshard_by_gather` would do, and refuse; nothing is written."""
    with group.collective(), devices.process_group(group):
        index, _ = _exchange(group, job.ckpt, job.read)
        return plan_reshard(index, job.options)


def _exchange(
    group: Group, ckpt: str, read: ReadOptions
) -> tuple[CheckpointIndex, list[RankHeaders]]:
    """The index of all ranks' files, and the headers of each rank, from own files alone."""
    families = rank_exchange.families_of(_exchanged(rank_exchange.listing(ckpt)), where=ckpt)
    source = Mesh((rank_exchange.world_size(families),))
    devices.require_world(group.size, source, engine="gather", whose="the source")
    headers = _exchanged(_own_headers(group, families, ckpt, read))
    return rank_exchange.joined_index(ckpt, headers, families), headers


def _exchanged(mine: T) -> list[T]:
    """The values of all ranks, in their order."""
    import torch.distributed as dist

    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return [one for one in values if one is not None]


def _own_headers(
    group: Group, families: Sequence[Family], ckpt: str, read: ReadOptions
) -> RankHeaders:
    """This rank's headers, when every rank has read its own."""
    try:
        headers = rank_exchange.read_headers(families, rank=group.rank, where=ckpt, options=read)
    except CkptError as error:
        group.barrier(error)
        raise
    group.barrier()
    return headers


def _write(
    plans: Sequence[FilePlan],
    files: Files,
    *,
    folder: str,
    options: WriteOptions,
    on_bytes: Callable[[int], None],
    seen: KnownCrcs,
) -> int:
    """Write parts of files, without a log of finished ones; gives the bytes of the tasks done."""
    return write_files(
        LazyPlans.of(plans),
        root=folder,
        files=files,
        threads=options.threads,
        max_memory=options.max_memory,
        on_bytes=on_bytes,
        on_run=seen.add if options.checks_source else None,
    )


def _create(group: Group, plans: LazyPlans, folder: str) -> None:
    """Rank 0 makes every file with its length, and all that is known of it already."""
    if group.rank == 0:
        with Files() as files:
            for plan in plans:
                bare = [plan._replace(items=())]
                _write(
                    bare,
                    files,
                    folder=folder,
                    options=WriteOptions(),
                    on_bytes=ignore_bytes,
                    seen=KnownCrcs(),
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
