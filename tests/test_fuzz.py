"""A minute's worth of scripts/fuzz, of the same seeds each time: people run it for an hour."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_FUZZ = Path(__file__).parents[1] / "scripts" / "fuzz.py"


@pytest.mark.slow
def test_random_state_dicts_are_what_torch_makes_of_them() -> None:
    done = subprocess.run(
        [sys.executable, str(_FUZZ), "--first", "1", "--cases", "100", "--minutes", "10"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = dict(line.split(":", 1) for line in done.stdout.splitlines()[1:])
    assert list(told) == ["conversion", "chain", "optimizer", "damage", "pickle"]
    assert all(" 0 done" not in counts for counts in told.values())


@pytest.mark.slow
def test_a_seed_is_the_same_case_each_time() -> None:
    said = [
        subprocess.run(
            [sys.executable, str(_FUZZ), "--seed", "3"], check=False, capture_output=True, text=True
        )
        for _ in range(2)
    ]
    lines = [[line for line in one.stdout.splitlines() if "$" not in line[:1]] for one in said]
    assert said[0].returncode == 0, said[0].stdout
    assert lines[0][-1] == lines[1][-1]
