"""Runs a conversion: in this process, with workers on this machine, or with all ranks of a job.

Several fill one file, and the bytes are the same however many take part: the plan alone says what
they are. The ranks of a job need a shared file system, and communicate only at the start and at
the end. Each reads the whole index, for a `.metadata` is one pickle, of which no part can be read
alone, and knows the lengths of all files; then it plans the files of its share, and locates what
these read. The engines `dcp` and `gather` execute a plan in other ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from ckpt_tools import formats
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.write import (
    Conversion,
    Executor,
    Locate,
    P,
    Read,
    ShareOrder,
    WriteOptions,
    write_share,
)
from ckpt_tools.convert.write import write as write_by
from ckpt_tools.copying import atomic_output, out_path
from ckpt_tools.copying.parallel import SILENT, Listener
from ckpt_tools.copying.resume import OutputPlace
from ckpt_tools.copying.tasks import ALL, MIN_MEMORY, Share, files_of_share, groups_of
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed import environment
from ckpt_tools.errors import UsageError
from ckpt_tools.storage import upload
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files
from ckpt_tools.storage.waiting import WAITING
from ckpt_tools.transforms.base import Works

if TYPE_CHECKING:
    from ckpt_tools.convert.reshard import ReshardOptions
    from ckpt_tools.distributed.environment import RankPlace
    from ckpt_tools.distributed.group import Group


# Reads an index as it is told to, and says what is to be made of it.
Make = Callable[[Read], Conversion[P]]
# How the ranks of a job execute a plan, unless they copy; both ends are waited for by all of them.
Engine = Callable[["Group", WriteOptions, Listener], AbstractContextManager[Executor]]

EngineName = Literal["copy", "dcp", "gather"]
ENGINES: tuple[EngineName, ...] = ("copy", "dcp", "gather")
_NO_TEXTS: Mapping[str, str] = MappingProxyType({})


def engine_named(name: EngineName, options: ReshardOptions) -> Engine | None:
    """What the ranks of a job do a reshard with; None when they copy.

    Raises UsageError for an engine that needs a job where there is none.
    """
    if name == "copy":
        return None
    if environment.place() is None:
        ranks = options.mesh.size if name == "dcp" else "N"
        whose = "the target mesh" if name == "dcp" else "the source: N is their number"
        raise UsageError(
            f"--engine {name} needs a torchrun job with one rank for each of {whose}.",
            hint=f"torchrun --nproc-per-node {ranks} -m ckpt_tools reshard … --engine {name}"
            ", or --engine copy, which needs none.",
        )
    # Late: torch and numpy come with them.
    from ckpt_tools.distributed import dcp_engine, gather_engine

    return partial(dcp_engine.executor, options) if name == "dcp" else gather_engine.executor


def run(
    make: Make[P],
    out: str,
    write: WriteOptions,
    *,
    engine: Engine | None = None,
    workers: int = 1,
    listener: Listener = SILENT,
    texts: Mapping[str, str] = _NO_TEXTS,
) -> P:
    """Write what ``make`` gives to ``out``, with all ranks when this process is one of a job's.

    The ranks copy, or do what another ``engine`` does; without them ``workers`` processes copy.
    ``out`` is refused before an index is read for it, where that can be known, and again when all
    that is read is known. Raises what `convert.write` and ``make`` raise, on all ranks the same;
    WriteError when a worker dies; UsageError for workers beside ranks, and for ranks whose
    ``texts``, options as a person gave them, are not all the same.
    """
    place = environment.place()
    if place is None:
        if not is_address(out):
            _admit(out, write, resume=write.resume)
        here = _Here(write, workers, listener)
        return write_by(make(here.read_index), here, listener)
    with _joined(place, workers, texts) as group:
        shared = nullcontext(_Sharing(group, write, listener))
        executing = shared if engine is None else engine(group, write, listener)

        def on_every_rank() -> P:
            with executing as executor:
                with group.collective():
                    if group.rank == 0:
                        _admit(out, write, resume=write.resume or group.attempt > 0)
                    else:  # it may read files of its own
                        out_path.refuse_source(out_path.real(out), write.sources)
                with group.collective():
                    conversion = make(executor.read_index)
                with group.collective():
                    return _lead_or_follow(group, conversion, executor, listener)

        return on_every_rank() if engine is None else group.guarded(on_every_rank)


def write_here(conversion: Conversion[P], *, workers: int = 1, listener: Listener = SILENT) -> P:
    """`convert.write` by the threads of this process, or by ``workers`` on this machine.

    Raises what that raises, and WriteError when a worker dies.
    """
    return write_by(conversion, _Here(conversion.write, workers, listener), listener)


def dry_run(
    make: Make[P],
    out: str,
    write: WriteOptions,
    *,
    engine: Engine | None = None,
    workers: int = 1,
    texts: Mapping[str, str] = _NO_TEXTS,
) -> P:
    """Plan what `run` would write and refuse what it would refuse, but write nothing.

    `check_room` then checks the space that the plan needs. Of a job that copies, rank 0 alone calls
    this; with another engine all do.
    """
    place = environment.place()
    if place is None or engine is None:
        _dry_run_output(out, write, write.sources)
        return _planned(make(formats.read_index), formats.locate)
    with _joined(place, workers, texts) as group:

        def on_every_rank() -> P:
            with engine(group, write, SILENT) as executor:
                with group.collective():
                    _dry_run_output(out, write, write.sources)
                with group.collective():  # rank 0 alone locates what nobody else has to
                    locate = executor.locate if group.rank else formats.locate
                    return _planned(make(executor.read_index), locate)

        return group.guarded(on_every_rank)


def check_room(out: str, plan: Plan) -> str | None:
    """What `atomic_output.check_room` says: of an address, for where it is made first."""
    return atomic_output.check_room(made_at(out), plan.files, single_file=plan.single_file)


def made_at(out: str) -> str:
    """Where on this machine an output is made: what goes to an address, in a temporary folder."""
    real = out_path.real(out)
    if not is_address(real):
        return real
    from tempfile import gettempdir  # late, as all that only addresses need

    return os.path.join(gettempdir(), "ckpt-tools-output")


def _admit(out: str, options: WriteOptions, *, resume: bool) -> None:
    atomic_output.admit(out, sources=options.sources, force=options.force, resume=resume)


def _planned(conversion: Conversion[P], locate: Locate) -> P:
    _dry_run_output(conversion.out, conversion.write, conversion.sources)
    return conversion.plan(locate)


def _dry_run_output(out: str, write: WriteOptions, sources: Iterable[str]) -> None:
    """Raise what writing ``out`` would raise before any planning; nothing is changed."""
    if is_address(out) and environment.place() is None:
        out_path.refuse_source(out_path.real(out), sources)
        upload.refuse_existing(out, force=write.force, resume=write.resume)
        return
    atomic_output.dry_run(out, sources=sources, force=write.force, resume=write.resume)


# ---------------------------------------------------------------------------------- ranks of a job


@contextmanager
def _joined(place: RankPlace, workers: int, texts: Mapping[str, str]) -> Iterator[Group]:
    """All ranks of this job, which were all asked for the same."""
    # Late: only ranks of a job have others.
    from ckpt_tools.distributed.agreement import require_same_options
    from ckpt_tools.distributed.group import join

    with join(place, workers=workers) as group:
        require_same_options(group, texts)
        yield group


def _lead_or_follow(
    group: Group, conversion: Conversion[P], executor: Executor, listener: Listener
) -> P:
    """Plan on every rank, and write in the folder that rank 0 makes and renames.

    A later attempt of the job goes on with what an earlier one has left.
    """
    attempt, out, index = group.attempt, conversion.out, conversion.index
    if attempt:
        conversion = replace(conversion, write=replace(conversion.write, restarted=True))
        if group.has_written(out, index.root):
            plan = conversion.plan(executor.locate)
            note = f"Attempt {attempt} of this job had already finished {out}."
            return replace(plan, notes=(*plan.notes, note))
    if group.rank == 0:

        def written() -> None:
            group.note_written(out, index.root)
            listener.on_written()

        return write_by(conversion, executor, replace(listener, on_written=written))
    plan = conversion.plan(executor.locate)
    notes = executor.run(index, plan, atomic_output.place_of(out), KnownCrcs())
    return replace(plan, notes=(*plan.notes, *(notes or ())))


# -------------------------------------------------------------------------------------- executors


def _locate_here(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """All chunks located; those of a store later, when their elements are read with them."""
    return (formats.locate_later if is_address(index.root) else formats.locate)(index, files)


@dataclass(frozen=True, slots=True)
class _Here:
    """The threads of this process, or several ``workers`` on this machine."""

    options: WriteOptions
    workers: int
    listener: Listener
    read_index: Read = formats.read_index

    @property
    def locate(self) -> Locate:
        """One process locates all before it begins, workers each what they read."""
        return _locate_here if self.workers == 1 else formats.locate_later

    def run(
        self,
        index: CheckpointIndex,  # noqa: ARG002 (one process alone sees one checkpoint)
        plan: Plan,
        place: OutputPlace,
        seen: KnownCrcs,
    ) -> None:
        """Do the works of a plan and write its files."""
        if not plan.files:
            return
        with Files(sizes=self.options.sizes) as files:
            _do(plan.works, files, plan.source, seen)
        times = 2 if self.options.check else 1  # written, and read back
        self.listener.on_total(times * plan.files.length)
        if self.workers == 1:
            order = _share_order(self.options, plan, place, ALL)
            if not is_address(plan.source.root):
                order = order._replace(source=None)
            write_share(order, on_bytes=self.listener.on_bytes, seen=seen)
        else:
            from ckpt_tools.distributed.workers import write_with_workers  # late: only -j has any

            memory = max(MIN_MEMORY, self.options.max_memory // self.workers)
            options = replace(self.options, max_memory=memory)
            shares = [Share(number, self.workers) for number in range(self.workers)]
            orders = [_share_order(options, plan, place, share) for share in shares]
            write_with_workers(orders, on_bytes=self.listener.on_bytes, seen=seen)
        place.finish_all(plan.files)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Each rank of a job writes its share of a plan."""

    group: Group
    options: WriteOptions
    listener: Listener
    read_index: Read = formats.read_index
    locate: Locate = formats.locate_later

    def run(self, index: CheckpointIndex, plan: Plan, place: OutputPlace, seen: KnownCrcs) -> None:
        """Write this rank's share of the files that are left."""
        # Late: only ranks of a job agree.
        from ckpt_tools.distributed.agreement import begin, require_all_written, stopping

        group, options = self.group, self.options
        left = begin(group, plan.files, place, options.sizes, source=index)
        if not left:
            return
        read_back = left.length if options.check else 0  # by rank 0, which prints
        self.listener.on_total(left.length // group.size + read_back)
        with group.collective():  # no rank writes any more when rank 0 cleans up
            share = Share(group.rank, group.size)
            with Files(sizes=options.sizes) as files:
                works = _needed(plan.works, left, share, options.sizes)
                _do(works, files, plan.source, seen)
            order = _share_order(options, replace(plan, files=left), place, share)
            on_bytes = stopping(group, self.listener.on_bytes)
            nbytes = write_share(order, on_bytes=on_bytes, seen=seen)
        require_all_written(group, left, place, nbytes=nbytes)
        for part in group.gather(seen.packed()):
            seen.add_packed(part)


def _share_order(options: WriteOptions, plan: Plan, place: OutputPlace, share: Share) -> ShareOrder:
    plans, share = files_of_share(plan.files, share)
    return ShareOrder(plans, share, place, options, plan.source, WAITING.patience)


def _do(works: Works, files: Files, source: CheckpointIndex, seen: KnownCrcs) -> None:
    """Make the bytes that a plan reads and no checkpoint holds."""
    for work in works.values():
        seen.overflowed.update(work(files, source))


def _needed(works: Works, plans: LazyPlans, share: Share, sizes: Sizes) -> Works:
    """The works whose bytes this share reads: each rank makes them on its own disk."""
    if not works:
        return works
    read = {
        read.chunk.data.path
        for _, tasks in groups_of(plans, share, sizes)
        for task in tasks
        for piece in task.pieces
        for read in piece.item.reads
    }
    return {path: work for path, work in works.items() if path in read}
