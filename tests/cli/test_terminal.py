"""What a person at a terminal of 80 columns sees, and numbers of one."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from terminals import shown_by

DCP = str(Path(__file__).parents[1] / "data" / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt")


def on_terminal(*args: str, columns: int = 80) -> list[str]:
    """The lines that a command shows on a terminal, stdout and stderr together."""
    shown = shown_by("-m", "ckpt_tools", *args, columns=columns, NO_COLOR="1")
    return shown.replace("\r\n", "\n").splitlines()


@pytest.mark.parametrize(
    "args",
    [
        ("layout", DCP, "--output", "x.html"),
        ("convert", DCP),
        ("export", DCP, "-o", "model.gguf"),
        ("reshard", DCP, "-o", "out", "--to-mesh", "2x2x2"),
        ("inspect", DCP),
    ],
    ids=lambda args: args[0],
)
def test_words_wrap_where_the_terminal_ends(args: tuple[str, ...]) -> None:
    long = [line for line in on_terminal(*args, columns=60) if len(line) > 60]
    assert [line for line in long if line.strip() not in (DCP, f"{DCP}:")] == []


@pytest.mark.parametrize("args", [("export",), ("reshard", "--to-mesh", "2")], ids=lambda a: a[0])
def test_the_summary_of_what_was_written_wraps(args: tuple[str, ...], tmp_path: Path) -> None:
    command, *more = args
    out, width = str(tmp_path / "out"), len(str(tmp_path)) + 9
    lines = on_terminal(command, DCP, "-o", out, *more, "-q", columns=width)  # without the bar
    assert max(map(len, lines)) <= width


def test_a_command_to_copy_is_not_broken() -> None:
    shown = on_terminal("convert", DCP, columns=50)
    assert any("`ckpt-tools reshard CKPT -o OUT --to-mesh 8`" in line for line in shown)
    shown = on_terminal("reshard", DCP, "-o", "out", columns=40)
    assert "  For example: ckpt-tools reshard run7/step-1000 -o run7-4x8 --to-mesh 4x8" in shown


def test_a_pipe_has_whole_lines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", "convert", DCP],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert len(done.stderr.splitlines()) == 3


def test_a_reshard_to_many_ranks_is_forecast_in_few_lines(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert len(on_terminal("reshard", DCP, "-o", out, "--to-mesh", "512", "--dry-run")) < 20


_MANY = re.compile(
    r"(?<!of )(?<![\d,.])\b1 (tensor|object|file|rank|element|byte|chunk|value|entrie|difference"
    r"|CRC-32|thread|worker|container|shard|replica)s\b|\b(all|the) 1 \w+ are\b|\b1 are\b"
)


@pytest.mark.slow
def test_one_is_written_in_the_singular(tmp_path: Path) -> None:
    one, other, out = (str(tmp_path / name) for name in ("one.safetensors", "two.safetensors", "o"))
    save_file({"w": np.ones(1, np.float32)}, one)
    save_file({"w": np.zeros(1, np.float32)}, other)
    commands = [
        ["inspect", one, "--shards"], ["ls", "-l", one], ["ls", "--tree", one], ["show", one, "w"],
        ["layout", one], ["verify", one], ["verify", one, "--against", other], ["stats", one],
        ["diff", one, other], ["fingerprint", "-l", one], ["export", one, "-o", out, "--check"],
        ["reshard", one, "-o", out + "2", "--to-mesh", "1", "--check"],
        ["reshard", one, "-o", out + "3", "--to-mesh", "1", "--dry-run"], ["verify", out + "2"],
    ]  # fmt: skip
    for words in commands:
        done = subprocess.run(
            [sys.executable, "-m", "ckpt_tools", *words],
            capture_output=True,
            text=True,
            check=False,
        )
        assert not (found := _MANY.search(done.stdout + done.stderr)), f"{words}: {found}"
