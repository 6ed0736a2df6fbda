"""Which checkpoint of a run a job can resume from: the newest that `verify_quick` calls whole."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_tools import formats
from ckpt_tools.errors import AnswerNo, CkptError
from ckpt_tools.formats import Saved
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.proof.verify import verify_quick
from ckpt_tools.storage.reader import Files


def latest_complete(
    run: str, options: ReadOptions = ReadOptions(), *, on_skip: Callable[[str], None] | None = None
) -> Saved:
    """The newest complete checkpoint of a run; a lone checkpoint is itself, its step None.

    Headers are read, the newest first, until one is whole; ``on_skip`` gets a note on each that is
    not. Raises AnswerNo when none is, and what `formats.of_step` raises.
    """
    steps: list[int | None] = [*reversed(formats.steps_in(run))]
    for step in steps or [None]:
        path = formats.of_step(run, step)
        problem = problem_of(path, options)
        if problem is None:
            return Saved(path, step)
        if on_skip is not None:
            on_skip(f"Skipping {path}: {problem}")
    raise AnswerNo(f"{run} has no complete checkpoint.")


def problem_of(path: str, options: ReadOptions) -> str | None:
    """What keeps a checkpoint from being whole, as far as headers tell; None when it is."""
    try:
        with Files() as files:
            report = verify_quick(formats.read_index(path, options), files)
    except CkptError as error:
        return error.first_line
    return report.problems[0].first_line if report.problems else None
