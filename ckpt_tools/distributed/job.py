"""A reshard as one value that all engines take, and what an output must pass before it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying import atomic_output, out_path
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.core.progress import SILENT, Listener
from ckpt_tools.distributed import environment
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.storage import upload
from ckpt_tools.storage.paths import is_address

if TYPE_CHECKING:
    from ckpt_tools.convert.reshard import Reshard, ReshardOptions, ReshardPlan


Engine = Literal["copy", "dcp", "gather"]
ENGINES: tuple[Engine, ...] = ("copy", "dcp", "gather")


def dry_run_output(out: str, write: WriteOptions, sources: Iterable[str]) -> None:
    """Raise what writing ``out`` would raise before any planning; nothing is changed."""
    if is_address(out) and environment.place() is None:
        out_path.refuse_source(out_path.real(out), sources)
        upload.refuse_existing(out, force=write.force, resume=write.resume)
        return
    atomic_output.dry_run(out, sources=sources, force=write.force, resume=write.resume)


def check_room(out: str, plans: LazyPlans, *, single_file: str | None = None) -> None:
    """Raise what `atomic_output.check_room` raises: of an address, for where it is made first."""
    atomic_output.check_room(made_at(out), plans, single_file=single_file)


def made_at(out: str) -> str:
    """Where on this machine an output is made: what goes to an address, in a temporary folder."""
    real = out_path.real(out)
    if not is_address(real):
        return real
    from tempfile import gettempdir  # late, as all that only addresses need

    return os.path.join(gettempdir(), "ckpt-tools-output")


class Job(NamedTuple):
    """A reshard of the checkpoint ``ckpt`` to the folder ``out``.

    ``workers`` are processes started here, 1 for none. ``texts`` are options as a person gave them,
    which must be those of all ranks.
    """

    ckpt: str
    out: str
    options: ReshardOptions
    write: WriteOptions
    engine: Engine = "copy"
    workers: int = 1
    read: ReadOptions = ReadOptions()
    texts: Mapping[str, str] = MappingProxyType({})
    listener: Listener = SILENT

    def noting_resume(self, plan: ReshardPlan) -> ReshardPlan:
        """The plan, with a note when --resume was asked of an engine that cannot resume."""
        if not self.write.resume:
            return plan
        note = "records no finished files: --resume started from the beginning."
        return replace(plan, notes=(*plan.notes, f"--engine {self.engine} {note}"))

    def of(self, index: CheckpointIndex) -> Reshard:
        """The conversion of this checkpoint."""
        from ckpt_tools.convert.reshard import Reshard  # late: `export` asks for room only

        return Reshard(index, self.out, self.write, self.options)
