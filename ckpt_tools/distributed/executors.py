"""Who executes a plan: this process, workers on this machine, or the ranks of a torchrun job.

Several fill one file, and the bytes are the same however many take part: the plan alone says what
they are. The ranks of a job need a shared file system, and communicate only at the start and at
the end. Each reads the whole index, for a `.metadata` is one pickle, of which no part can be read
alone, and knows the lengths of all files; then it plans the files of its share, and locates what
these read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpt_tools import formats
from ckpt_tools.convert.write import Conversion, Executor, Locate, P, Plan, WriteOptions, write
from ckpt_tools.copying import atomic_output
from ckpt_tools.copying.resume import OutputPlace
from ckpt_tools.copying.tasks import ALL, MIN_MEMORY, Share, files_of_share, groups_of
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.known_crcs import KnownCrcs
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.core.progress import SILENT, Listener
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.workers import ShareOrder, write_share, write_with_workers
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms.base import Materialize

if TYPE_CHECKING:
    from ckpt_tools.distributed.group import Group


@dataclass(frozen=True, slots=True)
class Here:
    """The threads of this process, or several ``workers`` on this machine."""

    options: WriteOptions
    workers: int = 1
    listener: Listener = SILENT

    @property
    def locate(self) -> Locate:
        """One process locates all before it begins, workers each what they read."""
        return formats.locate if self.workers == 1 else formats.locate_later

    def together(self) -> AbstractContextManager[None]:
        """No-op: there are no other ranks."""
        return nullcontext()

    def admit(self, out: str) -> None:
        """Refuse an output before a large index is read for it; `write` looks again."""
        if not is_address(out):
            _admit(out, self.options, resume=self.options.resume)

    def write(self, conversion: Conversion[P]) -> P:
        """`convert.write`. Raises what it raises, and WriteError when a worker dies."""
        return write(conversion, self, self.listener)

    def run(self, plan: Plan, place: OutputPlace, seen: KnownCrcs) -> None:
        """Do the works of a plan and write its files."""
        if not plan.files:
            return
        with Files(sizes=self.options.sizes) as files:
            _do(plan.works, files, plan.source)
        times = 2 if self.options.check else 1  # written, and read back
        self.listener.on_total(times * plan.files.length)
        if self.workers == 1:
            order = _share_order(self.options, plan, place, ALL)._replace(source=None)
            write_share(order, on_bytes=self.listener.on_bytes, seen=seen)
            return
        memory = max(MIN_MEMORY, self.options.max_memory // self.workers)
        options = replace(self.options, max_memory=memory)
        shares = [Share(index, self.workers) for index in range(self.workers)]
        orders = [_share_order(options, plan, place, share) for share in shares]
        write_with_workers(orders, on_bytes=self.listener.on_bytes, seen=seen)


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of a job: rank 0 makes and renames the output, all fill it."""

    group: Group
    options: WriteOptions
    listener: Listener = SILENT

    def together(self) -> AbstractContextManager[None]:
        """A block that ends well on all ranks or on none."""
        return self.group.collective()

    def admit(self, out: str) -> None:
        """Rank 0 refuses an output before a large index is read for it."""
        if self.group.rank == 0:
            _admit(out, self.options, resume=self.options.resume or self.group.attempt > 0)

    def write(self, conversion: Conversion[P]) -> P:
        """`convert.write`. Raises what it raises, on all ranks the same."""
        with self.group.collective():
            sharing = _Sharing(self, conversion.index)
            return lead_or_follow(self.group, conversion, sharing, self.listener)


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Each rank writes its share of a plan made from ``source``."""

    ranks: Ranks
    source: CheckpointIndex
    locate: Locate = formats.locate_later

    def run(self, plan: Plan, place: OutputPlace, seen: KnownCrcs) -> None:
        """Write this rank's share of the files that are left."""
        # Late: only ranks of a job agree.
        from ckpt_tools.distributed.agreement import Progress, begin, require_all_written

        group, listener, sizes = self.ranks.group, self.ranks.listener, self.ranks.options.sizes
        left = begin(group, plan.files, place, sizes, source=self.source)
        if not left:
            return
        read_back = left.length if self.ranks.options.check else 0  # by rank 0, which prints
        listener.on_total(left.length // group.size + read_back)
        progress = Progress(group, listener.on_bytes)
        with group.collective():  # no rank writes any more when rank 0 cleans up
            share = Share(group.rank, group.size)
            with Files(sizes=sizes) as files:
                _do(_needed(plan.works, left, share, sizes), files, plan.source)
            order = _share_order(self.ranks.options, replace(plan, files=left), place, share)
            nbytes = write_share(order, on_bytes=progress.add, seen=seen)
        require_all_written(group, left, place.folder, nbytes=nbytes)
        if self.ranks.options.checks_source:
            for part in group.gather(seen.packed()):
                seen.add_packed(part)


@contextmanager
def available(
    options: WriteOptions, *, workers: int, listener: Listener, texts: Mapping[str, str]
) -> Iterator[Here | Ranks]:
    """All ranks when this process is one of a torchrun job's, else this machine.

    Raises UsageError for workers beside ranks, and for ranks whose ``texts``, options as a person
    gave them, are not all the same.
    """
    place = environment.place()
    if place is None:
        yield Here(options, workers, listener)
        return
    # Late: only ranks of a job have others.
    from ckpt_tools.distributed.agreement import require_same_options
    from ckpt_tools.distributed.group import join

    with join(place, workers=workers) as group:
        require_same_options(group, texts)
        yield Ranks(group, options, listener)


def lead_or_follow(
    group: Group,
    conversion: Conversion[P],
    executor: Executor,
    listener: Listener = SILENT,
) -> P:
    """Plan on every rank, and write in the folder that rank 0 makes and renames.

    A later attempt of the job goes on with what an earlier one has left.
    """
    attempt, out = group.attempt, conversion.out
    if attempt:
        conversion = replace(conversion, write=replace(conversion.write, restarted=True))
        if group.has_written(out, conversion.index.root):
            plan = conversion.plan(executor.locate)
            note = f"Attempt {attempt} of this job had already finished {out}."
            return replace(plan, notes=(*plan.notes, note))
    if group.rank == 0:
        return write(conversion, _Noting(group, executor, out, conversion.index.root), listener)
    plan = conversion.plan(executor.locate)
    executor.run(plan, atomic_output.place_of(out), KnownCrcs())
    return plan


@dataclass(frozen=True, slots=True)
class _Noting:
    """Executes as another does, and has later attempts of the job know that ``out`` is written from
    ``source``.
    """

    group: Group
    executor: Executor
    out: str
    source: str

    @property
    def locate(self) -> Locate:
        """As the other."""
        return self.executor.locate

    def run(self, plan: Plan, place: OutputPlace, seen: KnownCrcs) -> None:
        """What is written next is renamed to ``out``."""
        self.executor.run(plan, place, seen)
        self.group.note_written(self.out, self.source)


def _admit(out: str, options: WriteOptions, *, resume: bool) -> None:
    atomic_output.admit(out, sources=options.sources, force=options.force, resume=resume)


def _share_order(options: WriteOptions, plan: Plan, place: OutputPlace, share: Share) -> ShareOrder:
    plans, share = files_of_share(plan.files, share)
    threads, memory = options.threads, options.max_memory
    checked = options.checks_source
    return ShareOrder(plans, share, place, threads, memory, options.sizes, plan.source, checked)


def _do(works: Sequence[Materialize], files: Files, source: CheckpointIndex) -> None:
    """Make the bytes that a plan reads and no checkpoint holds."""
    for work in works:
        work(files, source)


def _needed(
    works: Sequence[Materialize], plans: LazyPlans, share: Share, sizes: Sizes
) -> list[Materialize]:
    """The works whose bytes this share reads: each rank makes them on its own disk."""
    if not works:
        return []
    read = {
        read.chunk.data.path
        for _, tasks in groups_of(plans, share, sizes)
        for task in tasks
        for piece in task.pieces
        for read in piece.item.reads
    }
    return [work for work in works if work.path in read]
