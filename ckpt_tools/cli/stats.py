"""`ckpt-tools stats`: the numbers of each tensor, and what in them points at a lost rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ckpt_tools import formats
from ckpt_tools.cli import choosing, options, render
from ckpt_tools.cli.entries import short_shape, stats_cells
from ckpt_tools.cli.group import say
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.names import Filters, idle
from ckpt_tools.core.options import only_one_of, option
from ckpt_tools.core.text import are, counted, some
from ckpt_tools.errors import AnswerNo, CkptError, UsageError
from ckpt_tools.proof.stats import GroupStats, Statistics, TensorStats, groups_of, stats
from ckpt_tools.storage.reader import Files

_HELP = """Mean, standard deviation, extremes, L2 norm, NaN, infinities and zeros of each tensor.

All are over the finite values, summed in double precision; the standard deviation divides by n.
For complex numbers, MIN and MAX are of the magnitudes.

Below the table are regions that look like a missing rank: a chunk that is zero, constant or NaN
while the rest of its tensor is not, a chunk that repeats another one, and, in unsharded weights,
zero rows that are one rank's share of several tensors. They show where to look, and prove nothing.

--steps --csv is for a plot of a run: a row for each step of CKPT and each group of tensors that
have one name but for numbers, with their norm, largest magnitude, and how many are not finite. A
step that cannot be read is a row with its error, and the exit code is 1.

--json prints one object of schema ckpt-tools/stats/1.

""" + options.examples(
    "ckpt-tools stats run7/step-1000 --only model",
    "ckpt-tools stats run7/step-1000 --fail-nonfinite --quiet > /dev/null && echo finite",
    "ckpt-tools stats run7/step-1000 --csv > stats.csv",
    "ckpt-tools stats run7 --steps --csv --only model > run7.csv",
)

_HEADER = ("NAME", "DTYPE", "SHAPE", "MEAN", "STD", "MIN", "MAX", "L2", "NAN", "INF", "ZEROS")
_CSV_HEADER = tuple(name.lower() for name in (_HEADER[0], "SECTION", *_HEADER[1:3], "NUMEL"))
_CSV_HEADER += tuple(name.lower() for name in _HEADER[3:])
_STEPS_HEADER = ("step", *GroupStats._fields, "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    fail_nonfinite: bool = option(
        False, "--fail-nonfinite", "Exit with 1 if any value is NaN or infinite."
    )
    csv: bool = option(False, "--csv", "Print the table as CSV, with all digits.")
    steps: bool = option(False, "--steps", "CKPT is a folder of several: print all, as --csv.")
    threads: int | None = options.threads()
    json: bool = options.as_json()
    filters: Filters
    reading: choosing.Reading


@options.command("stats", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Look at every value of the chosen tensors, then print what was seen."""
    only_one_of({"--csv": asked.csv, "--json": asked.json})
    if asked.steps:
        _steps(asked)
        return
    index = asked.reading.read(asked.ckpt)
    choosing.say_idle(asked.filters, [index])
    statistics = _stats(asked, index)
    if asked.json:
        render.emit_json(statistics.to_dict())
    elif asked.csv:
        render.emit_csv(_CSV_HEADER, map(_csv_row, statistics.tensors))
        for line in _anomaly_lines(statistics):
            say(line)
    else:
        rows = [
            (one.fqn, one.dtype, short_shape(one.shape), *stats_cells(one))
            for one in statistics.tensors
        ]
        width = render.terminal_width()
        render.emit(render.columns(_HEADER, rows, align="lllrrrrrrrr", width=width))
        render.emit(_anomaly_lines(statistics))
    if asked.fail_nonfinite:
        _refuse_nonfinite(statistics)


def _stats(asked: _Asked, index: CheckpointIndex) -> Statistics:
    """The statistics of the chosen tensors. Raises AnswerNo for none."""
    chosen = choosing.chosen_in(index, asked.filters)
    with render.byte_bar(chosen.count.nbytes, label="stats") as on_bytes, Files() as files:
        statistics = stats(chosen, files, threads=asked.threads, on_bytes=on_bytes)
    if not chosen.tensors:
        raise AnswerNo(f"{index.root} has no tensors.")
    return statistics


def _refuse_nonfinite(statistics: Statistics) -> None:
    """Raise AnswerNo for values that are not finite."""
    if statistics.nonfinite:
        names = [tensor.fqn for tensor in statistics.tensors if tensor.nan or tensor.inf]
        values = f"{counted(statistics.nonfinite, 'value')} {are(statistics.nonfinite)}"
        raise AnswerNo(f"{statistics.root}: {values} NaN or infinite, in {some(names)}.")


def _steps(asked: _Asked) -> None:
    """Print the groups of each step, as soon as it is read; exit with 1 for one that is not."""
    if not asked.csv or asked.reading.chooses:
        raise UsageError("--steps goes with --csv, and prints every step.")
    steps = formats.steps_in(asked.ckpt)
    if not steps:
        raise AnswerNo(f"{asked.ckpt} has no checkpoint with a step in its name.")
    failures: list[CkptError] = []
    unmatched = [*asked.filters.exclude]

    def rows() -> Iterator[Sequence[str | int | None]]:
        for step in steps:
            try:
                path = formats.of_step(asked.ckpt, step)
                index = formats.read_index(path, asked.reading.options)
                unmatched[:] = idle(unmatched, choosing.names_of(index))
                statistics = _stats(asked, index)
                for group in groups_of(statistics):
                    numbers = map(_exact, (group.l2, group.abs_max))
                    yield (step, *group[:4], *numbers, group.nonfinite, "")
                if asked.fail_nonfinite:
                    _refuse_nonfinite(statistics)
            except CkptError as error:
                failures.append(error)
                empty = ("",) * len(GroupStats._fields)
                yield (step, *empty, error.first_line)

    render.emit_csv(_STEPS_HEADER, rows())
    for text in unmatched:
        say(f"Note: -x '{text}' matches nothing in {asked.ckpt}.")
    if failures:
        raise AnswerNo(f"{counted(len(failures), 'step')} of {len(steps)}: {failures[0].message}")


def _exact(value: complex | None) -> str:
    """A number with all its digits; nothing for none."""
    return "" if value is None else repr(value)


def _anomaly_lines(statistics: Statistics) -> Iterator[str]:
    if not statistics.anomalies:
        return
    yield ""
    yield render.heading("Suspicious regions: their edges are shard edges")
    for anomaly in statistics.anomalies:
        rank = "" if anomaly.rank is None else f", rank {anomaly.rank}"
        where = f"{anomaly.fqn} {anomaly.box}{rank}, {anomaly.path}"
        yield f"  {anomaly.kind}: {where}: {anomaly.detail}"


def _csv_row(tensor: TensorStats) -> tuple[str | int | None, ...]:
    values = (tensor.mean, tensor.std, tensor.min, tensor.max, tensor.l2)
    what = (tensor.fqn, tensor.section, tensor.dtype, short_shape(tensor.shape), tensor.numel)
    return (*what, *map(_exact, values), tensor.nan, tensor.inf, tensor.zeros)
