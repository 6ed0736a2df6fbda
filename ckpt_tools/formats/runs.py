"""A run: a folder with several checkpoints of one training, by their steps.

The step is what the names say, those of frameworks among them; nothing is opened here.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpt_tools.errors import AnswerNo, UnreadableError, paths_instead

# What names say of a step, the surest first: ep1-ba200, epoch=1-step=200.ckpt, global_step_200,
# iter_0000200, checkpoint-200, epoch_2, and a bare number.
_STEPS = (
    r"(?<![a-z])ba(\d+)",
    r"(?<![a-z])(?<!target_)steps?[-_=]?(\d+)",  # Modalities adds that of the run's end
    r"(?<![a-z])iter(?:ation)?[-_=]?(\d+)",
    r"(?<![a-z])(?:checkpoint|ckpt)[-_=]?(\d+)",
    r"(?<![a-z])ep(?:och)?[-_=]?(\d+)",
    r"\A(\d+)(?:\.[a-z]+)?\Z",
)
_SHOWN = 10  # steps of a run in an error


class Saved(NamedTuple):
    """One checkpoint of a run, and its step if a name tells it."""

    path: str
    step: int | None


def in_order(run: str, paths: Iterable[str]) -> list[Saved]:
    """Checkpoints below a folder by their steps, the newest last; those without a step first."""
    saved = [Saved(path, step_of(os.path.relpath(path, run))) for path in paths]
    return sorted(saved, key=_place)


def step_of(path: str) -> int | None:
    """The step in the name of a file, or of the nearest folder that tells one."""
    for name in reversed(path.split(os.sep)):
        for pattern in _STEPS:
            steps = re.findall(pattern, name, re.IGNORECASE)
            if steps:
                return int(steps[-1])
    return None


def _place(saved: Saved) -> tuple[int, list[tuple[int, int, str]]]:
    words = re.split(r"(\d+)", saved.path)
    natural = [(1, int(w), "") if w.isdigit() else (0, 0, w) for w in words]
    return (-1 if saved.step is None else saved.step), natural


def chosen(run: str, saved: Sequence[tuple[int, str]], step: int | None) -> str:
    """Of checkpoints by their steps that of this step, or of the last one for None.

    Raises AnswerNo when there is none, and UnreadableError when several are of it.
    """
    steps = sorted({own for own, _ in saved})
    wanted = steps[-1] if step is None and steps else step
    of_step = [path for own, path in saved if own == wanted]
    if not of_step:
        if not steps:
            raise AnswerNo(f"{run} has no checkpoint with a step in its name.")
        shown = ", ".join(map(str, steps[-_SHOWN:]))
        raise AnswerNo(f"{run} has no checkpoint of step {step}; its last steps are {shown}.")
    if len(of_step) > 1:
        raise UnreadableError(
            f"{run} has {len(of_step)} checkpoints of step {wanted}.",
            hint=f"`ckpt-tools inspect {shlex.quote(run)}` says what each of them holds.",
            instead=paths_instead(run, of_step, without=("--latest", "--latest-complete")),
        )
    return of_step[0]
