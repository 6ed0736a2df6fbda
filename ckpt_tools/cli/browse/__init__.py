"""`ckpt-tools browse`: walk through one checkpoint, or through two side by side, on a screen."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import click

from ckpt_tools.cli import options
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import ReadOptions
from ckpt_tools.proof.diff import Naming

_HELP = """Browse a checkpoint on the screen: sizes, shards, values; or compare two.

The largest part is first, with a bar that compares it with its siblings. Enter opens a part; /
searches by name; s, n and f group the tree by section, by name or by the files that ranks saved;
`:` selects a slice of a tensor's values, such as 0:4,:8. The last line shows the keys.

With OTHER each part shows what `diff` says of it, at first by headers only; c compares the values
below the cursor, and d shows only what differs. --clean-names compares names as `diff` does.

Only headers and the values on the screen are read. It needs textual: pip install
'ckpt-tools[browse]'. The exit code is 3 if the checkpoint is not complete.

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
    click.Option(
        ["--clean-names"], is_flag=True, help="Compare names without containers and wrappers."
    ),
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
