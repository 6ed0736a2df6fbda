"""Reads what a command wrote by torch and safetensors alone, and compares it with the truth."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from fuzz_cases.sources import local
from realsize_jobs.model import Flat, flat
from torch.distributed.tensor import DTensor


class Wrong(Exception):
    """A command said or wrote something else than it must."""


class Piece(NamedTuple):
    """An object, or a tensor's elements from ``offsets`` on."""

    value: object
    offsets: tuple[int, ...] = ()


def check(out: Path, wanted: Flat) -> None:
    """Raise Wrong unless the checkpoint holds exactly these leaves, each tensor whole."""
    seen: dict[str, set[Piece]] = {}
    for name, piece in _pieces(out, wanted):
        if name not in wanted:
            raise Wrong(f"{out.name} has {name}, which it must not")
        box = _compared(name, piece, wanted[name])
        seen.setdefault(name, set()).add(box)
    for name, value in wanted.items():
        if name not in seen:
            raise Wrong(f"{out.name} lacks {name}")
        numel = sum(torch.Size(sizes).numel() for _, sizes in seen[name])
        if isinstance(value, torch.Tensor) and numel != value.numel():
            raise Wrong(f"{name}: {numel:,} of {value.numel():,} elements are there")


def _compared(name: str, piece: Piece, wanted: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a piece, whose elements must be those of the truth."""
    value, offsets = piece
    if not isinstance(value, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        if type(value) is not type(wanted) or value != wanted:
            raise Wrong(f"{name} is {value!r:.80} and not {wanted!r:.80}")
        return (), ()
    sizes = tuple(value.shape)
    if offsets:
        wanted = wanted[
            tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        ]
    if (value.dtype, sizes) != (wanted.dtype, tuple(wanted.shape)):
        both = f"{value.dtype} {list(sizes)} and not {wanted.dtype} {list(wanted.shape)}"
        raise Wrong(f"{name} is {both}")
    place = first_difference(value, wanted)
    if place is not None:
        raise Wrong(f"{name} at {offsets or 'its start'}: element {place:,} of {value.numel():,}")
    return offsets, sizes


def first_difference(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """The first element whose bits differ; None when none does."""
    first, second = _bits(one), _bits(other)
    if torch.equal(first, second):
        return None
    at = int((first != second).nonzero()[0]) * first.element_size()
    return at // one.element_size()


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes, as the largest integers that they fill: those are compared the fastest."""
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    size = 8 if len(raw) % 8 == 0 and raw.storage_offset() % 8 == 0 else 1
    return raw.view({8: torch.int64, 1: torch.uint8}[size])


# ------------------------------------------------------------------------------------ the readers


def _pieces(out: Path, wanted: Flat) -> Iterator[tuple[str, Piece]]:
    if out.suffix in (".pt", ".bin"):
        state = torch.load(out, mmap=True, weights_only=True)
        return ((name, Piece(value)) for name, value in flat(state).items())
    if out.suffix == ".safetensors":
        return _safetensors([out])
    if (out / ".metadata").exists():
        return _dcp(out, wanted)
    files = sorted(out.glob("*.safetensors"))
    return _safetensors(files) if files else _rank_files(out)


def _safetensors(files: list[Path]) -> Iterator[tuple[str, Piece]]:
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                yield name, Piece(opened.get_tensor(name))


def _dcp(folder: Path, wanted: Flat) -> Iterator[tuple[str, Piece]]:
    """By `dcp.load` into empty tensors, those of the file that are not wanted, too."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name in stored.keys() - wanted.keys():
        yield name, Piece(None)
    state = {
        name: torch.empty(value.shape, dtype=value.dtype) if torch.is_tensor(value) else None
        for name, value in wanted.items()
        if name in stored
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.load(state, checkpoint_id=folder)
    for name in list(state):
        yield name, Piece(state.pop(name))


def _rank_files(folder: Path) -> Iterator[tuple[str, Piece]]:
    """Of each rank all its files, which are parts of the state where there are several."""
    by_rank: dict[int, list[Path]] = {}
    for file in folder.iterdir():
        found = re.search(r"rank_?(\d+)\.(?:pt|bin)$", file.name)
        if found:
            by_rank.setdefault(int(found[1]), []).append(file)
    for _, files in sorted(by_rank.items()):
        for name, value in flat(_rank_state(files)).items():
            yield name, _of_rank(value)


def _rank_state(files: list[Path]) -> Mapping[str, object]:
    states = {
        file.name.partition("_world_size_")[0]: torch.load(file, mmap=True, weights_only=False)
        for file in files
    }
    return states if len(states) > 1 else next(iter(states.values()))


def _of_rank(value: object) -> Piece:
    if not isinstance(value, DTensor):
        return Piece(value)
    mesh = value.device_mesh
    whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
    part, offsets = local(whole, value.placements, mesh)
    held = value.to_local()
    if held.shape != part.shape:
        raise Wrong(f"a rank holds {list(held.shape)} of {list(value.shape)}: not torch's share")
    return Piece(held, offsets)
