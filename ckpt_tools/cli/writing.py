"""What a person asked of the writing, for the commands that write."""

from __future__ import annotations

import os
from collections.abc import Mapping

import click

from ckpt_tools.cli import shaping
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.index import FileEntry
from ckpt_tools.storage import paths


def _others(params: Mapping[str, object]) -> list[str]:
    """What else `reshard` reads."""
    return [value for name in ("like", "param_names") if isinstance(value := params.get(name), str)]


def given() -> WriteOptions:
    """The values of `options.writing` in the command that runs."""
    params = click.get_current_context().params
    read = [*shaping.files_read(params["ckpt"]), *filter(os.path.isfile, _others(params))]
    states = paths.states_now(read)
    return WriteOptions(
        force=params["force"],
        threads=params["threads"],
        max_memory=params["max_memory"],
        resume=params["resume"],
        check=params["check"],
        sources=(params["ckpt"], *shaping.sources(), *_others(params)),
        watched=tuple(FileEntry(path, state.size, state) for path, state in states.items()),
    )
