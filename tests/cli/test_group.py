"""How commands end: exit codes, one error in one line, and no traceback unless asked for."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import Result
from running import run
from terminals import shown_by

from ckpt_tools.cli import cli, inspect
from ckpt_tools.errors import (
    AnswerNo,
    UnreadableError,
    UsageError,
    WriteError,
)

CKPT = str(Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_1d_4r" / "ckpt")


def ending(monkeypatch: pytest.MonkeyPatch, error: BaseException, *flags: str) -> Result:
    """The result of a command whose reading ends with this error."""

    def failing(*_args: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(inspect, "read_index", failing)
    return run("inspect", "ckpt", *flags)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AnswerNo("no"), 1),
        (UsageError("no"), 2),
        (UnreadableError("no"), 3),
        (WriteError("no"), 4),
        (PermissionError(13, "Permission denied", "/x"), 3),
        (OSError(28, "No space left on device"), 4),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_each_error_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    assert ending(monkeypatch, error).exit_code == code


def test_an_error_is_one_line_and_its_hint_is_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    error = UnreadableError("It is truncated.", "Hurt: all.", hint="Try this,\nor that.")
    shown = ending(monkeypatch, error)
    assert shown.stdout == ""
    assert shown.stderr == "Error: It is truncated.\n  Hurt: all.\n  Try this,\n  or that.\n"


def test_a_traceback_is_shown_with_vv_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Traceback" not in ending(monkeypatch, UnreadableError("x"), "-v").stderr
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    assert "Traceback" in ending(monkeypatch, UnreadableError("x"), "-vv").stderr


def test_v_says_what_an_error_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    error = UnreadableError("It is odd.")
    error.__cause__ = ValueError("bad digit")
    assert "bad digit" not in ending(monkeypatch, error).stderr
    assert "  Because of ValueError: bad digit\n" in ending(monkeypatch, error, "-v").stderr


def test_an_error_of_the_system_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = ending(monkeypatch, PermissionError(13, "Permission denied", "/x"))
    assert shown.stderr == "Error: /x: Permission denied.\n"


def test_several_checkpoints_are_told_on_after_one_fails() -> None:
    result = run("inspect", "/nowhere", CKPT)
    assert result.exit_code == 3
    assert CKPT in result.stdout
    assert "/nowhere" in result.stderr


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": "0"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, True),
    ],
)
def test_colours_in_a_pipe(variables: dict[str, str], *, coloured: bool) -> None:
    plain = dict.fromkeys(("NO_COLOR", "FORCE_COLOR", "TERM"))
    done = run("layout", CKPT, env={**plain, **variables})
    assert ("\x1b" in done.stdout) == coloured
    assert ("\x1b" in run("ls", "/nowhere", env={**plain, **variables}).stderr) == coloured


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_on_a_terminal(variables: dict[str, str]) -> None:
    shown = shown_by("-m", "ckpt_tools", "layout", CKPT, FORCE_COLOR="", **variables)
    assert "\x1b" not in shown
    assert "\x1b" in shown_by("-m", "ckpt_tools", "layout", CKPT, FORCE_COLOR="", NO_COLOR="")


def test_what_click_quotes_is_printable(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command
    def failing() -> None:
        raise click.UsageError("No such option: --\x1b[2J")  # as click 8.1 does

    monkeypatch.setattr(type(cli), "get_command", lambda *_: failing)
    result = run("ls", color=True)
    assert result.exit_code == 2
    assert result.stderr.endswith("No such option: --\\x1b[2J\n")


def test_a_fault_of_our_own_is_told_in_two_lines_and_is_no_answer() -> None:
    program = (
        "import sys; from ckpt_tools import cli; from ckpt_tools.cli import inspect\n"
        "def failing(*a, **b): raise KeyError('odd')\n"
        "inspect.read_index = failing; sys.argv = ['ckpt-tools', 'inspect', 'x']; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: ckpt-tools itself failed")


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]])
def test_a_reader_that_goes_away_ends_it_silently(form: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "ls", "-q", *form, CKPT],
        check=False, stdout=write, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_answer_that_cannot_be_written_is_no_success() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_tools", "ls", "-q", CKPT],
            check=False, stdout=full, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert done.returncode == 4
    assert done.stderr.startswith("Error:")


_HELP_IS_AN_ANSWER = version("click").startswith("8.1.")  # there, exit code 0


@pytest.mark.parametrize(
    "args",
    [
        ["ls"],
        ["ls", CKPT, "--only", "x"],
        ["nosuch"],
        pytest.param([], marks=pytest.mark.skipif(_HELP_IS_AN_ANSWER, reason="needs click 8.2")),
    ],
)
def test_what_cannot_be_meant_is_exit_code_2(args: list[str]) -> None:
    assert run(*args).exit_code == 2


def test_values_of_a_hurt_tensor_are_refused_and_whole_ones_shown(tmp_path: Path) -> None:
    hurt = shutil.copytree(CKPT, tmp_path / "hurt")
    os.truncate(hurt / "__2_0.distcp", 1000)
    result = run("show", hurt, "app.model.emb.weight")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "__2_0.distcp is truncated" in result.stderr
    assert run("show", "--raw", hurt, "app.model.seen").exit_code == 0


def test_forms_exclude_one_another() -> None:
    result = run("ls", CKPT, "--json", "--csv")
    assert result.exit_code == 2
    assert "--json and --csv" in result.stderr
