"""`ckpt-tools browse`: walk through one checkpoint, or through two side by side, on a screen."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from ckpt_tools.cli import options
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import ReadOptions
from ckpt_tools.proof import Naming

_HELP = """Walk through a checkpoint on the screen: sizes, shards, values; or through two at once.

The largest part stands first, with a bar against its siblings. Enter opens a part; / searches by
name; s, n and f arrange the tree by section, by name or by the files that ranks saved; `:` takes a
slice such as 0:4,:8 of a tensor's values. The keys stand in the last line.

With OTHER each part says what `diff` says of it, at first by headers alone; c compares the values
below the cursor, and d leaves only what differs. --clean-names compares names as `diff` does.

Only headers are read, and the few values that are shown. It needs textual: pip install
'ckpt-tools[browse]'. Exit code 3, after the end, for a checkpoint that is not whole.

""" + options.examples(
    "ckpt-tools browse run7/step-1000",
    "ckpt-tools browse run7/step-1000 run7/step-2000",
    "ckpt-tools browse run7/step-1000 run7-hf --clean-names",
)

_PARAMS = [
    options.checkpoint(),
    click.Argument(
        ["other"], metavar="[OTHER]", required=False, type=click.Path(), callback=options.of_step
    ),
    click.Option(["--clean-names"], is_flag=True, help="Names without containers and wrappers."),
    *options.reading(),
    *options.talk(),
]


@click.command("browse", cls=options.Command, help=_HELP, params=_PARAMS)
def command(
    *, ckpt: str, other: str | None, clean_names: bool, allow_global: tuple[str, ...]
) -> None:
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
    from ckpt_tools.cli.browse.sides import Sides

    paths = [ckpt] if other is None else [ckpt, other]
    indexes = [options.read(path, ReadOptions(allow_global)) for path in paths]
    Browser(Sides(indexes, Naming(clean=clean_names))).run()
    for index in indexes:
        index.require_whole()
