"""`ckpt-tools completion`: what a shell must read to complete commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from ckpt_tools.cli import options

_SHELLS = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_VARIABLE = "_CKPT_TOOLS_COMPLETE"

# click's scripts take a name for shell text, where it comes from a file of anybody. bash puts it on
# the line unquoted, so that a `$(…)` in it would run on Enter; fish cuts it at its first comma. zsh
# and fish quote what they insert themselves.
_MENDED = {
    "bash": {
        "COMPREPLY+=($value)": 'COMPREPLY+=("$(printf %%q "$value")")',
        "read type value": "read -r type value",
    },
    "fish": {'(string split "," $completion)': '(string split -m 1 "," $completion)'},
}

_HELP = """Print the shell code that completes commands, options, files and tensor names.

After `ckpt-tools show CKPT`, `ckpt-tools layout CKPT`, -i and -x, TAB offers the names in that
checkpoint.

""" + options.examples(
    'eval "$(ckpt-tools completion bash)"   # in ~/.bashrc',
    'eval "$(ckpt-tools completion zsh)"    # in ~/.zshrc, after compinit',
    "ckpt-tools completion fish > ~/.config/fish/completions/ckpt-tools.fish",
)


@click.command(
    "completion",
    cls=options.Command,
    help=_HELP,
    params=[click.Argument(["shell"], type=click.Choice([*_SHELLS]))],
)
def command(*, shell: str) -> None:
    """Print the script of one shell."""
    group = click.get_current_context().find_root().command
    maker = _SHELLS[shell](group, {}, "ckpt-tools", _VARIABLE)
    # Not `source()`: for bash that looks which version is installed here, where it may not run.
    script = maker.source_template
    for theirs, ours in _MENDED.get(shell, {}).items():
        if theirs not in script:
            raise click.UsageError(f"The completion of this click for {shell} is not known here.")
        script = script.replace(theirs, ours)
    click.echo(script % maker.source_vars())
