#!/usr/bin/env python
"""Shows that --max-memory holds, whatever is read and written: the peak of every pair of formats.

    python scripts/bench/memory.py --mib 512 --limit 16MB

One model in float32 is saved in each format that is read, and converted to each that is written;
verify and fingerprint, which have no such option, read it, too. The numbers are MiB of resident
memory at the peak, above those of the same command on the same tensors of a few elements.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import data
from measure import FailedError, measure
from tabulate import tabulate

SOURCES: dict[str, Callable[[Path, Path], object]] = {
    "safetensors": lambda full, out: shutil.copy(full, out.with_suffix(".safetensors")),
    "torch.save": lambda full, out: data.torch_file(full, out.with_suffix(".pt")),
    "DCP, rows": data.dcp_rows,
    "DCP, rows and columns": data.dcp_grid,
    "rank files": data.rank_files,
}
TARGETS = {
    "files": ("export", "-o", "OUT", "--max-shard-size", "100MB"),
    "one file": ("export", "-o", "OUT.safetensors"),
    "bf16": ("export", "-o", "OUT.safetensors", "--dtype", "bf16"),
    "torch.save": ("export", "-o", "OUT.pt"),
    "DCP 4x8": ("reshard", "-o", "OUT", "--to-mesh", "4x8"),
    "rank files of 3": ("reshard", "-o", "OUT", "--to-mesh", "3", "--format", "ranks"),
}


def main() -> None:
    """Make the checkpoints, run every pair, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - a folder in it is made
    parser.add_argument("--mib", type=int, default=512, help="size of the model")
    parser.add_argument("--limit", default="16MB", help="what --max-memory says")
    parser.add_argument("--folder", default=shm, help="where to make a temporary folder")
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = data.compiled(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(prefix="memory-", dir=asked.folder) as name:
        large = data.llama(asked.mib << 20, 4)
        small = {fqn: (data.RANKS,) * len(shape) for fqn, shape in large.items()}
        rows = [[kind, *_peaks(kind, Path(name), (large, small), asked.limit)] for kind in SOURCES]
    header = ["source", *TARGETS, "verify", "fingerprint"]
    print(tabulate(rows, header, "github", floatfmt=".0f"))


def _peaks(kind: str, folder: Path, models: tuple[data.Shapes, ...], limit: str) -> list[str]:
    """The peaks of all commands for one source, in MiB above those for the small model."""
    commands = [[*words, "--max-memory", limit, "-q"] for words in TARGETS.values()]
    commands += [["verify"], ["fingerprint"]]
    peaks: list[list[int]] = []
    for shapes in models:
        full = folder / "full.safetensors"
        data.write_full(full, shapes, "F32")
        SOURCES[kind](full, folder / "source")
        full.unlink()
        (source,) = folder.glob("source*")
        peaks.append([_peak(words, source, folder / "out") for words in commands])
        data.remove(source)
    return [f"{(high - low) / 2**20:.0f}" for high, low in zip(*peaks, strict=True)]


def _peak(words: list[str], source: Path, out: Path) -> int:
    """The peak in bytes of one command, whose output is thrown away."""
    command, *rest = (word.replace("OUT", str(out)) for word in words)
    try:
        return measure([*data.OURS, command, str(source), *rest]).peak
    except FailedError as error:
        raise SystemExit(f"{command} {source} {' '.join(rest)}: {error}") from error
    finally:
        data.remove(*out.parent.glob("out*"))


if __name__ == "__main__":
    main()
