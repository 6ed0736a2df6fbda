"""What to do, in one value: all engines are asked in the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ckpt_tools.convert import WriteOptions
from ckpt_tools.journal import Place
from ckpt_tools.output import place_of
from ckpt_tools.resharding import ReshardOptions


class Job(NamedTuple):
    """A reshard to the folder ``out``; ``on_bytes`` is told how many bytes this process wrote."""

    out: str
    options: ReshardOptions
    write: WriteOptions
    on_bytes: Callable[[int], None]

    def anew(self) -> Job:
        """The same for an engine that keeps no journal: it cannot go on with what is there."""
        return self._replace(write=replace(self.write, resume=False))

    @property
    def place(self) -> Place:
        """The folder that one process makes, in which all write, and which becomes ``out``."""
        return place_of(self.out)
