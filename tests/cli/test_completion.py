"""Completion: what a shell is offered for commands and for names inside of a checkpoint."""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from launching import PATIENCE
from running import run

from ckpt_tools.cli import cli

CKPT = str(Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt")


def _offered(*words: str) -> list[str]:
    *before, incomplete = words
    complete = ShellComplete(cli, {}, "ckpt-tools", "_CKPT_TOOLS_COMPLETE")
    return [item.value for item in complete.get_completions(before, incomplete)]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_its_script(shell: str) -> None:
    done = run("completion", shell)
    assert done.exit_code == 0
    assert f"_CKPT_TOOLS_COMPLETE={shell}_complete" in done.stdout


def test_bash_can_read_its_script() -> None:
    script = run("completion", "bash").stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_commands_and_names() -> None:
    script = run("completion", "fish").stdout
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


HOSTILE = ("a$(touch ran).w", "a`touch ran`.w", "a;touch ran", "a b'\"\\c", "a[0],b", "a&touch ran")


def _checkpoint(file: Path, *names: str) -> Path:
    header = {name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for name in names}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return file


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A checkpoint whose names are shell text, some of them with what ends a line."""
    names = [*HOSTILE, "a\nplain,evil", "a\x1b[31m"]
    return _checkpoint(tmp_path / "hostile.safetensors", *names)


def test_names_that_are_no_line_are_not_offered(hostile: Path) -> None:
    assert sorted(_offered("show", str(hostile), "")) == sorted(HOSTILE)


def test_bash_puts_names_on_the_line_so_that_nothing_in_them_runs(hostile: Path) -> None:
    script = run("completion", "bash").stdout
    program = hostile.parent.parent / f"{hostile.parent.name}-ckpt-tools"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckpt_tools "$@"\n')
    program.chmod(0o755)
    asked = f"""
        COMP_WORDS=(ckpt-tools show {hostile} a); COMP_CWORD=3
        _ckpt_tools_completion {program}
        for word in "${{COMPREPLY[@]}}"; do eval "printf '%s\\n' $word"; done
    """
    done = subprocess.run(
        ["bash", "-c", script + asked], cwd=hostile.parent, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == sorted(HOSTILE), done.stderr
    assert [path.name for path in hostile.parent.iterdir()] == [hostile.name]


class Terminal:
    """A shell that somebody types into, in a folder of its own.

    `ckpt-tools` completes there as ever; run, it writes its arguments to the file `arguments`.
    """

    def __init__(self, folder: Path, keyboard: int) -> None:
        self._folder = folder
        self._keyboard = keyboard

    def type(self, keys: str) -> None:
        """Press keys, and wait until the shell has shown all it has to."""
        os.write(self._keyboard, keys.encode())
        while select.select([self._keyboard], [], [], 0.5)[0]:
            os.read(self._keyboard, 1 << 16)

    def begin(self, line: str) -> None:
        """Run a first line, and wait until the shell has."""
        self.type(f"{line}; touch begun\n")
        self._wait_for("begun")

    def completed(self, line: str) -> list[str]:
        """What the command is given when a line is completed by TAB, and then entered."""
        self.type(line)
        self.type("\t")
        self._wait_for("completed")
        self.type("\n")
        return self._wait_for("arguments").split("\0")[:-1]

    def _wait_for(self, name: str) -> str:
        end = time.monotonic() + PATIENCE
        while not (self._folder / name).exists() and time.monotonic() < end:
            self.type("")
        self.type("")
        text = (self._folder / name).read_text()
        (self._folder / name).unlink()
        return text


@contextmanager
def _shell(folder: Path, *command: str) -> Iterator[Terminal]:
    run = folder / "ckpt-tools"
    run.write_text(
        "#!/bin/sh\n"
        'if [ -n "$_CKPT_TOOLS_COMPLETE" ]; then\n'
        f'  {sys.executable} -m ckpt_tools "$@"; touch completed; exit\n'
        "fi\n"
        "printf '%s\\0' \"$@\" > part; mv part arguments\n"
    )
    run.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder)}
    process, keyboard = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, {**environment, "TERM": "xterm"})  # noqa: S606
    try:
        yield Terminal(folder, keyboard)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(keyboard)


INTERACTIVE = {
    "zsh": ("autoload -U compinit; compinit -D -u; source ./script", "-f", "-i"),
    "fish": ("source ./script", "--no-config", "-i"),
}


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(INTERACTIVE))
def test_a_name_that_a_shell_completes_is_one_word_and_nothing_in_it_runs(
    tmp_path: Path, shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    names = [*HOSTILE, "*", "$HOME", "a|touch ran", "(touch ran)", "a b*?"]
    for number, name in enumerate(names):
        _checkpoint(tmp_path / f"{number}.safetensors", name)
    start, *options = INTERACTIVE[shell]
    (tmp_path / "script").write_text(run("completion", shell).stdout)
    with _shell(tmp_path, shell, *options) as terminal:
        terminal.begin(start)
        for number, name in enumerate(names):
            given = terminal.completed(f"ckpt-tools show {number}.safetensors ")
            assert given == ["show", f"{number}.safetensors", name]
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize("shell", list(INTERACTIVE))
def test_a_name_with_a_line_break_is_completed_by_no_shell(tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    _checkpoint(tmp_path / "0.safetensors", "a\ntouch ran")
    start, *options = INTERACTIVE[shell]
    (tmp_path / "script").write_text(run("completion", shell).stdout)
    with _shell(tmp_path, shell, *options) as terminal:
        terminal.begin(start)
        assert terminal.completed("ckpt-tools show 0.safetensors ") == ["show", "0.safetensors"]
    assert not (tmp_path / "ran").exists()


def test_commands_are_offered() -> None:
    assert _offered("ins") == ["inspect"]


def test_names_of_the_checkpoint_are_offered() -> None:
    assert _offered("show", CKPT, "model.head1.") == ["model.head1.bias", "model.head1.weight"]


def test_names_are_offered_for_a_pattern() -> None:
    assert "model.emb.weight" in _offered("ls", CKPT, "-i", "model.emb")
    assert "model.emb.weight" in _offered("export", CKPT, "--exclude", "emb")


def test_objects_are_offered_where_they_can_be_shown_only() -> None:
    assert "step" in _offered("show", CKPT, "ste")
    assert "step" not in _offered("layout", CKPT, "ste")


def test_a_part_of_a_name_finds_it() -> None:
    assert _offered("layout", CKPT, "head3.bias")[0] == "model.head3.bias"


def test_what_is_no_checkpoint_offers_nothing() -> None:
    assert _offered("show", "/nowhere", "model") == []
