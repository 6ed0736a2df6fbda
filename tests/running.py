"""Runs the command line in this process."""

from collections.abc import Mapping

from click.testing import CliRunner, Result

from ckpt_tools.cli import cli


def run(
    *words: object,
    color: bool = False,
    env: Mapping[str, str | None] | None = None,
    input: str | bytes | None = None,  # noqa: A002 - click's name of it
) -> Result:
    """Run ``ckpt-tools`` with these words; stdout, stderr and exit code are in what it returns."""
    return CliRunner().invoke(cli, [*map(str, words)], color=color, env=env, input=input)


def ran(*words: object) -> Result:
    """Run what must end with exit code 0."""
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    return done
