"""Rows into text: tables, JSON, CSV. It knows nothing of checkpoints or commands.

Whatever comes out of a checkpoint goes through `printable` first: a name must not move a cursor.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import click

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

_LINES_AT_ONCE = 2_000
_GAP = "  "
# What is left to the first and the last column of a long table on a narrow terminal.
_FIRST, _LAST = 8, 14


def printable(text: str) -> str:
    """The text with control characters and lone surrogates as escapes, so that it stays a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def emit(lines: Iterable[str]) -> None:
    """Print lines on stdout, many at a time: one write for each line costs more than the line."""
    remaining = iter(lines)
    while batch := list(islice(remaining, _LINES_AT_ONCE)):
        click.echo("\n".join(batch))


def emit_json(value: Json) -> None:
    """Print one JSON value on one line when piped, indented on a terminal."""
    click.echo(json.dumps(value, indent=2 if sys.stdout.isatty() else None))


def emit_json_lines(values: Iterable[Json]) -> None:
    """Print one JSON value a line."""
    emit(json.dumps(value) for value in values)


def emit_csv(header: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> None:
    """Print a CSV table with its header, a line each: names are written as in every table."""
    emit(_csv_lines(header, rows))


def _csv_lines(header: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> Iterator[str]:
    import csv  # late: one form of one command needs it

    writer = csv.writer(_Echo(), lineterminator="")
    for row in (header, *rows):
        yield writer.writerow([printable(cell) if isinstance(cell, str) else cell for cell in row])


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

    words = {"l": "left", "r": "right"}
    wide = [f"{name}{_GAP}" for name in header]  # tabulate gives its headers so much room
    sizes = [max(map(len, column)) for column in zip(wide, *rows, strict=True)]
    over = sum(sizes) + len(_GAP) * len(sizes) - (terminal_width() or sys.maxsize)
    widest = max(sizes)
    folded = [max(size - over, _FIRST) if size == widest else None for size in sizes]
    text = tabulate(
        [list(row) for row in rows],
        headers=list(header),
        tablefmt="plain",
        colalign=[words[letter] for letter in align],
        disable_numparse=True,
        maxcolwidths=folded if over > 0 else None,
    )
    return (f"  {line}" for line in text.splitlines())


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    align: str,
    width: int | None,
) -> Iterator[str]:
    """A long table, line by line, for a terminal of ``width`` columns, or for a pipe if None.

    ``align`` has one letter a column: ``l`` or ``r``, and for a last one ``c`` that may be cut or
    ``w`` that may be wrapped. On a terminal, names too long for the first column stand on a line of
    their own. tabulate cannot fold, and it takes 3 s for 100,000 rows, for which this takes 0.3 s.
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
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


def utc(seconds: float) -> str:
    """A time in seconds since 1970 as ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def heading(text: str) -> str:
    """A line that stands above others; bold on a terminal."""
    return click.style(text, bold=True)


def facts(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Labels and what belongs to them, in two columns; on a terminal, words wrap inside theirs."""
    width = terminal_width()
    for label, text in pairs:
        first, *more = [
            line
            for whole in text.split("\n")
            for line in ([whole] if width is None else _wrapped(whole, max(width - 14, _LAST)))
        ]
        yield f"  {label:<12}{first}"
        for line in more:
            yield " " * 14 + line


def bare(value: Json) -> str:
    """A value for a script: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
