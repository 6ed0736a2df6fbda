"""No two commands say different numbers of one checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alone import ALONE
from running import run

from ckpt_tools import formats, open_checkpoint
from ckpt_tools.errors import CkptError

DATA = Path(__file__).parents[1] / "data"
ACCELERATE = DATA / "checkpoints" / "accelerate_fsdp2_sharded_llama_tied_4r" / "ckpt" / "state"
SAVES = [*(DATA / "checkpoints").iterdir(), *(DATA / "cases").iterdir()]


class Said(NamedTuple):
    """Tensors, objects and bytes of the tensors; None where a command does not say it."""

    tensors: int
    objects: int | None = None
    nbytes: int | None = None


def _in_full(path: Path) -> Iterator[tuple[str, Said]]:
    """What commands say that show also a checkpoint that is not whole."""
    sections = json.loads(run("inspect", path, "--json").stdout)["sections"].values()
    sums = (sum(one[key] for one in sections) for key in ("tensors", "objects", "nbytes"))
    yield "inspect", Said(*sums)
    row = r'<tr><td>\w+</td><td class="n">([\d,]+)</td><td class="n">([\d,]+)</td><td class="n">'
    page = run("inspect", path, "--html", "-").stdout.partition("<h2>Who holds what</h2>")[0]
    found = [[int(cell.replace(",", "")) for cell in cells] for cells in re.findall(row, page)]
    yield "the page of inspect", Said(*map(sum, zip(*found, strict=True)))
    listed = run("ls", path, "--jsonl")
    lines = [json.loads(line) for line in listed.stdout.splitlines()]
    sizes = [line["nbytes"] for line in lines if line["kind"] == "tensor"]
    yield "the lines of ls", Said(len(sizes), len(lines) - len(sizes), sum(sizes))
    summary = re.search(r"(?m)^([\d,]+) tensors? of .*, ([\d,]+) objects?\.$", listed.stderr)
    assert summary is not None
    yield "ls", Said(*(int(number.replace(",", "")) for number in summary.groups()))
    yield "layout", Said(len(json.loads(run("layout", path, "--json").stdout)["tensors"]))
    checkpoint = open_checkpoint(path)
    assert len(checkpoint) == len(list(checkpoint)) == len(sizes)
    yield "Python", Said(len(checkpoint.tensors), len(checkpoint.objects))
    for args in ((), ("--quick",)):
        told = json.loads(run("verify", path, "--json", *args).stdout)
        yield f"verify {args}", Said(told["tensors"]["total"], told["objects"]["total"])


def _of_whole(path: Path, out: Path) -> Iterator[tuple[str, Said]]:
    """What commands say of a checkpoint of which all can be read."""
    told = json.loads(run("fingerprint", path, "--json").stdout)
    yield "fingerprint", Said(len(told["tensors"]))
    yield "stats", Said(len(json.loads(run("stats", path, "--json").stdout)["tensors"]))
    told = json.loads(run("diff", path, path, "--header-only", "--json").stdout)
    yield "diff", Said(told["tensors"], told["objects"])
    everything = ("--only", "all", "--keep-names", "--keep-rank-states", "--check")
    done = run("export", path, "-o", out, "--format", "torch", *everything)
    proven = re.search(r"the ([\d,]+) tensors? written \(([\d,]+) bytes\)", done.stderr)
    if proven is not None:
        tensors, nbytes = (int(number.replace(",", "")) for number in proven.groups())
        yield "export --check", Said(tensors, None, nbytes)
    resharded = ("--to-mesh", "1", "--keep-rank-states", "--dry-run")
    planned = run("reshard", path, "-o", out, *resharded).stdout
    summary = re.search(r": ([\d,]+) tensors?, ", planned)
    if summary is not None:
        yield "reshard", Said(int(summary[1].replace(",", "")))
    files = json.loads(run("inspect", path, "--json").stdout)["files"]["nbytes"]
    assert json.loads(run("verify", path, "--json").stdout)["file_bytes"] == files


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Every checkpoint below a folder that can be opened; those in a checkpoint are its parts."""
    for path in sorted(folder.iterdir()):
        if path.name == "truth.safetensors":
            continue
        try:
            if formats.is_checkpoint(str(path)):
                yield from [path] if formats.read_index(str(path)).tensors else []
            elif path.is_dir():
                yield from _checkpoints(path)
        except CkptError:
            continue


@pytest.fixture(params=["tuple", "random states"])
def packed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint in which tensors lie inside of an object."""
    if request.param == "tuple":
        state = {"model": {"w": torch.ones(3)}, "t": (torch.arange(4), 1), "n": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(state, checkpoint_id=tmp_path / "dcp", **ALONE)
        return tmp_path / "dcp"
    folder = shutil.copytree(ACCELERATE, tmp_path / "state")
    seed = {"step": 2, "torch_manual_seed": torch.arange(16, dtype=torch.uint8)}
    torch.save(seed, folder / "random_states_0.pkl")
    return folder


def _require_one_count(path: Path, out: Path) -> None:
    told = dict(_in_full(path))
    report = json.loads(run("verify", path, "--quick", "--json").stdout)
    if report["whole"] and not report["unread"]:
        told |= dict(_of_whole(path, out))
    true = told["inspect"]
    wrong = {
        command: said
        for command, said in told.items()
        if any(one not in (None, other) for one, other in zip(said, true, strict=True))
    }
    assert not wrong, f"inspect of {path}: {true}"


@pytest.mark.slow
@pytest.mark.parametrize("save", [save for save in sorted(SAVES) if save.is_dir()], ids=str)
def test_all_commands_count_alike(save: Path, tmp_path: Path) -> None:
    for number, path in enumerate(_checkpoints(save)):
        _require_one_count(path, tmp_path / f"{number}.pt")


def test_tensors_inside_of_objects_are_counted_by_all_commands(
    packed: Path, tmp_path: Path
) -> None:
    _require_one_count(packed, tmp_path / "out.pt")
