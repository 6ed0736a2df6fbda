"""Files by ranges: how many of them are open at a time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dtensor_files import ROWS, save_ranks


@pytest.mark.slow
@pytest.mark.parametrize("command", [["verify"], ["export", "-o", "out", "--check"]])
def test_no_more_files_are_open_than_the_system_allows(command: list[str], tmp_path: Path) -> None:
    save_ranks(tmp_path / "ranks", {"w": (torch.arange(300.0).view(150, 2), ROWS)}, (150,))
    words = [sys.executable, "-m", "ckpt_tools", command[0], "ranks", *command[1:]]
    limited = ["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *words]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
