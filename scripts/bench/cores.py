#!/usr/bin/env python
"""Measures what the default commands make of a machine with many cores, against system commands.

    python scripts/bench/cores.py                    2 GiB, three rounds
    python scripts/bench/cores.py --gib 16           as large as Llama 7B
    python scripts/bench/cores.py --only export,cp   some of the commands
    python scripts/bench/cores.py -- --threads 8     with options for every command of ours

The model has 291 bfloat16 tensors, stored by eight ranks as a DCP directory in /dev/shm (--folder).
Three times its size is needed there. A ratio is taken inside one round and shown as the median
over the rounds, with the range; the last column says whether the target is met. "Serial" are the
same commands on as many tensors of a few elements: what of their time no core shortens.
"""

from __future__ import annotations

import argparse
import compileall
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import data

_ROOT = Path(__file__).parents[2]
_LAYERS, _VOCAB = 32, 32_000
_MANY = 16  # cores, from which on a result is read back in the time of the rest
_CRC = (
    "import sys, zlib\nfor path in sys.argv[1:]:\n crc = 0\n"
    " with open(path, 'rb', buffering=0) as file:\n"
    "  while block := file.read(1 << 20): crc = zlib.crc32(block, crc)\n"
)


class Cost(NamedTuple):
    """Wall and processor seconds, and the most memory of all processes together, in bytes."""

    seconds: float
    cpu: float
    peak: int


class Target(NamedTuple):
    """A ratio of two commands' seconds and what it must keep to."""

    name: str
    above: str
    below: str
    limit: float
    is_least: bool = False


def main() -> None:
    """Make the model, run every command in turn, and print costs and ratios."""
    asked = _arguments()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.getenv("PYTHONPATH")]))
    compileall.compile_dir(_ROOT / "ckpt_tools", quiet=1)  # as an installed package is
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="cores-", dir=asked.folder) as name:
        folder = Path(name)
        source = _model(folder, int(asked.gib * 2**30))
        commands = {
            **_commands(source, folder / "out", tuple(asked.ours)),
            **_serial(_tiny(folder), tuple(asked.ours)),
        }
        wanted = tuple(filter(None, asked.only.split(",")))
        chosen = {name: run for name, run in commands.items() if name.startswith(wanted or "")}
        costs: dict[str, list[Cost]] = {name: [] for name in chosen}
        for number in range(asked.rounds):
            names = list(chosen)
            first = number % len(names)
            for one in [*names[first:], *names[:first]]:
                data.remove(*folder.glob("out*"))
                costs[one].append(chosen[one]())
                data.remove(*folder.glob("out*"))
    _print_costs(costs)
    for target in _targets(cores):
        _print_target(target, costs)
    _print_peak(costs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: S108 - a folder in it is made
    parser.add_argument("--gib", type=float, default=2.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="commands or their beginnings, commas between")
    parser.add_argument("--folder", default=shm, help="where to make a temporary folder")
    parser.add_argument("ours", nargs="*", help="options for every command of ours, after --")
    return parser.parse_args()


def _model(folder: Path, nbytes: int) -> Path:
    """A DCP directory of eight ranks, of about so many bytes."""
    dim = 128
    while 2 * sum(map(_numel, _shapes(dim + 128).values())) <= nbytes:
        dim += 128
    shapes = _shapes(dim)
    source = _saved(shapes, folder / "source")
    size = sum(os.path.getsize(path) for path in data.files_of(source))
    print(f"{len(shapes)} tensors, {size / 2**30:.2f} GiB in {source}", flush=True)
    return source


def _tiny(folder: Path) -> Path:
    """As many tensors of the same names in as many items, of hardly any bytes."""
    shapes = {name: (data.RANKS,) * len(shape) for name, shape in _shapes(128).items()}
    return _saved(shapes, folder / "tiny")


def _saved(shapes: data.Shapes, source: Path) -> Path:
    full = source.with_suffix(".safetensors")
    data.write_full(full, shapes, "BF16")
    data.dcp_rows(full, source)
    full.unlink()
    return source


def _numel(shape: Sequence[int]) -> int:
    out = 1
    for size in shape:
        out *= size
    return out


def _shapes(dim: int) -> data.Shapes:
    """Names and shapes of a Llama of 32 layers of this width."""
    ffn = dim * 11 // 4
    layer = {f"attention.{name}.weight": (dim, dim) for name in ("wq", "wk", "wv", "wo")}
    layer |= {"feed_forward.w1.weight": (ffn, dim), "feed_forward.w3.weight": (ffn, dim)}
    layer |= {"feed_forward.w2.weight": (dim, ffn)}
    layer |= {"attention_norm.weight": (dim,), "ffn_norm.weight": (dim,)}
    shapes = {f"layers.{n}.{name}": shape for n in range(_LAYERS) for name, shape in layer.items()}
    ends = {"tok_embeddings.weight": (_VOCAB, dim), "output.weight": (_VOCAB, dim)}
    return shapes | ends | {"norm.weight": (dim,)}


def _ours(*args: str | Path) -> Callable[[], Cost]:
    return lambda: _measure([[*data.OURS, *map(str, args), "-q"]])


def _serial(source: Path, options: Sequence[str]) -> Mapping[str, Callable[[], Cost]]:
    """The proofs of what has hardly any bytes."""
    names = ("fingerprint", "verify")
    return {f"{name}, serial": _ours(name, source, *options) for name in names}


def _commands(source: Path, out: Path, options: Sequence[str]) -> Mapping[str, Callable[[], Cost]]:
    """The commands by name; each runs when it is called, and writes to ``out`` if anywhere."""
    files = [path for path in data.files_of(source) if path.endswith(".distcp")]

    def ours(*args: str | Path) -> Callable[[], Cost]:
        return _ours(*args, *options)

    def copies() -> Cost:
        out.mkdir()
        return _measure([["cp", path, str(out)] for path in files])

    def cat() -> Cost:
        return _measure([["cat", *files]], stdout=out)

    export = ("export", source, "-o")
    one = out.with_name("out.safetensors")
    shards, mesh = ("--max-shard-size", "1GB"), ("--to-mesh", "4x8")
    return {
        "cp x8": copies,
        "cat": cat,
        "sha256sum": lambda: _measure([["sha256sum", *files]]),
        "zlib.crc32": lambda: _measure([[sys.executable, "-c", _CRC, *files]]),
        "export 1GB files": ours(*export, out, *shards),
        "export --check": ours(*export, out, *shards, "--check"),
        "export --dry-run": ours(*export, out, *shards, "--dry-run"),
        "export one file": ours(*export, one),
        "reshard 8 to 4x8": ours("reshard", source, "-o", out, *mesh),
        "reshard --check": ours("reshard", source, "-o", out, *mesh, "--check"),
        "reshard --dry-run": ours("reshard", source, "-o", out, *mesh, "--dry-run"),
        "fingerprint": ours("fingerprint", source),
        "verify": ours("verify", source),
    }


def _targets(cores: int) -> list[Target]:
    check = 1.8 if cores < _MANY else 1.5
    return [
        Target("export / cp x8", "export 1GB files", "cp x8", 1.6),
        Target("reshard with CRCs / cp x8", "reshard 8 to 4x8", "cp x8", 2.0),
        Target("sha256sum / fingerprint", "sha256sum", "fingerprint", 0.6 * cores, is_least=True),
        Target("verify / zlib.crc32", "verify", "zlib.crc32", 0.12),
        Target("export --check / export", "export --check", "export 1GB files", check),
        Target("reshard --check / reshard", "reshard --check", "reshard 8 to 4x8", check),
        Target("one file / cat", "export one file", "cat", 1.1),
    ]


def _measure(commands: Sequence[Sequence[str]], *, stdout: Path | None = None) -> Cost:
    """Run commands side by side, to the end of the last."""
    with open(stdout or os.devnull, "wb") as sink:
        start, before = time.perf_counter(), os.times()
        running = [subprocess.Popen(args, stdout=sink) for args in commands]  # noqa: S603 - our own
        watch = _Watch([process.pid for process in running])
        watch.start()
        codes = [process.wait() for process in running]
        seconds, after = time.perf_counter() - start, os.times()
        watch.end()
    if any(codes):
        raise SystemExit(f"{' '.join(commands[0])} ended with {max(codes)}")
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    return Cost(seconds, user + system, watch.peak)


class _Watch(threading.Thread):
    """Adds up again and again what processes and their descendants hold, shared pages once."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._pids, self._stop_now = pids, threading.Event()
        self.peak = 0

    def run(self) -> None:
        while not self._stop_now.wait(0.1):
            held = sum(_held(pid) for pid in _family(self._pids))
            self.peak = max(self.peak, held)

    def end(self) -> None:
        """Stop looking."""
        self._stop_now.set()
        self.join()


def _family(pids: Sequence[int]) -> Iterator[int]:
    left = list(pids)
    for one in left:
        yield one
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{thread}/children").read_text()
                left += map(int, children.split())


def _held(pid: int) -> int:
    """Resident bytes of a process, its part of shared pages alone; 0 when it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _print_costs(costs: Mapping[str, Sequence[Cost]]) -> None:
    print("\n| command | seconds | CPU seconds | peak MiB of all processes |\n|---|--:|--:|--:|")
    for name, mine in costs.items():
        seconds = median(cost.seconds for cost in mine)
        cpu = median(cost.cpu for cost in mine)
        peak = max(cost.peak for cost in mine) / 2**20
        print(f"| {name} | {seconds:.2f} | {cpu:.2f} | {peak:,.0f} |")
    print("\n| ratio | median (range) | target | met |\n|---|--:|--:|---|")


def _print_target(target: Target, costs: Mapping[str, Sequence[Cost]]) -> None:
    above, below = costs.get(target.above, []), costs.get(target.below, [])
    if not above or not below:
        return
    ratios = [one.seconds / other.seconds for one, other in zip(above, below, strict=True)]
    middle = median(ratios)
    met = middle >= target.limit if target.is_least else middle <= target.limit
    wanted = f"{'≥' if target.is_least else '≤'} {target.limit:.3g}"
    found = f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"| {target.name} | {found} | {wanted} | {'yes' if met else 'no'} |")


def _print_peak(costs: Mapping[str, Sequence[Cost]]) -> None:
    """The most memory that any command of ours took, against what is promised."""
    theirs = {"cp x8", "cat", "sha256sum", "zlib.crc32"}
    peaks = {name: max(cost.peak for cost in mine) for name, mine in costs.items()}
    worst = max((name for name in peaks if name not in theirs), key=peaks.__getitem__, default="")
    if worst:
        found = peaks[worst] / 2**20
        print(f"| peak MiB ({worst}) | {found:,.0f} | ≤ 256 | {'yes' if found <= 256 else 'no'} |")


if __name__ == "__main__":
    main()
