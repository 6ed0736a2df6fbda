"""Whether the files of all ranks are of one save, as far as their step counts tell.

Files of two saves in one folder fit together in every other way: the meshes, names and shapes are
the same, and no checksum spans two files. A job counts its steps on all ranks alike:

    step = 100 on rank 0, step = 200 on rank 1                        of two saves
    all of optim.state.*.step differ, and there is no other count     of two saves
    only optim.state.expert.step differs                              an expert without gradients
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ckpt_tools.core.index import Path, Section
from ckpt_tools.core.names import is_step, join
from ckpt_tools.errors import CheckpointError, UnsupportedError


@dataclass(slots=True)
class StepCounts:
    """The step counts that several ranks have; those that differ with a few words on how."""

    _job: dict[str, str] = field(default_factory=dict)
    _optim: dict[str, str] = field(default_factory=dict)
    _optim_equal: bool = False

    def see(self, path: Path, section: Section, differing: str | None) -> bool:
        """Take in an entry that several ranks hold; gives whether it is a step count."""
        if not is_step(path, section):
            return False
        if differing is None:
            self._optim_equal = self._optim_equal or section == "optim"
        else:
            counts = self._optim if section == "optim" else self._job
            counts[join(path)] = differing
        return True

    def problems(self) -> Iterator[CheckpointError]:
        """An error when the files are of several saves; it concerns all entries."""
        counts = self._job if self._optim_equal else {**self._job, **self._optim}
        if not counts:
            return
        fqn, differing = next(iter(counts.items()))
        more = f" {len(counts) - 1:,} more counts of steps differ." if len(counts) > 1 else ""
        yield UnsupportedError(
            f"The files are of several saves: {fqn} is {differing}.{more}",
            hint="Bring together the files that all ranks wrote in one save.",
        )
