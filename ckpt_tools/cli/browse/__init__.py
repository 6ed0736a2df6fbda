"""`ckpt-tools browse`: walk through a checkpoint on a screen."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from ckpt_tools.cli import options
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import ReadOptions

_HELP = """Browse a checkpoint on the screen: sizes, shards, values.

The largest part is first, with a bar that compares it with its siblings. Enter opens a part; /
searches by name; s, n and f group the tree by section, by name or by the files that ranks saved;
`:` selects a slice of a tensor's values, such as 0:4,:8. The last line shows the keys.

Only headers and the values on the screen are read. It needs textual: pip install
'ckpt-tools[browse]'. The exit code is 3 if the checkpoint is not complete.

""" + options.examples("ckpt-tools browse run7/step-1000")

_PARAMS = [options.checkpoint(), *options.reading(), *options.talk()]


@click.command("browse", cls=options.Command, help=_HELP, params=_PARAMS)
def command(*, ckpt: str, allow_global: tuple[str, ...]) -> None:
    """Read the headers, then hand the screen over until somebody leaves it."""
    if find_spec("textual") is None:
        raise UsageError(
            "browse needs textual, which is not installed.",
            hint="pip install 'ckpt-tools[browse]'",
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "browse needs a terminal.", hint="`ckpt-tools ls --tree` and `inspect` write text."
        )
    from ckpt_tools.cli.browse.app import Browser  # late: textual is an extra
    from ckpt_tools.cli.browse.content import Content

    index = options.read(ckpt, ReadOptions(allow_global))
    Browser(Content(index)).run()
    index.require_whole()
