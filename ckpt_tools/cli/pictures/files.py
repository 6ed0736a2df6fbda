"""Writes a finished picture or page to a file or to stdout."""

from __future__ import annotations

import click

from ckpt_tools.cli import render
from ckpt_tools.copying import one_file
from ckpt_tools.core.text import format_size


def write(path: str, text: str, *, sources: tuple[str, ...], force: bool) -> None:
    """Write the text to a file, whole or not at all, and say so on stdout; ``-`` is stdout itself.

    Raises what `one_file.write` raises.
    """
    if path == "-":
        click.echo(text, nl=False)
        return
    data = text.encode(errors="backslashreplace")
    one_file.write(path, data, sources=sources, force=force)
    render.emit([f"{path}: {format_size(len(data))}"])
