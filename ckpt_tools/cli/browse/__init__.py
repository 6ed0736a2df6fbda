"""`ckpt-tools browse`: walk through a checkpoint on a screen."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec

from ckpt_tools.cli import choosing, options
from ckpt_tools.errors import UsageError

_HELP = """Browse a checkpoint on the screen: sizes, shards, values.

The largest part is first, with a bar that compares it with its siblings. Enter opens a part; /
searches by name; s, n and f group the tree by section, by name or by the files that ranks saved;
`:` selects a slice of a tensor's values, such as 0:4,:8. ? shows the keys.

Only headers and the values on the screen are read. It needs textual: pip install textual. The exit
code is 3 if the checkpoint is not complete.

""" + options.examples("ckpt-tools browse run7/step-1000")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    reading: choosing.Reading


@options.command("browse", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Read the headers, then hand the screen over until somebody leaves it."""
    if find_spec("textual") is None:
        raise UsageError(
            "browse needs textual, which is not installed.", hint="pip install textual"
        )
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "browse needs a terminal.", hint="`ckpt-tools ls --tree` and `inspect` write text."
        )
    from ckpt_tools.cli.browse.app import Browser  # late: textual is an extra
    from ckpt_tools.cli.browse.content import Content

    index = asked.reading.read(asked.ckpt)
    Browser(Content(index)).run()
    index.require_whole()
