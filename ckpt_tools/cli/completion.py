"""`ckpt-tools completion`: what a shell must read to complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ckpt_tools.cli import options

_SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_CKPT_TOOLS_COMPLETE"

_HELP = """Print what your shell must read to complete commands, options, files and tensor names.

After `ckpt-tools show CKPT` and `ckpt-tools layout CKPT`, TAB offers the names in that checkpoint.

""" + options.examples(
    'eval "$(ckpt-tools completion bash)"   # in ~/.bashrc',
    'eval "$(ckpt-tools completion zsh)"    # in ~/.zshrc, after compinit',
    "ckpt-tools completion fish > ~/.config/fish/completions/ckpt-tools.fish",
)


@click.command(
    "completion",
    cls=options.Command,
    help=_HELP,
    params=[click.Argument(["shell"], type=click.Choice(_SHELLS))],
)
def command(*, shell: str) -> None:
    """Print the script of one shell."""
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"This click has no completion for {shell}.")
    group = click.get_current_context().find_root().command
    maker = found(group, {}, "ckpt-tools", _VARIABLE)
    # Not `source()`: for bash that looks which version is installed here, where it may not run.
    click.echo(maker.source_template % maker.source_vars())
