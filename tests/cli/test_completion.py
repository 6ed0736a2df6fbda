"""Completion: what a shell is offered for commands and for names inside of a checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from ckpt_tools.cli import cli

CKPT = str(Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt")


def _offered(*words: str) -> list[str]:
    *before, incomplete = words
    complete = ShellComplete(cli, {}, "ckpt-tools", "_CKPT_TOOLS_COMPLETE")
    return [item.value for item in complete.get_completions(before, incomplete)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str) -> None:
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert f"_CKPT_TOOLS_COMPLETE={shell}_complete" in done.stdout


def test_bash_can_read_its_script() -> None:
    script = CliRunner().invoke(cli, ["completion", "bash"]).stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_and_names() -> None:
    script = CliRunner().invoke(cli, ["completion", "fish"]).stdout
    asked = f'complete -C "ckpt-tools ins"; complete -C "ckpt-tools show {CKPT} model.head1.b"'
    done = subprocess.run(
        ["fish", "-c", f"source; {asked}"],
        input=script,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    offered = [line.split("\t")[0] for line in done.stdout.splitlines() if line]
    assert offered == ["inspect", "model.head1.bias"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_can_read_its_script() -> None:
    script = CliRunner().invoke(cli, ["completion", "zsh"]).stdout
    subprocess.run(["zsh", "-n"], input=script, text=True, check=True)


HOSTILE = ("a$(touch ran).w", "a`touch ran`.w", "a;touch ran", "a b'\"\\c", "a[0],b", "a&touch ran")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A checkpoint whose names are shell text, some of them with what ends a line."""
    names = [*HOSTILE, "a\nplain,evil", "a\x1b[31m"]
    header = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}
    text = json.dumps(header).encode()
    file = tmp_path / "hostile.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return file


def test_names_that_are_no_line_are_not_offered(hostile: Path) -> None:
    assert sorted(_offered("show", str(hostile), "")) == sorted(HOSTILE)


def test_bash_puts_names_on_the_line_so_that_nothing_in_them_runs(hostile: Path) -> None:
    script = CliRunner().invoke(cli, ["completion", "bash"]).stdout
    run = hostile.parent.parent / f"{hostile.parent.name}-ckpt-tools"
    run.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpt_tools "$@"\n')
    run.chmod(0o755)
    asked = f"""
        COMP_WORDS=(ckpt-tools show {hostile} a); COMP_CWORD=3
        _ckpt_tools_completion {run}
        for word in "${{COMPREPLY[@]}}"; do eval "printf '%s\\n' $word"; done
    """
    done = subprocess.run(
        ["bash", "-c", script + asked], cwd=hostile.parent, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == sorted(HOSTILE), done.stderr
    assert [path.name for path in hostile.parent.iterdir()] == [hostile.name]


def test_fish_takes_a_name_whole() -> None:
    script = CliRunner().invoke(cli, ["completion", "fish"]).stdout
    assert 'string split -m 1 "," $completion' in script


def test_commands_are_offered() -> None:
    assert _offered("ins") == ["inspect"]


def test_names_of_the_checkpoint_are_offered() -> None:
    assert _offered("show", CKPT, "model.head1.") == ["model.head1.bias", "model.head1.weight"]


def test_objects_are_offered_where_they_can_be_shown_only() -> None:
    assert "step" in _offered("show", CKPT, "ste")
    assert "step" not in _offered("layout", CKPT, "ste")


def test_a_part_of_a_name_finds_it() -> None:
    assert _offered("layout", CKPT, "head3.bias")[0] == "model.head3.bias"


def test_what_is_no_checkpoint_offers_nothing() -> None:
    assert _offered("show", "/nowhere", "model") == []
