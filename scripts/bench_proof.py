"""How verify and fingerprint compare with cat and sha256sum over the same files.

    python scripts/bench_proof.py FOLDER [GIB]

FOLDER must not be there yet, and have room for GIB (2 by default); /dev/shm/bench takes the disk
out of it. One checkpoint is a torch.save file, with CRCs, the other a tensor that eight ranks saved
by columns, as safetensors. Medians of three runs, and the most memory that a run took.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

RUNS = 3
RANKS = 8
COLUMNS = 8192
PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL);"
    "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)"
)


def save_full(folder: Path, nbytes: int) -> None:
    """Eight tensors in one torch.save file."""
    rows = nbytes // 8 // 4 // 1024
    torch.save({f"w{i}": torch.randn(rows, 1024) for i in range(8)}, folder / "model.pt")


def save_columns(folder: Path, nbytes: int) -> None:
    """One tensor, a block of columns in each rank's file, as torch's HuggingFaceStorageWriter."""
    rows, columns = nbytes // 4 // COLUMNS, COLUMNS // RANKS
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    for rank in range(RANKS):
        info = {"w": {"saved_offsets": [0, rank * columns]}}
        header = {
            "__metadata__": {"DCP_SHARDING_INFO": json.dumps(info)},
            "w": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, values.nbytes]},
        }
        text = json.dumps(header).encode()
        path = folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            (values + np.float32(rank)).tofile(file)


def seconds(command: list[str]) -> float:
    """The median time of a command."""
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Measure both checkpoints and print a table."""
    folder = Path(sys.argv[1])
    nbytes = int(float(sys.argv[2] if len(sys.argv) > 2 else 2) * 2**30)
    folder.mkdir(parents=True)
    print(
        "| checkpoint | command | seconds | against | ratio | peak MiB |\n|---|---|--:|---|--:|--:|"
    )
    try:
        for name, save in (("torch.save", save_full), ("columns of 8 ranks", save_columns)):
            place = folder / save.__name__
            place.mkdir()
            save(place, nbytes)
            files = sorted(map(str, place.iterdir()))
            for command, peer in (("verify", "cat"), ("fingerprint", "sha256sum")):
                ours = [sys.executable, "-m", "ckpt_tools", command, str(place), "--quiet"]
                took, theirs = seconds(ours), seconds([peer, *files])
                measured = [sys.executable, "-c", PEAK, *ours]
                peak = subprocess.check_output(measured, text=True)  # noqa: S603 - our own
                ratio = f"{took / theirs:.2f}"
                print(f"| {name} | {command} | {took:.2f} | {peer} | {ratio} | {peak.strip()} |")
            shutil.rmtree(place)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
