"""Training goes on after a conversion as if nothing had happened: scripts/parity, cut short."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PARITY = Path(__file__).parent.parent / "scripts" / "parity"


@pytest.mark.torchrun
@pytest.mark.slow
@pytest.mark.skipif(
    torch.__version__.startswith("2.6."), reason="FSDP2 of torch 2.6 trains on no CPU"
)
def test_fsdp1_and_fsdp2_go_on_from_each_other(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PARITY), "--short", "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| FSDP")]
    assert len(rows) == 2
    assert all("bit-equal" in row for row in rows)
