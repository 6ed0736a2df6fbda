"""The checkpoints of a run, one line each: a table for people, JSON for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_tools.analysis import summary
from ckpt_tools.cli import render
from ckpt_tools.core.records import record_json
from ckpt_tools.core.text import counted, format_size, utc
from ckpt_tools.errors import CkptError
from ckpt_tools.formats import ReadOptions, Saved, read_index
from ckpt_tools.formats.frameworks import saved_twice

_HEADER = ("STEP", "KIND", "HOLDS", "SIZE", "AGE", "COMPLETE", "PATH")
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


@dataclass(frozen=True, slots=True)
class _Line:
    """What headers say of one checkpoint.

    ``sections`` are those that hold anything, ``modified`` when a file of it last changed, in
    seconds since 1970, None if unknown; ``problem`` is why it is not whole.
    """

    path: str
    step: int | None
    format: str | None = None
    framework: str | None = None
    sections: tuple[str, ...] = ()
    nbytes: int = 0
    modified: float | None = None
    whole: bool = False
    problem: str | None = None


def line_of(saved: Saved, options: ReadOptions) -> _Line:
    """Read the headers of one checkpoint."""
    try:
        index = read_index(saved.path, options=options)
    except CkptError as error:
        return _Line(saved.path, saved.step, problem=error.first_line)
    sums = summary.sections_of(index)
    states = [file.state.changed for file in index.files if file.state is not None]
    newest = max(states, default=0)
    return _Line(
        saved.path,
        saved.step,
        format=index.format,
        framework=index.framework,
        sections=tuple(name for name, one in sums.items() if one.tensors or one.objects),
        nbytes=index.file_bytes,
        modified=newest / 10**9 if newest else None,
        whole=not index.problems,
        problem=index.problems[0].first_line if index.problems else None,
    )


def lines(path: str, run: Sequence[_Line]) -> Iterator[str]:
    """The run for people: a heading, one line a checkpoint, and problems."""
    yield render.heading(f"{path}: {counted(len(run), 'checkpoint')}, by their headers")
    now = time.time()
    rows = [
        (
            "-" if line.step is None else f"{line.step:,}",
            ", ".join(filter(None, (line.format, line.framework))) or "-",
            "+".join(line.sections) or "-",
            format_size(line.nbytes) if line.format else "-",
            "-" if line.modified is None else _age(now - line.modified),
            "yes" if line.whole else "NO",
            os.path.relpath(line.path, path),
        )
        for line in run
    ]
    yield from (f"  {row}" for row in render.columns(_HEADER, rows, align="rllrrll", width=None))
    for line in run:
        if line.problem is not None:
            yield f"  not complete: {line.problem}"
    twice = saved_twice([line.path for line in run])
    if twice is not None:
        yield f"  {twice}"
    yield ""


def _age(seconds: float) -> str:
    """A duration in its largest unit."""
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{int(seconds / length):,} {unit}"
    return f"{max(int(seconds), 0)} s"


def as_json(path: str, run: Sequence[_Line]) -> dict[str, render.Json]:
    """The object of schema ckpt-tools/run/1."""
    checkpoints = [
        record_json(line) | {"modified": None if line.modified is None else utc(line.modified)}
        for line in run
    ]
    return {"schema": "ckpt-tools/run/1", "path": path, "checkpoints": checkpoints}
