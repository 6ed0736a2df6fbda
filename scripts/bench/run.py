#!/usr/bin/env python
"""Measures ckpt-tools against what others do, in rounds that take turns, and prints a table.

    scripts/bench/run                        512 MiB, every case, three rounds
    scripts/bench/run --gib 4 --full-counts  4 GiB, 1,024,000 chunks, 100,000 tiny tensors
    scripts/bench/run --only export,metadata --rounds 5
    scripts/bench/run --no-peers --before ../other-checkout     another commit of ours beside it

Data lies in a temporary folder of /dev/shm (--folder), of which three to four times the size is
needed at once; the output of the case `durable` goes to --disk. Nothing is left behind.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import data
import table
from cases import CASES, Case, Lab
from measure import Cost, FailedError, measure, touch

_ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run the cases that were asked for, one after the other, and print each when it is done."""
    asked = _arguments()
    paths = [data.compiled(_ROOT), os.getenv("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folders are removed
    print(_machine(asked), end="\n\n", flush=True)
    print(table.HEADER, flush=True)
    notes: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir=asked.folder) as folder,
        tempfile.TemporaryDirectory(prefix="bench-", dir=asked.disk) as disk,
    ):
        chunks = asked.tensors, asked.ranks
        lab = Lab(Path(folder), Path(disk), int(asked.gib * 2**30), chunks, asked.tiny)
        for name in _chosen(asked.only):
            notes += _measure(name, lab, asked)
    print("", *notes, sep="\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - a folder in it is made
    parser.add_argument("--gib", type=float, default=0.5, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases or their beginnings, with commas between")
    parser.add_argument("--folder", default=shm, help="where to make a temporary folder")
    parser.add_argument("--disk", default="/var/tmp", help="the same on a disk")  # noqa: S108 - a folder in it is made
    parser.add_argument("--tensors", type=int, default=100, help="tensors in the large metadata")
    parser.add_argument("--ranks", type=int, default=1024, help="chunks of each of them")
    parser.add_argument("--tiny", type=int, default=10_000, help="number of tiny tensors")
    parser.add_argument("--full-counts", action="store_true", help="1,000 × 1,024 and 100,000")
    parser.add_argument(
        "--touch",
        type=float,
        default=0.0,
        help="GiB of memory to touch before each command, where\n"
        "a virtual machine gives its free memory back to a host",
    )
    parser.add_argument("--no-peers", action="store_true", help="only ours and system commands")
    parser.add_argument("--before", type=Path, help="a checkout of another commit to run as well")
    asked = parser.parse_args()
    if asked.full_counts:
        asked.tensors, asked.ranks, asked.tiny = 1000, 1024, 100_000
    return asked


def _chosen(only: str) -> list[str]:
    wanted = tuple(only.split(",")) if only else ("",)
    chosen = [name for name in CASES if name.startswith(wanted)]
    if not chosen:
        raise SystemExit(f"No case of {', '.join(CASES)} begins with {only}.")
    return chosen


def _machine(asked: argparse.Namespace) -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), {memory:.0f} GiB of memory, "
        f"Python {platform.python_version()}; model of {asked.gib:g} GiB, {asked.rounds} rounds, "
        f"load {os.getloadavg()[0]:.1f} at the start."
    )


def _measure(name: str, lab: Lab, asked: argparse.Namespace) -> list[str]:
    """Measure one case and print its rows; gives what is to be said below the table."""
    case = CASES[name](lab)
    notes: list[str] = []
    if asked.before:
        case = case.with_before(asked.before.resolve())
    costs: dict[str, list[Cost]] = {}
    left_out = [one for one in case.contestants if one.is_peer and asked.no_peers]
    if importlib.util.find_spec("accelerate") is None:
        left_out += [one for one in case.contestants if "accelerate" in one.name]
        notes += [f"{name}: {one.name} is not installed, and left out." for one in left_out]
    case = case._replace(contestants=[one for one in case.contestants if one not in left_out])
    for number in range(asked.rounds):
        notes += [
            f"{name}: {note}"
            for note in _round(case, lab, costs, first=number, touched=int(asked.touch * 2**30))
        ]
    ours = case.contestants[0].name
    for row in table.rows(name, costs, ours=ours, base=case.base):
        print(row, flush=True)
    data.remove(lab.source, lab.folder / "model-F32.safetensors")
    return notes


def _round(
    case: Case, lab: Lab, costs: dict[str, list[Cost]], *, first: int, touched: int
) -> list[str]:
    """Every command once, in turn, each round beginning with another; gives failures in words."""
    notes = []
    turn = [one for one in case.contestants if first == 0 or one.name in costs]
    for one in [*turn[first % len(turn) :], *turn[: first % len(turn)]]:
        data.remove(*lab.folder.glob("out*"), *lab.disk.iterdir())
        if touched:
            touch(touched)
        try:
            costs.setdefault(one.name, []).append(measure(one.args, stdout=one.stdout))
        except FailedError as error:
            costs.pop(one.name)
            notes.append(f"{one.name} failed: {error}")
        finally:
            data.remove(*lab.folder.glob("out*"), *lab.disk.iterdir())
    return notes


if __name__ == "__main__":
    main()
