"""What to do, in one value: all engines are asked in the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckpt_tools.convert import WriteOptions
from ckpt_tools.reshard import ReshardOptions


class Job(NamedTuple):
    """A reshard to the folder ``out``; ``on_bytes`` is told how many bytes this process wrote."""

    out: str
    options: ReshardOptions
    write: WriteOptions
    on_bytes: Callable[[int], None]

    @property
    def partial(self) -> str:
        """The folder that one process makes, in which all write, and which becomes ``out``."""
        return f"{self.out}.partial"
