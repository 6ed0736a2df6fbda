"""The frame of a page: one HTML file with its style and its script, and no network; and writes it.

Without the script all is there; it only adds a filter. It knows nothing of what the page shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from html import escape

import click

from ckpt_tools.cli import render
from ckpt_tools.cli.pictures import colors
from ckpt_tools.copying import one_file
from ckpt_tools.core.text import format_size
from ckpt_tools.errors import printable

_FOLDER = os.path.dirname(__file__)
# Nothing may be fetched, whatever a name in the checkpoint tries to say.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def text(value: str) -> str:
    """Text out of a checkpoint as HTML."""
    return escape(printable(value))


def page(title: str, body: Iterable[str]) -> str:
    """A whole page of this body, which is HTML."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(title)}</title>",
        f"<style>\n{_file('page.css')}{colors.css()}</style></head><body>",
        '<label id="theme" title="Light or dark"><input type="checkbox">◐</label><main>',
        *body,
        "</main>",
        f"<script>\n{_file('filter.js')}</script></body></html>\n",
    ]
    return "\n".join(parts)


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()
) -> Iterator[str]:
    """A table of texts; ``numbers`` are the columns that are set to the right."""
    right = frozenset(numbers)
    styles = [' class="n"' if place in right else "" for place in range(len(header))]
    yield '<div class="scroll"><table><thead><tr>'
    for style, name in zip(styles, header, strict=True):
        yield f"<th{style}>{text(name.lower())}</th>"
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = (f"<td{style}>{text(cell)}</td>" for style, cell in zip(styles, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _file(name: str) -> str:
    with open(os.path.join(_FOLDER, name), encoding="utf-8") as file:
        return file.read()


def write(path: str, page: str, *, sources: tuple[str, ...], force: bool) -> None:
    """Write a page to a file, whole or not at all, and say so on stdout; ``-`` is stdout itself.

    Raises what `one_file.write` raises.
    """
    if path == "-":
        click.echo(page, nl=False)
        return
    data = page.encode(errors="backslashreplace")
    one_file.write(path, data, sources=sources, force=force)
    render.emit([f"{path}: {format_size(len(data))}"])
