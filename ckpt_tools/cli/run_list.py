"""The checkpoints of a run, one line each: a table for people, JSON for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_tools.analysis import summary
from ckpt_tools.cli import render
from ckpt_tools.core.text import counted, format_size, utc
from ckpt_tools.errors import CkptError
from ckpt_tools.formats import ReadOptions, Saved, read_index

_HEADER = ("STEP", "KIND", "HOLDS", "SIZE", "AGE", "WHOLE", "PATH")
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


@dataclass(frozen=True, slots=True)
class _Line:
    """What headers say of one checkpoint.

    ``holds`` are its sections, ``changed`` when a file of it last changed, in seconds since 1970,
    None if unknown; ``problem`` is why it is not whole.
    """

    saved: Saved
    form: str | None = None
    framework: str | None = None
    holds: tuple[str, ...] = ()
    nbytes: int = 0
    changed: float | None = None
    problem: str | None = None


def line_of(saved: Saved, options: ReadOptions) -> _Line:
    """Read the headers of one checkpoint."""
    try:
        index = read_index(saved.path, options=options)
    except CkptError as error:
        return _Line(saved, problem=error.message.partition("\n")[0])
    sums = summary.sections_of(index)
    states = [file.state.changed for file in index.files if file.state is not None]
    newest = max(states, default=0)
    return _Line(
        saved,
        form=index.format,
        framework=index.framework,
        holds=tuple(name for name, one in sums.items() if one.tensors or one.objects),
        nbytes=index.file_bytes,
        changed=newest / 10**9 if newest else None,
        problem=index.problems[0].message.partition("\n")[0] if index.problems else None,
    )


def lines(path: str, run: Sequence[_Line]) -> Iterator[str]:
    """The run for people: a heading, one line a checkpoint, and problems."""
    yield render.heading(f"{path}: {counted(len(run), 'checkpoint')}")
    now = time.time()
    rows = [
        (
            "-" if line.saved.step is None else f"{line.saved.step:,}",
            ", ".join(filter(None, (line.form, line.framework))) or "-",
            "+".join(line.holds) or "-",
            format_size(line.nbytes) if line.form else "-",
            "-" if line.changed is None else _age(now - line.changed),
            "yes" if line.problem is None else "NO",
            os.path.relpath(line.saved.path, path),
        )
        for line in run
    ]
    yield from (f"  {row}" for row in render.columns(_HEADER, rows, align="rllrrll", width=None))
    for line in run:
        if line.problem is not None:
            yield f"  not whole: {line.problem}"
    yield ""


def _age(seconds: float) -> str:
    """A duration in its largest unit."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{int(seconds / length):,} {unit}"
    return f"{max(int(seconds), 0)} s"


def as_json(path: str, run: Sequence[_Line]) -> render.Json:
    """The object of schema ckpt-tools/run/1."""
    return {
        "schema": "ckpt-tools/run/1",
        "path": path,
        "checkpoints": [
            {
                "path": line.saved.path,
                "step": line.saved.step,
                "format": line.form,
                "framework": line.framework,
                "sections": list(line.holds),
                "nbytes": line.nbytes,
                "modified": None if line.changed is None else utc(line.changed),
                "whole": line.problem is None,
                "problem": line.problem,
            }
            for line in run
        ],
    }
