"""Do the three engines hold on GPUs? Run by hand on a machine with two of them, over NCCL.

    python scripts/gpu_check.py [FOLDER]                        # two GPUs, about three minutes
    TRAINING_DEVICE=cpu python scripts/gpu_check.py [FOLDER]    # the same over gloo

FSDP2 and FSDP1 jobs train matrices of 64 MiB on CUDA and save; every engine reshards what they
saved; jobs of both kinds load the results and take a step. What FSDP2 and FSDP1 saved is checked at
the same time, each by jobs of two ranks. Prints a table, and exits with 1 when anything differs.
The training jobs are the tests' own; nothing here needs more than the repository, what it imports,
and 12 GB of disk.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
TRAINING = HOME / "tests" / "jobs" / "training.py"
NEEDED = ("torch", "numpy", "ml_dtypes", "click", "tabulate", "tqdm", "safetensors")
DEVICE = os.environ.get("TRAINING_DEVICE", "cuda")
RANKS = 2
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TRAINING_DEVICE": DEVICE,
    "TRAINING_SIZE": "large",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what bit-equal steps on CUDA need
    "PYTHONPATH": f"{HOME}:{os.environ.get('PYTHONPATH', '')}",
}

# What saves, and as which of the training job's kinds.
SOURCES = {"fsdp2": "1d", "fsdp1": "fsdp1"}
# Of each source: engine, what is read, the target mesh, and whether torchrun runs it.
RESHARDS = (
    ("copy", "dcp", "2x1", False),
    ("copy", "dcp", "4x8", True),
    ("dcp", "dcp", "2x1", True),
    ("dcp", "dcp", "1x2", True),
    ("copy", "ranks", "4x8", False),
    ("gather", "ranks", "4x8", True),
    ("gather", "ranks", "1x2", True),
)
Row = tuple[str, ...]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command with this Python, and say what it said when it fails."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        print(f"$ {' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return done


def torchrun(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a job of two ranks."""
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    return run(*start, *arguments)


def reshard(folder: Path, engine: str, read: str, mesh: str, *, under_torchrun: bool) -> Row:
    """One reshard, compared with what it was made from; the cells of its row."""
    out = folder / f"{engine}-{read}-{mesh}{'-torchrun' if under_torchrun else ''}"
    arguments = ("reshard", folder / read, "-o", out, "--to-mesh", mesh, "--engine", engine)
    arguments = (*arguments, "--check")
    started = time.monotonic()
    start = torchrun if under_torchrun else run
    done = start("-m", "ckpt_tools", *arguments)
    seconds = f"{time.monotonic() - started:.1f}"
    same = "failed"
    if done.returncode == 0:
        differs = run("-m", "ckpt_tools", "diff", folder / read, out).returncode
        same = "NO" if differs else "yes"
    who = f"{RANKS} ranks" if under_torchrun else "1 process"
    return (folder.name, read, engine, mesh, who, seconds, same)


def next_steps(folder: Path, kind: str) -> dict[str, bool]:
    """By the name of each DCP result: is the next step that of a job that loads the original?"""
    results = sorted(path for path in folder.glob("*-dcp-*") if path.is_dir())
    tasks = [f"{kind}:{path}" for path in (folder / "dcp", *results)]
    found = folder / f"{kind}.json"
    if torchrun(TRAINING, "step", found, *tasks).returncode:
        return {path.name: False for path in results}
    steps = json.loads(found.read_text())
    return {path.name: steps[f"{kind}:{path}"] == steps[tasks[0]] for path in results}


def check(folder: Path, kind: str) -> list[Row]:
    """Every reshard of what one kind of job saved."""
    folder.mkdir(parents=True)
    if torchrun(TRAINING, "save", folder, kind).returncode:
        return [(folder.name, "-", "-", "-", "-", "-", "the job failed", "-")]
    rows = [reshard(folder, *what[:3], under_torchrun=what[3]) for what in RESHARDS]
    steps = [next_steps(folder, loading) for loading in ("1d", "fsdp1")]
    finished = []
    for row, (engine, read, mesh, under_torchrun) in zip(rows, RESHARDS, strict=True):
        name = f"{engine}-{read}-{mesh}{'-torchrun' if under_torchrun else ''}"
        words = ["yes" if found[name] else "NO" for found in steps] if read == "dcp" else ["-"]
        finished.append((*row, "/".join(words)))
    return finished


def missing() -> list[str]:
    """What this machine lacks, in words."""
    lacking = [f"the package {name}" for name in NEEDED if find_spec(name) is None]
    if "the package torch" not in lacking and DEVICE == "cuda":
        import torch

        print(f"torch {torch.__version__}, {torch.cuda.device_count()} GPUs")
        if torch.cuda.device_count() < RANKS:
            lacking.append(f"{RANKS} GPUs")
    return lacking


def main(*arguments: str) -> int:
    """Check, print the table; 1 when anything differs or fails, 2 when it cannot be run here."""
    lacking = missing()
    if lacking:
        print(f"Not run: this machine lacks {', '.join(lacking)}.")
        return 2
    top = Path(arguments[0]) if arguments else Path(tempfile.mkdtemp(prefix="gpu-check-"))
    rows: list[Row] = [
        (
            "source",
            "read",
            "engine",
            "mesh",
            "by",
            "seconds",
            "same tensors",
            "same step FSDP2/FSDP1",
        )
    ]
    folders = [top / name for name in SOURCES]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    with ThreadPoolExecutor() as pool:
        rows += chain.from_iterable(pool.map(check, folders, SOURCES.values()))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    bad = [row for row in rows[1:] if not set(row[6:]) <= {"yes", "yes/yes", "-"}]
    print(f"{len(rows) - 1 - len(bad)} of {len(rows) - 1} hold.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
