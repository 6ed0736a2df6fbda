"""What reads: each answer is compared with torch's, and a flipped byte must be seen."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from realsize_jobs import model, running
from realsize_jobs.conversions import Source
from realsize_jobs.reading import Wrong, first_difference


def verify(source: Source) -> None:
    """It is whole, by all its bytes and by its headers."""
    running.run("verify", source.path)
    running.run("verify", source.path, "--quick")


def fingerprint(source: Source) -> None:
    """The SHA-256 of every tensor is that of torch's bytes."""
    found = json.loads(running.run("fingerprint", source.path, "--json"))["tensors"]
    _same_names(found, source)
    for name, value in _tensors(source):
        if found[name]["sha256"] != _digest(value):
            raise Wrong(f"fingerprint of {name} is not that of its bytes")


@cache  # by the tensor itself: the truth is the same for all sources
def _digest(value: torch.Tensor) -> str:
    return sha256(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _tensors(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    return ((k, v) for k, v in source.leaves.items() if isinstance(v, torch.Tensor))


def _same_names(found: dict[str, object], source: Source) -> None:
    names = {name for name, _ in _tensors(source)}
    if found.keys() != names:
        raise Wrong(f"other tensors: {sorted(found.keys() ^ names)[:3]}")


def stats(source: Source) -> None:
    """Extremes and counts are exactly torch's, sums those that torch gets in double precision."""
    found = json.loads(running.run("stats", source.path, "--json"))["tensors"]
    _same_names(found, source)
    for name, value in _tensors(source):
        for fact, wanted in _facts(value).items():
            have = found[name][fact]
            if not math.isclose(have, wanted, rel_tol=1e-9, abs_tol=1e-9):
                raise Wrong(f"stats of {name}: {fact} is {have} and not {wanted}")


@cache
def _facts(value: torch.Tensor) -> dict[str, float]:
    low, high = value.aminmax()
    total = squares = 0.0
    for part in value.reshape(-1).split(1 << 24):
        total += part.sum(dtype=torch.float64).item()
        squares += part.double().square().sum().item()
    mean, square = total / value.numel(), squares / value.numel()
    return {
        "min": low.item(),
        "max": high.item(),
        "mean": mean,
        "std": math.sqrt(max(0.0, square - mean * mean)),
        "l2": math.sqrt(squares),
        "zeros": int((value == 0).sum()),
    }


def show(source: Source) -> None:
    """Values of a slice across the edge of a shard, and an object."""
    for name, value in _large(source):
        rows, columns = value.shape
        where = (slice(rows // 2 - 2, rows // 2 + 2), slice(columns // 2 - 2, columns // 2 + 2))
        text = ",".join(f"{one.start}:{one.stop}" for one in where)
        found = json.loads(running.run("show", source.path, name, "--slice", text, "--json"))
        if found["slice"]["values"] != value[where].tolist():
            raise Wrong(f"show {name} --slice {text}: other values than torch's")
    if "extra.step" in source.leaves:
        said = running.run("show", source.path, "extra.step", "--raw").strip()
        if said != "7":
            raise Wrong(f"show extra.step is {said} and not 7")


def _large(source: Source) -> Iterator[tuple[str, torch.Tensor]]:
    """By rows, by columns, stored by columns, replicated; and the huge one."""
    ends = (model.EMBED, f"0.{model.DOWN}", f"0.{model.UP}", model.ROTARY, model.HUGE)
    return ((k, v) for k, v in _tensors(source) if k.endswith(ends) and v.numel())


def slices(source: Source) -> None:
    """The library's slices are torch's, and whole tensors, too."""
    import ckpt_tools

    checkpoint = ckpt_tools.open_checkpoint(str(source.path))
    chance = random.Random(0)  # noqa: S311 (a case's own choice)
    for name, value in _large(source):
        rows = len(value)
        cuts = [(slice(None), slice(None)), (slice(rows // 3, -1), slice(1, None, 2)), (-1, 0)]
        cuts += [(slice(at, at + 3), ...) for at in (chance.randrange(rows) for _ in range(20))]
        for cut in cuts:
            found = checkpoint[name][cut]
            if found.shape != value[cut].shape or first_difference(found, value[cut]) is not None:
                raise Wrong(f"{name}[{cut}] of the library is not torch's")


def damage(source: Source) -> None:
    """Of an output `diff` and `verify --against` say that it equals its source, until a byte of it
    is flipped.
    """
    out, notes = source.folder / "out", source.folder / "out.json"
    form = ("--format", "ranks", "--device-type", "cpu") if source.form == "dcp" else ()
    running.run("reshard", source.path, "-o", out, "--to-mesh", "2", *form)
    running.run("fingerprint", source.path, "--write", notes, "--force")
    running.run("verify", out, "--against", notes)
    running.run("verify", out, "--against", source.path)
    running.run("diff", source.path, out)
    _flip(max(out.iterdir(), key=lambda file: file.stat().st_size))
    said = running.run("verify", out, code=1)
    said += running.run("verify", out, "--against", notes, code=1)
    said += running.run("diff", source.path, out, code=1)
    if not any(said.count(name) >= 3 for name, _ in _tensors(source)):
        raise Wrong("nothing names the tensor of a flipped byte")


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


PROOFS: dict[str, Callable[[Source], None]] = {
    "verify": verify,
    "fingerprint": fingerprint,
    "stats": stats,
    "show": show,
    "slices of the library": slices,
    "diff, --against, a flipped byte": damage,
}
