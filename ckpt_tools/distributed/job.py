"""What to do, in one value: all engines are asked in the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.convert.export import WriteOptions
from ckpt_tools.copying.atomic_output import place_of
from ckpt_tools.copying.journal import Place

if TYPE_CHECKING:
    from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan


def ignore(nbytes: int) -> None:
    """Take the news and do nothing."""


class Job(NamedTuple):
    """A reshard to the folder ``out``; ``on_bytes`` is told how many bytes this process wrote,
    ``on_total`` before that about how many there will be.
    """

    out: str
    options: ReshardOptions
    write: WriteOptions
    on_bytes: Callable[[int], None]
    on_total: Callable[[int], None] = ignore

    def without_resume(self) -> Job:
        """The same for an engine that keeps no journal: it cannot go on with what is there."""
        return self._replace(write=replace(self.write, resume=False))

    def noting_resume(self, plan: ReshardPlan, *, engine: str) -> ReshardPlan:
        """The plan, with a note when --resume was asked of such an engine."""
        if not self.write.resume:
            return plan
        note = f"--engine {engine} keeps no journal, so --resume began anew."
        return replace(plan, notes=(*plan.notes, note))

    @property
    def place(self) -> Place:
        """The folder that one process makes, in which all write, and which becomes ``out``."""
        return place_of(self.out)
