"""What a person asked of the writing, for the commands that write."""

from __future__ import annotations

import click

from ckpt_tools.convert.export import WriteOptions


def given() -> WriteOptions:
    """The values of `options.writing` in the command that runs."""
    params = click.get_current_context().params
    return WriteOptions(
        force=params["force"],
        threads=params["threads"],
        max_memory=params["max_memory"],
        resume=params["resume"],
        check=params["check"],
    )
