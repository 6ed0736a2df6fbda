"""Rows into text: tables, JSON, CSV; and on stderr what is being done, on a terminal alone. It
knows nothing of checkpoints or commands.

Whatever comes out of a checkpoint is made printable here, where it is printed: `emit` does it to
each line, and what measures texts (tables, headings) to each text before.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from threading import Event, Thread
from typing import TYPE_CHECKING

import click

from ckpt_tools.cli.group import error_json, is_dumb, is_quiet
from ckpt_tools.core.records import Json as Json  # noqa: PLC0414 (what is emitted)
from ckpt_tools.errors import CkptError, from_system, printable

if TYPE_CHECKING:
    from typing import NoReturn

    from tqdm import tqdm

_ANSWER = "ckpt_tools.answer"
ERROR = "ckpt-tools/error/1"  # the schema of what has an error and nothing else
_LINES_AT_ONCE = 2_000
_GAP = "  "
# What is left to the first and the last column of a long table on a narrow terminal.
_FIRST, _LAST = 8, 14
_WIDEST = 500
_SILENT = 2.0  # seconds after which a person wonders
_EVERY = 1.0
_DELAY = 0.5  # what is refused or done at once draws nothing

# A label, and a text of one line or several lines.
Fact = tuple[str, str | Sequence[str]]


class Styled(str):
    """Text with colours of our own, in which everything from a checkpoint is printable already."""

    __slots__ = ()


def emit(lines: Iterable[str]) -> None:
    """Print lines on stdout, many at a time: one write for each line costs more than the line."""
    remaining = iter(lines)
    while batch := list(islice(remaining, _LINES_AT_ONCE)):
        shown = (line if isinstance(line, Styled) else printable(line) for line in batch)
        click.echo("\n".join(shown))


def emit_json(value: Mapping[str, Json]) -> None:
    """Have this object printed at the end of the command, with its error if it has one."""
    click.get_current_context().meta[_ANSWER] = value


@contextmanager
def one_object(ctx: click.Context, *, with_error: bool) -> Iterator[None]:
    """Print what `emit_json` was given when the block ends, ``with_error`` if that ended it: as its
    field ``error``, and alone where nothing was given.
    """
    try:
        yield
    except (CkptError, OSError) as error:
        if with_error:
            failed = error if isinstance(error, CkptError) else from_system(error)
            given = ctx.meta.get(_ANSWER, {"schema": ERROR})
            ctx.meta[_ANSWER] = {**given, "error": error_json(failed)}
        raise
    finally:
        if _ANSWER in ctx.meta:
            print_json(ctx.meta.pop(_ANSWER))


def print_json(value: Json) -> None:
    """Print one JSON value on one line when piped, indented on a terminal."""
    click.echo(_json(value, indent=2 if sys.stdout.isatty() else None))


def emit_json_lines(values: Iterable[Json]) -> None:
    """Print one JSON value a line."""
    emit(map(_json, values))


def _json(value: Json, *, indent: int | None = None) -> str:
    """The text of a value: it has escapes for all but ASCII, and here for DEL, too."""
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(finite(value), indent=indent)
    return text.replace("\x7f", "\\u007f")


def finite(value: Json) -> Json:
    """The same with a string for each number that JSON lacks: ``nan``, ``inf``, ``-inf``."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def emit_csv(header: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> None:
    """Print a CSV table with its header: exact, as CSV quotes it, when piped; on a terminal names
    are printable.
    """
    import csv  # late: one form of one command needs it

    shown = printable if sys.stdout.isatty() else str
    writer = csv.writer(_Echo(), lineterminator="\r\n")  # quotes what holds one of the two
    cells = ([shown(c) if isinstance(c, str) else c for c in row] for row in (header, *rows))
    emit_raw(writer.writerow(row).removesuffix("\r\n") for row in cells)


def emit_raw(lines: Iterable[str]) -> None:
    """Print lines on stdout exactly as they are: click would take colours out of them."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


class _Echo:
    """What csv writes to: each line is given back by `writerow`."""

    def write(self, text: str) -> str:
        return text


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, or None when it is none: nothing is folded then."""
    if not sys.stdout.isatty():
        return None
    from shutil import get_terminal_size  # late: it loads every kind of compression

    return get_terminal_size().columns


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str) -> Iterator[str]:
    """A small indented table; ``align`` has one letter a column, ``l`` or ``r``.

    On a terminal that is too narrow, texts of the widest column are folded.
    """
    from tabulate import tabulate  # late: not every answer is a table

    rows = [list(map(printable, row)) for row in rows]
    words = {"l": "left", "r": "right"}
    wide = [f"{name}{_GAP}" for name in header]  # tabulate gives its headers so much room
    sizes = [max(map(len, column)) for column in zip(wide, *rows, strict=True)]
    over = sum(sizes) + len(_GAP) * len(sizes) - (terminal_width() or sys.maxsize)
    widest = max(sizes)
    folded = [max(size - over, _FIRST) if size == widest else None for size in sizes]
    text = tabulate(
        rows,
        headers=list(header),
        tablefmt="plain",
        colalign=[words[letter] for letter in align],
        disable_numparse=True,
        maxcolwidths=folded if over > 0 else None,
    )
    return (f"  {line}" for line in text.split("\n"))


def columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str, width: int | None
) -> Iterator[str]:
    """A long table, line by line, for a terminal of ``width`` columns, or for a pipe if None.

    ``align`` has one letter a column: ``l`` or ``r``, and for a last one ``c`` that may be cut or
    ``w`` that may be wrapped. Names too long for the first column stand on a line of their own.
    tabulate cannot fold, and it takes 3 s for 100,000 rows, for which this takes 0.3 s.
    """
    rows = [list(map(printable, row)) for row in rows]
    widths = list(map(widest, zip(header, *rows, strict=True)))
    lines = [range(len(widths))]
    if width is not None:
        lines = _fit(widths, align=align, width=width)
    indent = sum(widths[i] + len(_GAP) for i in lines[-1][:-1]) + (4 if len(lines) > 1 else 0)
    for row in (header, *rows):
        first, *others = row
        if len(first) > widths[0]:
            yield first
            first = ""
        final, *more = _wrapped(others[-1], widths[-1]) if align[-1] == "w" else others[-1:]
        cells = [first, *others[:-1], cut_to(final, widths[-1]) if align[-1] == "c" else final]
        cells = [
            cell.rjust(size) if letter == "r" else cell.ljust(size)
            for cell, size, letter in zip(cells, widths, align, strict=True)
        ]
        for place, line in enumerate(lines):
            yield ("    " if place else "") + _GAP.join(cells[i] for i in line).rstrip()
        for text in more:
            yield " " * indent + text


def widest(texts: Iterable[str]) -> int:
    """How wide a column of these is: a text that is longer than that is no reason for blanks in
    every other line.
    """
    return min(max(map(len, texts), default=0), _WIDEST)


def _fit(widths: list[int], *, align: str, width: int) -> list[range]:
    """Which columns stand on which line of a row; ``widths`` of the first and last are changed."""
    middle = sum(widths[1:-1]) + len(_GAP) * (len(widths) - 1)
    last = min(widths[-1], _LAST) if align[-1] in "cw" else widths[-1]
    widths[0] = min(widths[0], max(width - middle - last, _FIRST))
    starts, used = [0], widths[0]
    for place, size in enumerate([*widths[1:-1], last], start=1):
        if used + len(_GAP) + size > width:
            starts.append(place)
            used = 4 + size
        else:
            used += len(_GAP) + size
    if align[-1] in "cw":
        widths[-1] = min(widths[-1], max(width - used + last, _LAST))
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(widths)], strict=True)]


def indented(header: Sequence[str], rows: Sequence[Sequence[str]], *, align: str) -> Iterator[str]:
    """A small table as `columns` makes it, two spaces to the right, folded on a terminal."""
    width = terminal_width()
    shown = columns(header, rows, align=align, width=None if width is None else width - 2)
    return (f"  {line}" for line in shown)


def _wrapped(text: str, size: int) -> list[str]:
    """The words of the text in lines of at most ``size`` characters where words allow it."""
    if len(text) <= size:
        return [text]
    from textwrap import wrap  # late: few texts are that long

    return wrap(text, size, break_long_words=False, break_on_hyphens=False)


def cut_to(text: str, size: int) -> str:
    """The text, cut to ``size`` characters and marked so when it is longer."""
    return text if len(text) <= size else text[: size - 1] + "…"


def heading(text: str) -> Styled:
    """A line that stands above others; bold on a terminal."""
    return Styled(click.style(printable(text), bold=True))


def facts(pairs: Iterable[Fact]) -> Iterator[str]:
    """Labels and what belongs to them, in two columns; on a terminal, words wrap inside theirs."""
    width = terminal_width()
    for label, text in pairs:
        first, *more = [
            line
            for whole in map(printable, [text] if isinstance(text, str) else text)
            for line in ([whole] if width is None else _wrapped(whole, max(width - 14, _LAST)))
        ]
        yield f"  {label:<12}{first}"
        for line in more:
            yield " " * 14 + line


def bare(value: Json) -> str:
    """A value for a script: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def number(value: complex | None) -> str:
    """A number in a few digits, ``-`` for none."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) < 10**12:
        return str(value)
    if isinstance(value, (int, float)):
        return f"{value:.4g}"
    return f"{value.real:.4g}{value.imag:+.4g}j"


# ------------------------------------------------------------------------------- what is being done


class _Bar:
    """A progress callback: the number of bytes done since the last call.

    `expect` sets the total, without which no end is shown. Without a ``drawn`` one it does nothing.
    """

    def __init__(self, drawn: tqdm[NoReturn] | None = None) -> None:
        self._drawn = drawn

    def __call__(self, nbytes: int) -> None:
        if self._drawn is None:
            return
        if not self._drawn.n:  # what was done before the first bytes does not count for the speed
            self._drawn.start_t = self._drawn.last_print_t = time.time()
        self._drawn.update(nbytes)

    def name(self, phase: str) -> None:
        """Say what is done from now on."""
        if self._drawn is not None:
            self._drawn.set_description(phase, refresh=False)

    def expect(self, total: int) -> None:
        """Set the total number of bytes."""
        if self._drawn is not None:  # with the next bytes: a bar drawn too early is never erased
            self._drawn.total = total


def _is_drawn() -> bool:
    """Whether anything is: a bar goes back to the start of its line."""
    return sys.stderr.isatty() and not is_quiet() and not is_dumb()


@contextmanager
def byte_bar(total: int | None = None, *, label: str) -> Iterator[_Bar]:
    """Yield a bar of ``total`` bytes. Nothing is drawn with --quiet, or when stderr is no
    terminal.
    """
    if not _is_drawn():
        yield _Bar()
        return
    from tqdm import tqdm  # late: looking commands draw no bar

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, leave=False, delay=_DELAY) as bar:
        yield _Bar(bar)


@contextmanager
def clock(text: str) -> Iterator[None]:
    """Say what is waited for, and for how long, once it takes more than two seconds."""
    if not _is_drawn():
        yield
        return
    done, started = Event(), time.monotonic()

    def tick() -> None:
        wait, drawn = _SILENT, ""
        while not done.wait(wait):
            wait, drawn = _EVERY, f"{text}: {time.monotonic() - started:.0f} s"
            click.echo(f"{drawn}\r", nl=False, err=True)
        if drawn:
            click.echo(f"{' ' * len(drawn)}\r", nl=False, err=True)

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
