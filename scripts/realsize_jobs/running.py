"""Runs ckpt-tools and torchrun jobs as a user does, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from realsize_jobs.reading import Wrong

ROOT = Path(__file__).resolve().parents[2]
OURS = ("-m", "ckpt_tools")
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
}
_PATIENCE = 900  # seconds for one command
_SHOWN = 300


def command(*words: str | Path, ranks: int = 0) -> list[str]:
    """The command line of a module or a script, under torchrun where ``ranks`` are asked for."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *(start if ranks else ()), *map(str, words)]


def start(words: list[str], folder: Path | None = None) -> subprocess.Popen[str]:
    """Start a command in a folder; what it prints is kept."""
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=ENVIRONMENT, cwd=folder, **both)  # noqa: S603 (our own)


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    """What it printed. Raises Wrong when it ends with another exit code, or does not end."""
    try:
        out, said = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        kill(process)
        raise Wrong(f"not done after {_PATIENCE} s") from None
    if process.returncode != code:
        raise Wrong(f"exit {process.returncode} and not {code}: {_error_in(said)}")
    return out


def run(*words: str | Path, ranks: int = 0, code: int = 0) -> str:
    """Run ckpt-tools to its end; what it printed. Raises Wrong for another exit code."""
    return end(start(command(*OURS, *words, ranks=ranks)), code)


def _error_in(said: str) -> str:
    """The first line that says what is wrong: torchrun says much after it."""
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line]
    return (told or lines or ["no word"])[0].strip()[:_SHOWN]


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command and all that it has started, as the loss of a node does; if it still runs."""
    if process.poll() is None:
        for pid in [process.pid, *_below(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def _below(parent: int) -> list[int]:
    """Children and theirs."""
    found = [pid for pid, its in _parents() if its == parent]
    return [pid for child in found for pid in (child, *_below(child))]


def _parents() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            yield int(path.parent.name), int(fields[1])


def killed(process: subprocess.Popen[str], folder: Path, nbytes: int) -> bool:
    """Kill a command when so many bytes lie in ``folder``; False when it was done before."""
    while on_disk(folder) < nbytes:
        if process.poll() is not None:
            end(process)
            return False
        time.sleep(0.005)
    kill(process)
    return True


def on_disk(folder: Path) -> int:
    """The bytes that the files below a folder take."""
    found = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):  # it was renamed
                found += 512 * os.stat(os.path.join(parent, name)).st_blocks
    return found
