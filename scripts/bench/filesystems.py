"""Measures how fast one large file can be written on tmpfs, ext4 and xfs, as root.

    python scripts/bench/filesystems.py --gib 1 --rounds 3

Threads copy a file in memory to one output in blocks of 8 MiB, through the page cache and past it
(O_DIRECT), into a file that is set to its length or preallocated; `cat` and ckpt-tools do the same.
All is synced. ext4 and xfs lie on a loop device, whose image is a file of --folder.
"""

from __future__ import annotations

import argparse
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import data

_BLOCK = 8 << 20


def copy(source: Path, out: Path, *, threads: int, direct: bool, allocate: bool) -> None:
    """Copy with so many threads, each of which takes every so-manieth block."""
    length = source.stat().st_size
    with open(source, "rb") as read, open(out, "wb") as plain:
        if allocate:
            os.posix_fallocate(plain.fileno(), 0, length)
        else:
            plain.truncate(length)
        past = os.open(out, os.O_WRONLY | os.O_DIRECT) if direct else plain.fileno()

        def blocks(first: int) -> None:
            buffer = memoryview(mmap.mmap(-1, _BLOCK))  # aligned, as O_DIRECT wants it
            for at in range(first * _BLOCK, length, threads * _BLOCK):
                nbytes = os.preadv(read.fileno(), [buffer], at)
                os.pwrite(past if nbytes == _BLOCK else plain.fileno(), buffer[:nbytes], at)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(blocks, range(threads)))
        os.fsync(plain.fileno())
        if direct:
            os.close(past)


def run(*words: str | Path) -> None:
    """Run a command, which must end well."""
    subprocess.run([*map(str, words)], check=True, stdout=subprocess.DEVNULL)  # noqa: S603


def _cat(source: Path, out: Path) -> None:
    run("sh", "-c", 'cat "$0" > "$1" && sync "$1"', source, out)


def _ours(source: Path, out: Path, *, threads: int) -> None:
    run(*data.OURS, "export", source, "-o", out, "--threads", str(threads), "-q")


@contextmanager
def mounted(kind: str, folder: Path, nbytes: int) -> Iterator[Path]:
    """A new file system of this kind, unmounted in the end."""
    point = folder / kind
    point.mkdir()
    if kind == "tmpfs":
        run("mount", "-t", kind, "none", point)
    else:
        image = folder / f"{kind}.image"
        with image.open("wb") as file:
            file.truncate(nbytes)
        run(f"mkfs.{kind}", "-q", image)
        run("mount", "-o", "loop", image, point)
    try:
        yield point
    finally:
        run("umount", point)


def ways() -> Iterator[tuple[str, Callable[[Path, Path], None]]]:
    """Every way to write, by its name."""
    yield "cat", _cat
    for direct, allocate, threads in product([False, True], [False, True], [1, 2, 4]):
        cache = "past the page cache" if direct else "page cache"
        kind = "preallocated" if allocate else "sparse"
        name = f"{cache}, {kind}, {threads} threads"
        yield name, partial(copy, threads=threads, direct=direct, allocate=allocate)
    for threads in (1, 2, 4):
        yield f"ckpt-tools export, {threads} threads", partial(_ours, threads=threads)


def main() -> None:
    """Measure all ways in turn on each file system, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="tmpfs,ext4,xfs")
    parser.add_argument("--folder", default="/dev/shm")  # noqa: S108 - a folder in it is made
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = data.compiled(Path(__file__).parents[2])
    nbytes = int(asked.gib * 2**30)
    print("| file system | way | s | of cat |\n|---|---|--:|--:|")
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        source = folder / "model.safetensors"
        data.write_full(source, data.llama(nbytes, 2), "BF16")
        data.dcp_rows(source, folder / "dcp")
        for kind in asked.only.split(","):
            with mounted(kind, folder, 2 * nbytes + (1 << 30)) as point:
                _measure(kind, folder, point / "out.safetensors", rounds=asked.rounds)


def _measure(kind: str, folder: Path, out: Path, *, rounds: int) -> None:
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, way in ways():
            source = folder / ("dcp" if name.startswith("ckpt") else "model.safetensors")
            start = time.perf_counter()
            try:
                way(source, out)
            except OSError as error:
                print(f"{kind}: {name}: {error}", file=sys.stderr)
                continue
            finally:
                out.unlink(missing_ok=True)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
    for name, mine in seconds.items():
        ratio = median(a / b for a, b in zip(mine, seconds["cat"], strict=True))
        print(f"| {kind} | {name} | {median(mine):.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
