"""The three engines of `reshard`, and what runs them: this process, workers, or ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ckpt_tools.convert.reshard import ReshardPlan, plan_reshard, refuse_check
from ckpt_tools.copying import out_path
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.executors import Listener, Ranks, available
from ckpt_tools.distributed.group import Group, join
from ckpt_tools.distributed.job import Job, dry_run_output
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import ReadOptions, read_index
from ckpt_tools.formats.frameworks import sources_of

Engine = Literal["copy", "dcp", "gather"]
ENGINES: tuple[Engine, ...] = ("copy", "dcp", "gather")


@dataclass(frozen=True, slots=True)
class Request:
    """Which checkpoint, by which engine; ``workers`` are processes started here, 1 for none."""

    ckpt: str
    engine: Engine = "copy"
    workers: int = 1
    read: ReadOptions = field(default_factory=ReadOptions)


def reshard_by(request: Request, job: Job) -> ReshardPlan:
    """Do the job, with all ranks when this process is one of a torchrun job's.

    Raises what `reshard` raises, and UsageError when the engine and the processes do not fit. On
    every rank of a job the same error is raised.
    """
    _refuse_unfit(request, job)
    if environment.place() is None:
        _refuse_alone(request, job)
    listener = Listener(job.on_bytes, job.on_total)
    with available(job.write, workers=request.workers, listener=listener) as executor:
        if request.engine == "gather" and isinstance(executor, Ranks):
            return _by_gather(executor.group, request, job)
        with executor.together():
            executor.admit(job.out)
            index = read_index(request.ckpt, options=request.read)
        if request.engine == "dcp" and isinstance(executor, Ranks):
            from ckpt_tools.distributed import dcp_engine  # torch comes with it

            group = executor.group
            return group.guarded(lambda: dcp_engine.reshard_by_dcp(group, index, job))
        return executor.write(job.of(index))


def _by_gather(group: Group, request: Request, job: Job) -> ReshardPlan:
    from ckpt_tools.distributed import gather_engine  # numpy comes with it

    with group.collective():  # each rank knows its own files only
        out_path.refuse_source(out_path.real(job.out), job.write.sources)
    ckpt, read = request.ckpt, request.read
    return group.guarded(lambda: gather_engine.reshard_by_gather(group, ckpt, job, read=read))


def dry_run(request: Request, job: Job) -> ReshardPlan:
    """Plan the job and refuse what it would refuse, but write nothing.

    `check_room` then checks the space that the plan needs. In a torchrun job rank 0 does this
    alone, unless the engine is `gather`.
    """
    _refuse_unfit(request, job)
    place = environment.place()
    if place is None:
        _refuse_alone(request, job)
    dry_run_output(job.out, job.write, job.write.sources)
    if place is not None and request.engine == "gather":
        from ckpt_tools.distributed import gather_engine

        with join(place, workers=request.workers) as group:
            plan = group.guarded(
                lambda: gather_engine.plan_by_gather(group, request.ckpt, job, read=request.read)
            )
    else:
        index = read_index(request.ckpt, options=request.read)
        if place is not None and request.engine == "dcp":
            from ckpt_tools.distributed import dcp_engine

            dcp_engine.refuse(index, job, world_size=place.world_size)
        dry_run_output(job.out, job.write, [*job.write.sources, *sources_of(index)])
        plan = plan_reshard(index, job.options)
    return plan


def _refuse_unfit(request: Request, job: Job) -> None:
    """Raise UsageError for --check of an output that cannot be read back, and for tensors that are
    renamed or rearranged when an engine of torch is to move them.
    """
    options = job.options
    refuse_check(options, job.write)
    if request.engine == "copy":
        return
    if options.steps or options.layout is not None or options.param_names is not None:
        raise UsageError(
            f"--engine {request.engine} moves tensors as they are: it neither renames nor "
            "rearranges them.",
            hint="--engine copy does, with any number of ranks.",
        )


def _refuse_alone(request: Request, job: Job) -> None:
    """Raise UsageError for an engine that needs a torchrun job."""
    if request.engine == "copy":
        return
    ranks = job.options.mesh.size if request.engine == "dcp" else "N"
    whose = "the target mesh" if request.engine == "dcp" else "the source: N is their number"
    raise UsageError(
        f"--engine {request.engine} needs a torchrun job with one rank for each of {whose}.",
        hint=f"torchrun --nproc-per-node {ranks} -m ckpt_tools reshard … --engine {request.engine}"
        ", or --engine copy, which needs none.",
    )
