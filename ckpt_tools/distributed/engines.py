"""The three engines of `reshard`, and what runs them: this process, workers, or ranks."""

from __future__ import annotations

from ckpt_tools.convert.reshard import ReshardPlan, plan_reshard, refuse_check
from ckpt_tools.copying import out_path
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.executors import Ranks, available
from ckpt_tools.distributed.group import Group, join
from ckpt_tools.distributed.job import Job, dry_run_output
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import read_index
from ckpt_tools.formats.frameworks import sources_of


def reshard_by(job: Job) -> ReshardPlan:
    """Do the job, with all ranks when this process is one of a torchrun job's.

    Raises what `reshard` raises, and UsageError when the engine and the processes do not fit. On
    every rank of a job the same error is raised.
    """
    _refuse_unfit(job)
    if environment.place() is None:
        _refuse_alone(job)
    with available(
        job.write, workers=job.workers, listener=job.listener, texts=job.texts
    ) as executor:
        if job.engine == "gather" and isinstance(executor, Ranks):
            return _by_gather(executor.group, job)
        with executor.together():
            executor.admit(job.out)
            index = read_index(job.ckpt, options=job.read)
        if job.engine == "dcp" and isinstance(executor, Ranks):
            from ckpt_tools.distributed import dcp_engine  # torch comes with it

            group = executor.group
            return group.guarded(lambda: dcp_engine.reshard_by_dcp(group, index, job))
        return executor.write(job.of(index))


def _by_gather(group: Group, job: Job) -> ReshardPlan:
    from ckpt_tools.distributed import gather_engine  # numpy comes with it

    with group.collective():  # each rank knows its own files only
        out_path.refuse_source(out_path.real(job.out), job.write.sources)
    return group.guarded(lambda: gather_engine.reshard_by_gather(group, job))


def dry_run(job: Job) -> ReshardPlan:
    """Plan the job and refuse what it would refuse, but write nothing.

    `check_room` then checks the space that the plan needs. In a torchrun job rank 0 does this
    alone, unless the engine is `gather`.
    """
    _refuse_unfit(job)
    place = environment.place()
    if place is None:
        _refuse_alone(job)
    dry_run_output(job.out, job.write, job.write.sources)
    if place is not None and job.engine == "gather":
        from ckpt_tools.distributed import gather_engine

        with join(place, workers=job.workers) as group:
            plan = group.guarded(lambda: gather_engine.plan_by_gather(group, job))
    else:
        index = read_index(job.ckpt, options=job.read)
        if place is not None and job.engine == "dcp":
            from ckpt_tools.distributed import dcp_engine

            dcp_engine.refuse(index, job, world_size=place.world_size)
        dry_run_output(job.out, job.write, [*job.write.sources, *sources_of(index)])
        plan = plan_reshard(index, job.options)
    return plan


def _refuse_unfit(job: Job) -> None:
    """Raise UsageError for --check of an output that cannot be read back, and for tensors that are
    renamed or rearranged when an engine of torch is to move them.
    """
    options = job.options
    refuse_check(options, job.write)
    if job.engine == "copy":
        return
    if options.steps or options.layout is not None or options.param_names is not None:
        raise UsageError(
            f"--engine {job.engine} moves tensors as they are: it neither renames nor "
            "rearranges them.",
            hint="--engine copy does, with any number of ranks.",
        )


def _refuse_alone(job: Job) -> None:
    """Raise UsageError for an engine that needs a torchrun job."""
    if job.engine == "copy":
        return
    ranks = job.options.mesh.size if job.engine == "dcp" else "N"
    whose = "the target mesh" if job.engine == "dcp" else "the source: N is their number"
    raise UsageError(
        f"--engine {job.engine} needs a torchrun job with one rank for each of {whose}.",
        hint=f"torchrun --nproc-per-node {ranks} -m ckpt_tools reshard … --engine {job.engine}"
        ", or --engine copy, which needs none.",
    )
