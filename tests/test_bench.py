"""Runs the benchmark with next to nothing in it, so that it still works when someone wants it."""

import subprocess
import sys
from pathlib import Path

import pytest

_RUN = Path(__file__).parents[1] / "scripts" / "bench" / "run.py"


@pytest.mark.slow
def test_the_benchmark_measures_ours_and_its_base(tmp_path: Path) -> None:
    sizes = ["--gib", "0.001", "--tiny", "8", "--rounds", "1", "--no-peers"]
    places = ["--folder", str(tmp_path), "--disk", str(tmp_path)]
    only = ["--only", "export-rows,export-hf,start"]

    said = subprocess.run(
        [sys.executable, str(_RUN), *sizes, *places, *only],
        check=False,
        capture_output=True,
        text=True,
    )

    assert said.returncode == 0, said.stderr
    rows = [line.split(" | ") for line in said.stdout.splitlines() if line.startswith("| ")]
    assert [(row[0], row[1]) for row in rows[1:]] == [
        ("| export-rows", "ckpt-tools export"),
        ("| export-rows", "cat (base)"),
        ("| export-hf-shards", "ckpt-tools export"),
        ("| export-hf-shards", "cat (base)"),
        ("| start", "ckpt-tools inspect"),
        ("| start", "import click, tabulate (base)"),
    ]
    assert "failed" not in said.stdout
    assert not list(tmp_path.iterdir())
