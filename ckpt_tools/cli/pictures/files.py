"""Writes a finished picture or page to where a person wants it."""

from __future__ import annotations

import os

import click

from ckpt_tools.cli import render
from ckpt_tools.core.text import format_size
from ckpt_tools.errors import OutputExistsError, unwritable


def write(path: str, text: str, *, force: bool) -> None:
    """Write the text to a file, whole or not at all, and say so on stdout; ``-`` is stdout itself.

    Raises OutputExistsError when the file is there and may not be replaced, WriteError when it
    cannot be written.
    """
    if path == "-":
        click.echo(text, nl=False)
        return
    if os.path.lexists(path) and not force:
        raise OutputExistsError(f"{path} is there already.", hint="--force replaces it.")
    data = text.encode(errors="backslashreplace")
    partial = f"{path}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        raise unwritable(path, error) from error
    click.echo(f"{render.printable(path)}: {format_size(len(data))}")
