"""Writes an output, for `export` and `reshard`.

Check the paths, plan the files from the index alone, let an executor fill them in a folder beside
OUT, compare them with the source, rename. The executor (threads, workers, the ranks of a job) is
handed in; each process that copies does its share here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from ckpt_tools import formats
from ckpt_tools.convert.plan import Plan
from ckpt_tools.copying import atomic_output, out_path
from ckpt_tools.copying.origin import Origin
from ckpt_tools.copying.out_path import Standing
from ckpt_tools.copying.parallel import Listener, default_memory
from ckpt_tools.copying.resume import OutputPlace, finishing, writing
from ckpt_tools.copying.tasks import Share, check_memory
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import CheckpointIndex, FileEntry
from ckpt_tools.core.names import Filters
from ckpt_tools.core.options import option, repeated
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.core.text import parse_size
from ckpt_tools.errors import OutputExistsError
from ckpt_tools.formats.frameworks import sources_of
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.storage import upload
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files
from ckpt_tools.storage.waiting import PATIENCE
from ckpt_tools.transforms.base import Transform
from ckpt_tools.transforms.dtypes import overflow_notes, parse_cast, parse_rule


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write: ``threads`` of this process, ``max_memory`` of all buffers in bytes.

    Without a number of threads, the cores and the work choose it (`copying.parallel`).
    With ``resume`` a run goes on with what an earlier one of the same command has finished; when it
    was ``restarted``, an earlier attempt may have begun it, or not.
    The source's own checksums of what is copied are checked in passing, unless ``verify_source`` is
    false; ``check`` checks them all.
    ``sources`` are files and folders that are read beside the checkpoint's own: like those, they
    are never written over. ``watched`` are those of them that must stay as they were before they
    were read. ``sizes`` decide which way bytes go, and no byte of what is written.
    Raises UsageError for no thread, or less than 1 MiB of memory.
    """

    force: bool = option(False, "--force", "Replace an existing output.", heading="Writing")
    resume: bool = option(
        False,
        "--resume",
        "Continue the same command after it was interrupted: keep finished files, write the "
        "others. An output of one file starts again.",
        heading="Writing",
    )
    restarted: bool = False
    verify_source: bool = option(
        True, "--no-verify-source", "Do not compare what is copied with the source's own checksums."
    )
    check: bool = option(
        False,
        "--check",
        "Read the result back before it is renamed to OUT, compare it with the source, and "
        "check the source's own checksums.",
        heading="Writing",
    )
    threads: int | None = option(
        None,
        "--threads",
        "Threads of each process.",
        metavar="N",
        heading="Writing",
        at_least=1,
        shown="by cores, files and bytes",
        own=True,
    )
    max_memory: int = option(
        64 << 20,
        "--max-memory",
        "Total memory of all buffers.",
        metavar="SIZE",
        heading="Writing",
        typed=default_memory,
        shown="64MiB; 128MiB with 16 cores or more",
        own=True,
        parse=parse_size,
    )
    sources: tuple[str, ...] = ()
    watched: tuple[FileEntry, ...] = ()
    sizes: Sizes = field(default_factory=Sizes)

    def __post_init__(self) -> None:
        check_memory(self.threads, self.max_memory)

    @property
    def checks_source(self) -> bool:
        """Whether the CRC-32s of what is copied are compared in passing; --check reads them all."""
        return self.verify_source and not self.check


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions(Filters):
    """Which entries are converted, and in which types: ``dtype`` None to keep each tensor's own.

    ``dtypes`` are exceptions from ``dtype`` by name patterns, the last match wins. ``steps`` change
    the tensors after containers and wrappers are off their names. ``keep_rank_states`` takes data
    positions and random states along that belong to other ranks than the target has.
    """

    dtype: DType | None = option(
        None,
        "--dtype",
        "Cast floating tensors, rounding to nearest even: bf16, fp16, fp32, float8_e4m3fn…",
        metavar="keep|TYPE",
        heading="Types and sizes",
        typed="keep",
        parse=parse_cast,
    )
    dtypes: tuple[tuple[str, DType | None], ...] = repeated(
        "--dtype-for",
        "Another --dtype for names that match: '*norm*=fp32', '*.gate.*=keep'.",
        metavar="GLOB=TYPE",
        heading="Types and sizes",
        parse=parse_rule,
    )
    keep_rank_states: bool = option(
        False,
        "--keep-rank-states",
        "Keep each rank's own data positions and random states even if the target has another "
        "number of ranks. By default they are then left out, with a note.",
        heading="Output",
        after="--layout",
    )
    steps: tuple[Transform, ...] = ()


P = TypeVar("P", bound=Plan)
# Reads the index of a path, on each rank of a job in its own way.
Read = Callable[[str, ReadOptions], CheckpointIndex]
# Gives an index as a plan needs it: with all chunks located, or to be located when they are read.
Locate = Callable[[CheckpointIndex, Files], CheckpointIndex]


@dataclass(frozen=True, slots=True)
class Conversion(Generic[P]):
    """What is to be made of a checkpoint, and where.

    ``plan`` plans it from headers alone; it writes nothing, and raises what cannot be done.
    ``others`` are checkpoints that the options take something from.
    """

    index: CheckpointIndex
    out: str
    write: WriteOptions
    plan: Callable[[Locate], P]
    others: tuple[CheckpointIndex, ...] = ()

    @property
    def sources(self) -> list[str]:
        """Every file and folder that is read."""
        read = [source for index in (self.index, *self.others) for source in sources_of(index)]
        return [*self.write.sources, *read]

    @property
    def read(self) -> list[FileEntry]:
        """Every file that the output is made from, as it was before it was read."""
        indexes = (self.index, *self.others)
        return [*self.write.watched, *(f for one in indexes for f in (*one.files, *one.beside))]


class Executor(Protocol):
    """Executes plans of indexes that it has read; ``locate`` is how it wants chunks located."""

    @property
    def read_index(self) -> Read: ...  # noqa: D102 (said above)

    @property
    def locate(self) -> Locate: ...  # noqa: D102 (said above)

    def run(
        self, index: CheckpointIndex, plan: Plan, place: OutputPlace, seen: KnownCrcs
    ) -> tuple[str, ...] | None:
        """Do the works of a plan of ``index`` and write its files; none when all is written.

        ``seen`` gets the CRC-32s of what is read of the source, where the options want that. Gives
        notes on what it has compared with the source; None when that is left to the caller.
        """


def write(conversion: Conversion[P], executor: Executor, listener: Listener) -> P:
    """Write the output of a conversion; for an address, locally first, and then sent.

    Raises what its `plan`, the executor, `atomic_output.open_output` and `upload.staged` raise; in
    every case what was at ``out`` before is as it was.
    """
    index, options, sources = conversion.index, conversion.write, conversion.sources
    out = out_path.real(conversion.out)
    if is_address(out):
        out_path.refuse_source(out, sources)
        last = formats.index_files()
        with upload.staged(out, force=options.force, resume=options.resume, last=last) as here:
            return write(replace(conversion, out=here), executor, listener)
    resume = options.resume or options.restarted
    out = atomic_output.admit(out, sources=sources, force=options.force, resume=resume)
    before = Standing.at(out) if options.force else None
    plan = conversion.plan(executor.locate)
    if resume and atomic_output.is_settled(out):
        from ckpt_tools.convert import finished  # late: it reads, and few runs come after their end

        if finished.is_written(out, plan, options.sizes):
            nothing = replace(plan, files=LazyPlans())
            executor.run(index, nothing, atomic_output.place_of(out), KnownCrcs())
            listener.on_written()
            return replace(plan, notes=(*plan.notes, f"{out} is already complete."))
        if not options.force:
            raise OutputExistsError(
                f"{out} exists, and is not what this command writes from this source.",
                hint="Choose another output, or use --force to replace the checkpoint files in it.",
            )
    read = (index, *plan.also)
    spec = atomic_output.OutputSpec(
        out,
        plan.files,
        Origin.of(read, plan.files, plan.settings),
        source=conversion.read,
        before=before,
        single_file=plan.single_file,
        resume=resume,
        restarted=options.restarted,
        replaceable=formats.checkpoint_files(),
        on_note=listener.on_note,
    )
    with atomic_output.open_output(spec) as (plans, resumed):
        left, seen = replace(plan, files=plans), KnownCrcs()
        notes = executor.run(index, left, spec.place, seen)
        listener.on_written()
        if notes is None:
            notes = _compared(plan, options, spec.place.folder, seen, listener)
    return replace(plan, notes=(*plan.notes, *resumed, *overflow_notes(seen.overflowed), *notes))


def _compared(
    plan: Plan, options: WriteOptions, folder: str, seen: KnownCrcs, listener: Listener
) -> tuple[str, ...]:
    """Make the comparisons with the source that the options want; notes say what was found."""
    if options.check:
        from ckpt_tools.convert import check as checking  # the proofs: only --check pays for them

        written = os.path.join(folder, plan.single_file) if plan.single_file else folder
        with Files(sizes=options.sizes) as files:
            statement = checking.check(
                written, plan, files, threads=options.threads, on_bytes=listener.on_bytes
            )
        checking.record(folder, plan, statement)  # where the output has room
        return (statement,)
    if not options.checks_source:
        return ()
    from ckpt_tools.proof.damage import check_copied  # late: it is needed after the copy alone

    with Files(sizes=options.sizes) as files:
        read = (plan.chosen, *plan.also)
        every = [check_copied(one, files, seen=seen, threads=options.threads) for one in read]
    return tuple(dict.fromkeys(note for notes in every for note in notes))


# ------------------------------------------------------------------------------------- of a process


class ShareOrder(NamedTuple):
    """One share of a plan: what to write, where and how, and what may be used for it.

    ``plans`` are those of the files that the share is in, at least. Chunks of ``source`` that they
    read are located before they are read; None when all of them are. A store is waited for
    ``patience`` seconds.
    """

    plans: LazyPlans
    share: Share
    place: OutputPlace
    options: WriteOptions
    source: CheckpointIndex | None
    patience: float = PATIENCE


def write_share(order: ShareOrder, *, on_bytes: Callable[[int], None], seen: KnownCrcs) -> int:
    """Do one share in this process; gives the bytes of its tasks, as `copy.write_files` does.

    Raises what that raises, and what keeps a chunk that it reads from being used.

    ``on_bytes`` is called with 0 first, as soon as no other run may begin.
    ``seen`` gets the CRC-32s of what is read, where the options want that.
    """
    from ckpt_tools.copying import write as copy  # late: only those who write pay for it

    options, sizes = order.options, order.options.sizes
    is_far = order.source is not None and is_address(order.source.root)
    if is_far and order.share.count == 1 and options.threads != 1:
        # All that a thread of many reads of a store for a task is one round of requests.
        sizes = replace(sizes, task=min(sizes.task, sizes.slab))
    with (
        Files(sizes=sizes, crcs=seen if options.checks_source else None) as files,
        writing(order.place),
        finishing(order.place) as finisher,
    ):
        locate = None
        if order.source is not None:
            from ckpt_tools.convert.locating import (
                located_batches,
            )  # late: one process has located all

            locate = partial(located_batches, source=order.source, files=files)
        on_bytes(0)
        return copy.write_files(
            order.plans,
            root=order.place.unfinished,
            files=files,
            threads=options.threads,
            max_memory=options.max_memory,
            on_bytes=on_bytes,
            share=order.share,
            locate=locate,
            on_file=finisher.written,
            on_run=seen.add if options.checks_source else None,
            on_overflow=seen.overflowed.add,
        )
