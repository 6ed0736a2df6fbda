"""`-j N`: how workers start and end. What they write is compared in `test_torchrun`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from launching import BIN, ENVIRONMENT, PATIENCE, contents
from safetensors.numpy import save_file

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = DATA / "fsdp2_dcp_1d_4r" / "ckpt"
COMMAND = ["reshard", str(DCP), "-o", "out", "--to-mesh", "2x2", "-j", "2"]
SCRIPT = f"""
from ckpt_tools.cli import cli
print("begun", flush=True)
cli({COMMAND}, standalone_mode=False)
"""


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that write for this one, as far as the system lists them."""
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return list(map(int, listed.split()))


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A command that writes to "out", and its two workers, stopped in the midst of it.

    Each has seconds of work, all of it zeros, which take no room on the disk.
    """
    header = b'{"w":{"dtype":"F32","shape":[2000,500000],"data_offsets":[0,4000000000]}}'
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 4_000_000_000)
    words = ["reshard", "big.safetensors", "-o", "out", "--to-mesh", "4", "--dtype", "bf16"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", *words, "-j", "2", "--threads", "1"],
        env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    unfinished = tmp_path / "out.partial" / "unfinished"
    until(lambda: len(workers_of(process)) == 2)
    workers = workers_of(process)
    for worker, rank in zip(workers, (0, 2), strict=True):  # each has two of the four files
        until((unfinished / f"__{rank}_0.distcp").exists)
        os.kill(worker, signal.SIGSTOP)
    assert not os.listdir(tmp_path / "out.partial" / "new"), "stopped too late"
    yield process, workers
    process.kill()
    process.communicate()


def test_a_worker_killed_for_memory_is_one_error_and_exit_code_4(
    tmp_path: Path, writing: tuple[subprocess.Popen[str], list[int]]
) -> None:
    process, workers = writing
    os.kill(workers[1], signal.SIGKILL)
    os.kill(workers[0], signal.SIGCONT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 4
    errors = [line for line in said.splitlines() if line.startswith("Error")]
    assert errors == ["Error: Worker 2 of 2 died (SIGKILL) before its share was written."]
    assert "Out of memory? Use fewer workers (-j)." in said
    assert not any(map(is_alive, workers))
    assert not (tmp_path / "out").exists()


def test_a_worker_names_what_it_has_finished_when_another_one_fails(tmp_path: Path) -> None:
    tensors = {f"{n:04}": np.zeros(1000, np.float32) for n in range(4000)}
    save_file(tensors, tmp_path / "a.safetensors")
    words = ["export", "a.safetensors", "-o", "out", "--max-shard-size", "4KB", "-j", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ckpt_tools", *words, "--threads", "1"],
        env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    partial = tmp_path / "out.partial"
    mine = [f"model-{n:05}-of-04000.safetensors" for n in range(1, 2001)]
    until(lambda: len(workers_of(process)) == 2)
    other = workers_of(process)[1]
    until(lambda: b"distributed.worker" in Path(f"/proc/{other}/cmdline").read_bytes())
    os.kill(other, signal.SIGSTOP)  # before it begins: however busy the machine, it ends nothing
    until((partial / "new" / mine[30]).exists)
    os.kill(other, signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE)
    assert "with --resume continues" in said
    named = {path.name for path in (partial / "new").iterdir()}
    assert f"{len(named)} of 4,001 files" in said
    assert len({*os.listdir(partial / "unfinished")} & {*mine}) <= 1


def test_workers_end_when_their_parent_is_killed_and_write_nothing_more(
    tmp_path: Path, writing: tuple[subprocess.Popen[str], list[int]]
) -> None:
    process, workers = writing
    process.kill()
    process.wait()
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    until(lambda: not any(map(is_alive, workers)))
    assert not os.listdir(tmp_path / "out.partial" / "new")


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_to_the_command_ends_its_workers(
    tmp_path: Path,
    writing: tuple[subprocess.Popen[str], list[int]],
    sent: signal.Signals,
    code: int,
) -> None:
    process, workers = writing
    process.send_signal(sent)
    for worker in workers:
        os.kill(worker, signal.SIGCONT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == code
    assert "Traceback" not in said
    assert not any(map(is_alive, workers))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", ["script", "typed", "ckpt-tools", "module"])
def test_workers_start_from_anywhere_and_run_no_script_again(tmp_path: Path, way: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)  # without `if __name__ == "__main__"`
    command = {
        "script": [sys.executable, str(script)],
        "typed": [sys.executable, "-i"],
        "ckpt-tools": [str(BIN / "ckpt-tools"), *COMMAND],
        "module": [sys.executable, "-m", "ckpt_tools", *COMMAND],
    }[way]
    done = subprocess.run(
        command, input=SCRIPT, env=ENVIRONMENT, cwd=tmp_path,
        capture_output=True, text=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    assert done.stdout.count("begun") == (way in ("script", "typed"))
    assert len(contents(tmp_path / "out")) == 5
