"""`export` by worker processes on this machine, or by the ranks of a torchrun job.

Several fill one file, and the bytes are the same however many take part: the plan alone says what
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.convert import export as convert
from ckpt_tools.convert.export import ExportOptions, ExportPlan, WriteOptions
from ckpt_tools.copying import atomic_output
from ckpt_tools.copying.resume import Place
from ckpt_tools.copying.tasks import Share, cut, share_of
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import FilePlan
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.agreement import Progress, begin, require_all_written
from ckpt_tools.distributed.group import Group, join
from ckpt_tools.distributed.job import ignore, rehearse_output
from ckpt_tools.distributed.workers import Order, write_share, write_with_workers
from ckpt_tools.formats import ReadOptions, read_index
from ckpt_tools.formats.frameworks import sources_of
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms.base import Work


class ExportJob(NamedTuple):
    """An export to ``out``; ``on_bytes`` and ``on_total`` are told what a `Job`'s are."""

    out: str
    write: WriteOptions
    on_bytes: Callable[[int], None]
    on_total: Callable[[int], None] = ignore


def export_by(
    ckpt: str,
    asked: Callable[[CheckpointIndex], ExportOptions],
    job: ExportJob,
    *,
    read: ReadOptions,
    workers: int,
) -> ExportPlan:
    """Export what is ``asked`` of the index that is read: with all ranks when this process is one
    of a torchrun job's, else as `export_here` does.

    Raises what `read_index` and `export_here` raise, and UsageError for workers beside ranks, or an
    address; on every rank of a job the same.
    """
    place = environment.place()
    if place is None:
        if not is_address(job.out):
            _admit(job)
        index = read_index(ckpt, options=read)
        return export_here(index, asked(index), job, workers=workers)
    with join(place, workers=workers) as group:
        with group.collective():
            if group.rank == 0:
                _admit(job)
            index = read_index(ckpt, options=read)
            options = asked(index)
        return _as_group(group, index, options, job)


def rehearse(
    ckpt: str,
    asked: Callable[[CheckpointIndex], ExportOptions],
    job: ExportJob,
    *,
    read: ReadOptions,
) -> ExportPlan:
    """Plan the export and refuse what `export_by` would refuse, but write nothing.

    What only the plan shows to be in the way, such as too little space, `check_room` says.
    """
    rehearse_output(job.out, job.write, job.write.sources)
    index = read_index(ckpt, options=read)
    rehearse_output(job.out, job.write, [*job.write.sources, *sources_of(index)])
    options = asked(index)
    single_file = convert.single_file_of(job.out, options.format)
    return convert.plan_export(index, options, single_file=single_file, check=job.write.check)


def _admit(job: ExportJob) -> None:
    """Refuse an output before a large index is read for it; `convert.export` looks again."""
    write = job.write
    atomic_output.admit(job.out, sources=write.sources, force=write.force, resume=write.resume)


def export_here(
    index: CheckpointIndex, options: ExportOptions, job: ExportJob, *, workers: int
) -> ExportPlan:
    """`convert.export` with the threads of this process, or with several workers on this machine.

    Raises what `convert.export` raises, and WriteError when a worker dies.
    """

    def carry_out(plan: ExportPlan, place: Place) -> None:
        if not plan.files:
            return
        with Files() as files:
            convert.do_works(plan.works, files)
        job.on_total(_nbytes(plan))
        order = _order(job, plan, place, count=workers)
        if workers == 1:
            write_share(order, 0, on_bytes=job.on_bytes)
        else:
            write_with_workers(order, on_bytes=job.on_bytes)

    return convert.export(index, job.out, options=options, write=job.write, carry_out=carry_out)


def _as_group(
    group: Group, index: CheckpointIndex, options: ExportOptions, job: ExportJob
) -> ExportPlan:
    """Rank 0 makes and renames the output, all fill it."""

    def share(plan: ExportPlan, place: Place) -> None:
        left = begin(group, plan.files, place, source=index)
        if not left:
            return
        plan = replace(plan, files=tuple(left))
        job.on_total(_nbytes(plan) // group.size)
        order = _order(job, plan, place, count=group.size)
        progress = Progress(group, job.on_bytes)
        with group.collective():  # nobody writes any more when rank 0 tidies up
            with Files() as files:
                mine = _needed(plan.works, plan.files, Share(group.rank, group.size))
                convert.do_works(mine, files)
            write_share(order, group.rank, on_bytes=progress.add)
        require_all_written(group, plan.files, place.folder, nbytes=progress.nbytes)

    with group.collective():
        if group.rank == 0:
            return convert.export(index, job.out, options=options, write=job.write, carry_out=share)
        single_file = convert.single_file_of(job.out, options.format)
        plan = convert.plan_export(index, options, single_file=single_file, check=job.write.check)
        share(plan, atomic_output.place_of(job.out))
        return plan


def _order(job: ExportJob, plan: ExportPlan, place: Place, *, count: int) -> Order:
    write = job.write
    return Order(plan.files, place, count, write.threads, write.max_memory)


def _nbytes(plan: ExportPlan) -> int:
    """Bytes that will be written."""
    return sum(file.length for file in plan.files)


def _needed(works: Sequence[Work], plans: Sequence[FilePlan], share: Share) -> list[Work]:
    """The works whose bytes this share reads: each rank makes them on its own disk."""
    if not works:
        return []
    tasks = share_of([task for plan in plans for task in cut(plan)], share)
    read = {
        read.chunk.data.path for task in tasks for piece in task.pieces for read in piece.item.reads
    }
    return [work for work in works if work.path in read]
