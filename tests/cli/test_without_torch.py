"""Looking, proving and copying on a machine that has no torch, as a login node."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt")
RANKS = str(REAL / "fsdp2_torchsave_1d_4r" / "ckpt")

# Runs each command in one process to which torch is neither a module nor an installed package.
_RUN = """
import importlib.metadata, json, sys
sys.modules["torch"] = None
asked = importlib.metadata.Distribution.from_name.__func__
def from_name(cls, name):
    if name == "torch":
        raise importlib.metadata.PackageNotFoundError(name)
    return asked(cls, name)
importlib.metadata.Distribution.from_name = classmethod(from_name)
from ckpt_tools.cli import main
for command in json.load(sys.stdin):
    sys.argv = ["ckpt-tools", *command]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, (command, stop.code)
"""


def _run(folder: Path, *commands: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=json.dumps(commands),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("source", [DCP, RANKS], ids=["dcp", "ranks"])
def test_looking_needs_no_torch(source: str, tmp_path: Path) -> None:
    looks = [("inspect",), ("ls", "-l"), ("layout", "--to-mesh", "2x2"), ("verify",)]
    looks += [("fingerprint",), ("stats",), ("diff", source)]
    _run(tmp_path, *((name, source, *more) for name, *more in looks))


@pytest.mark.parametrize("source", [DCP, RANKS], ids=["dcp", "ranks"])
def test_writing_and_its_proof_need_no_torch(source: str, tmp_path: Path) -> None:
    done = _run(
        tmp_path,
        ("export", source, "-o", "hf", "--dtype", "bf16", "--check"),
        ("export", source, "-o", "all.pt", "--format", "torch", "--check"),
        ("reshard", source, "-o", "dcp", "--to-mesh", "2", "--check"),
        ("reshard", source, "-o", "ranks", "--to-mesh", "2x2", "--format", "ranks", "--check"),
        ("reshard", "hf", "-o", "hf-dcp", "--to-mesh", "2", "--check"),
        ("verify", "ranks", "--against", source),
        ("diff", source, "dcp"),
    )
    written_for = {
        DCP: "torch 2.15, the newest known (no torch is installed here)",
        RANKS: "torch 2.13 or 2.14, which wrote the source",
    }
    assert done.stderr.count(f"The rank files are for {written_for[source]}") == 1
