"""Whole commands that are killed at random moments, and what they may take of memory.

``CKPT_TOOLS_KILLS`` says how often each command is killed; `scripts/kill_test` sets it.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from launching import ENVIRONMENT, ckpt_tools, contents
from safetensors.numpy import save_file

from ckpt_tools.copying.resume import refuse_foreign

KILLS = int(os.environ.get("CKPT_TOOLS_KILLS", "3"))
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node"]
# What a run says that goes on with a killed one; the last when that was killed after its work.
STATES = (
    "started from the beginning",
    "Resuming",
    "had already written everything",
    "already exists",
)
HERE = [sys.executable, "-m", "ckpt_tools"]
MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DCP directory of four ranks, 96 MiB, with a few large tensors and many small ones."""
    folder = tmp_path_factory.mktemp("source")
    values = np.random.default_rng(0)
    shapes = [(1024, 3 * 1024)] * 7 + [(512, 1024)] * 5 + [(33,)] * 200
    tensors = {
        f"model.{n}.weight": values.standard_normal(shape, np.float32)
        for n, shape in enumerate(shapes)
    }
    save_file(tensors, folder / "whole.safetensors")
    ckpt_tools("reshard", folder / "whole.safetensors", "-o", folder / "dcp", "--to-mesh", "4")
    (folder / "whole.safetensors").unlink()
    return folder / "dcp"


EXPORT = ["export", "--max-shard-size", "20MB", "--threads", "1"]
RESHARD = ["reshard", "--to-mesh", "8", "--threads", "1"]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        pytest.param(HERE, EXPORT, id="export", marks=pytest.mark.slow),
        pytest.param(HERE, RESHARD, id="reshard"),
        pytest.param(HERE, [*EXPORT, "-j", "2"], id="export-workers", marks=pytest.mark.slow),
        pytest.param(HERE, [*RESHARD, "-j", "2"], id="reshard-workers", marks=pytest.mark.slow),
    ],
)
def test_a_killed_command_is_gone_on_with(
    tmp_path: Path, source: Path, start: list[str], words: list[str]
) -> None:
    kill_and_resume(tmp_path, [*start, *words, str(source)], kills=KILLS)


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("words", [EXPORT, RESHARD], ids=["export", "reshard"])
def test_a_killed_job_is_gone_on_with(tmp_path: Path, source: Path, words: list[str]) -> None:
    command = [*TORCHRUN, "2", "-m", "ckpt_tools", *words, str(source)]
    kill_and_resume(tmp_path, command, kills=max(1, KILLS // 5))


def kill_and_resume(folder: Path, command: list[str], *, kills: int) -> None:
    """Kill it at random moments of its writing, go on with it, and compare with a quiet run."""
    quiet = [folder / f"quiet{number}" for number in range(3 if kills > 5 else 1)]
    span = median(undisturbed([*command, "-o", str(out)], out) for out in quiet)
    want = contents(quiet[0])
    moments = random.Random(command[-1])  # noqa: S311 - moments, no secrets
    states: Counter[str] = Counter()
    for number in range(kills):
        out = folder / f"out{number}"
        killed([*command, "-o", str(out)], out, after=moments.uniform(0, span))
        ended = subprocess.run(
            [*command, "-o", str(out), "--resume"],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        state = next((words for words in STATES if words in ended.stderr), "?")
        assert ended.returncode == 0 or state == STATES[-1], ended.stderr
        assert contents(out) == want
        assert not [path for path in folder.iterdir() if path.name.startswith(f"{out.name}.")]
        shutil.rmtree(out)
        states[state] += 1
    sys.stdout.write(f"\n{kills} of {kills}: the same bytes; {dict(states)}\n")


def undisturbed(command: list[str], out: Path) -> float:
    """Seconds from when it begins to write until its output is there."""
    process = subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for(out, process)
    started = time.monotonic()
    while Path(f"{out}.partial").exists():
        time.sleep(0.002)
    span = time.monotonic() - started
    assert process.wait() == 0
    return span


def killed(command: list[str], out: Path, *, after: float) -> None:
    """Kill a command, and the ranks of a job, so long after it began to write."""
    process = subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(out, process)
    time.sleep(after)
    # The workers of `-j` are left to find out by themselves; torchrun's ranks would never.
    if command[0] == TORCHRUN[0]:
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def wait_for(out: Path, process: subprocess.Popen[bytes]) -> None:
    """Wait until it writes, or is at its end."""
    while not Path(f"{out}.partial", "unfinished").exists() and process.poll() is None:
        time.sleep(0.001)


def peak(words: list[str]) -> int:
    """Peak memory in bytes of a command line that ends well."""
    code = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *HERE, *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return int(done.stdout) * 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one tensor of 256 MiB, and next to it one of 64 KiB."""
    folder = tmp_path_factory.mktemp("large")
    for name, rows in (("large", 8192), ("small", 2)):
        tensors = {"weight": np.ones((rows, 8192), np.float32)}
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["export"], id="export"),
        pytest.param(["export", "--dtype", "bf16"], id="cast"),
        pytest.param(["reshard", "--to-mesh", "4"], id="rows"),
        pytest.param(["reshard", "--to-mesh", "4", "--placements", "S(1)"], id="columns"),
        pytest.param(["reshard", "--to-mesh", "4", "--dtype", "bf16"], id="reshard and cast"),
    ],
)
def test_memory_stays_under_the_limit_whatever_the_tensor(
    tmp_path: Path, large: Path, words: list[str]
) -> None:
    limit = ["--max-memory", "16MiB"]
    base = peak([*words, str(large / "small.safetensors"), "-o", str(tmp_path / "base"), *limit])
    most = peak([*words, str(large / "large.safetensors"), "-o", str(tmp_path / "out"), *limit])
    assert most <= base + 16 * MIB, f"{base / MIB:.1f} and {most / MIB:.1f} MiB"


def test_a_job_script_may_always_say_resume(tmp_path: Path) -> None:
    small = tmp_path / "small.safetensors"
    save_file({"weight": np.ones((2, 8192), np.float32)}, small)
    done = ckpt_tools("export", small, "-o", tmp_path / "out", "--resume")
    assert "Nothing to resume: started from the beginning." in done.stderr


def test_a_run_that_ends_just_now_is_not_taken_for_a_foreign_folder(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    ended = threading.Event()

    def come_and_go() -> None:
        while not ended.is_set():
            partial.mkdir()
            (partial / ".manifest").touch()
            (partial / ".manifest").unlink()
            partial.rmdir()

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(come_and_go)
        try:
            for _ in range(5000):
                refuse_foreign(str(partial))
        finally:
            ended.set()
        writer.result()
