"""The engine `copy`: byte ranges to byte ranges, in this process, in workers, or in a job's ranks.

However many processes take part, the bytes are the same: the plan alone says what they are. The
ranks of a job need a file system that all of them see, and talk only to start and to end together.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.convert.reshard import (
    CarryOut,
    ReshardPlan,
    plan_reshard,
    reshard,
)
from ckpt_tools.copying import out_path
from ckpt_tools.copying.resume import Place
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import FilePlan, total_length
from ckpt_tools.distributed.agreement import Progress, begin, require_all_written
from ckpt_tools.distributed.group import Group
from ckpt_tools.distributed.job import Job
from ckpt_tools.distributed.workers import Order, write_share, write_with_workers
from ckpt_tools.formats.frameworks import sources_of
from ckpt_tools.storage import upload
from ckpt_tools.storage.paths import is_address


def reshard_here(index: CheckpointIndex, job: Job, *, workers: int) -> ReshardPlan:
    """`reshard` with the threads of this process, or with several workers on this machine.

    An address gets what was made whole here first. Raises what `reshard` and `uploads.staged`
    raise, and WriteError when a worker dies.
    """
    job = job._replace(out=out_path.real(job.out))
    if is_address(job.out):
        out_path.refuse_source(job.out, [*job.write.sources, *sources_of(index)])
        with upload.staged(job.out, force=job.write.force, resume=job.write.resume) as here:
            return reshard_here(index, job._replace(out=here), workers=workers)

    def carry_out(plans: Sequence[FilePlan], place: Place) -> None:
        if not plans:
            return
        order = _order(job, plans, place, count=workers)
        job.on_total(total_length(plans))
        if workers == 1:
            write_share(order, 0, on_bytes=job.on_bytes)
        else:
            write_with_workers(order, on_bytes=job.on_bytes)

    return reshard(index, job.out, options=job.options, write=job.write, carry_out=carry_out)


def reshard_as_group(group: Group, index: CheckpointIndex, job: Job) -> ReshardPlan:
    """`reshard` by all ranks of a job: rank 0 makes and renames the folder, all fill it.

    Raises what `reshard` raises, on all ranks the same.
    """

    def share(plans: Sequence[FilePlan], place: Place) -> None:
        plans = begin(group, plans, place, source=index)
        if not plans:
            return
        order = _order(job, plans, place, count=group.size)
        job.on_total(total_length(plans) // group.size)
        progress = Progress(group, job.on_bytes)
        with group.collective():  # nobody writes any more when rank 0 tidies up
            write_share(order, group.rank, on_bytes=progress.add)
        require_all_written(group, plans, place.folder, nbytes=progress.nbytes)

    with group.collective():
        return lead_or_follow(group, index, job, share=share)


def lead_or_follow(
    group: Group, index: CheckpointIndex, job: Job, *, share: CarryOut
) -> ReshardPlan:
    """Plan on every rank, and do its ``share`` in the folder that rank 0 makes and renames."""
    if group.rank == 0:
        return reshard(index, job.out, options=job.options, write=job.write, carry_out=share)
    plan = plan_reshard(index, job.options)
    share(plan.files, job.place)
    return plan


def _order(job: Job, plans: Sequence[FilePlan], place: Place, *, count: int) -> Order:
    write = job.write
    return Order(plans, place, count, write.threads, write.max_memory)
