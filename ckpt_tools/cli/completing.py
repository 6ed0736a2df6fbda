"""What the shell offers when somebody presses TAB on a name inside of a checkpoint.

Nothing here prints or fails: a checkpoint that cannot be read offers nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tools.errors import CkptError

if TYPE_CHECKING:
    import click

# A shell lists what it is offered; nobody reads more than this.
_MOST = 2_000


def tensors(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 (click's signature)
    """Names of the tensors of the CKPT that stands before."""
    return _fitting(_names(ctx)[0], incomplete)


def names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001 (click's signature)
    """Names of all entries of the CKPT that stands before."""
    found, objects = _names(ctx)
    return _fitting(sorted(found + objects), incomplete)


def _fitting(found: list[str], incomplete: str) -> list[str]:
    """Names that begin so, else those that have it anywhere, at most `_MOST`.

    Shells are offered one name a line, so that those with a line break or an escape in them are
    left out.
    """
    found = [name for name in found if name and name.isprintable()]
    begin = [name for name in found if name.startswith(incomplete)]
    return (begin or [name for name in found if incomplete in name])[:_MOST]


def _names(ctx: click.Context) -> tuple[list[str], list[str]]:
    from ckpt_tools.formats import read_index  # late: most completions need no checkpoint

    ckpt = ctx.params.get("ckpt")
    if not isinstance(ckpt, str):
        return [], []
    try:
        index = read_index(ckpt)
    except (CkptError, OSError):
        return [], []
    return [entry.fqn for entry in index.tensors], [entry.fqn for entry in index.objects]
