"""Whole trainers go on after a conversion: what scripts/interop says of rows that it cannot run."""

import os
import subprocess
import sys
from pathlib import Path

INTEROP = Path(__file__).parent.parent / "scripts" / "interop"


def test_a_row_without_its_framework_is_skipped_and_says_so(tmp_path: Path) -> None:
    """A copy of no framework: the packages of this row are found in no environment of ours."""
    environment = os.environ | {"INTEROP_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, INTEROP, "composer", "--keep", tmp_path],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    row = next(line for line in done.stdout.splitlines() if line.startswith("| composer-1"))
    assert "skipped: no mosaicml" in row
    assert "0 fail" in done.stdout
