"""Checkpoints of random state dicts, written by torch and by safetensors themselves."""

from __future__ import annotations

import inspect
import json
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from fuzz_cases import states
from fuzz_cases.states import State
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

MESHES = ((1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 1), (2, 3), (4, 2), (2, 1, 2))
_NAMES = ("model_world_size_{world}_rank_{rank}.pt", "rank_{rank}.pt", "ckpt_rank{rank}.pt")


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint on disk and the state dict that was saved there.

    ``keeps_order`` is whether keys are in the order of the state dict: DCP has one of its own.
    """

    path: Path
    form: str
    state: State
    keeps_order: bool = True


class RefusedByTorch(Exception):
    """torch itself does not save this."""


def write(rng: random.Random, state: State, folder: Path, form: str) -> Source:
    """A checkpoint of this state dict in the format ``form``. Raises RefusedByTorch."""
    ways: dict[str, Callable[[random.Random, State, Path], Source]] = {
        "pt": _torch_file,
        "old pt": _old_torch_file,
        "dcp": _dcp,
        "ranks": _ranks,
        "safetensors": _safetensors,
    }
    folder.mkdir()
    return ways[form](rng, state, folder)


def _torch_file(rng: random.Random, state: State, folder: Path) -> Source:
    path = folder / rng.choice(("a.pt", "pytorch_model_fsdp.bin", "last.ckpt"))
    torch.save(state, path)
    return Source(path, "pt", state)


def _old_torch_file(rng: random.Random, state: State, folder: Path) -> Source:  # noqa: ARG001
    path = folder / "old.pt"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return Source(path, "old pt", state)


def _dcp(rng: random.Random, state: State, folder: Path) -> Source:  # noqa: ARG001
    save_dcp(state, folder / "dcp")
    return Source(folder / "dcp", "dcp", state, keeps_order=False)


def save_dcp(state: State, folder: Path) -> None:
    """Torch's own directory of a state dict. Raises RefusedByTorch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp.save(state, checkpoint_id=folder)
        except CheckpointException as error:
            raise RefusedByTorch(repr(error)) from error


def through_dcp(state: State, folder: Path) -> State:
    """What torch makes of its own directory of a state dict, as one file. Raises RefusedByTorch."""
    save_dcp(state, folder / "torchs")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dcp_to_torch_save(folder / "torchs", folder / "torchs.pt")
        except (CheckpointException, IndexError, TypeError, KeyError) as error:
            raise RefusedByTorch(repr(error)) from error
        found: State = torch.load(folder / "torchs.pt", weights_only=False)
    return found


# -------------------------------------------------------------------------------------- rank files


def mesh_of(shape: Sequence[int], rank: int) -> DeviceMesh:
    """The mesh as one rank has it, without any process group."""
    ranks = torch.arange(math.prod(shape)).reshape(tuple(shape))
    names = tuple(f"dim{place}" for place in range(len(shape)))
    if "_rank" in inspect.signature(DeviceMesh).parameters:
        return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    with mock.patch("torch.distributed.device_mesh.get_rank", return_value=rank):  # torch 2.6
        return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False)


def placements(
    rng: random.Random, shape: Sequence[int], mesh: Sequence[int]
) -> tuple[Placement, ...]:
    """A placement for each dimension of the mesh that this tensor can have, strided ones too."""
    if not shape:
        return tuple(Replicate() for _ in mesh)
    if len(mesh) == 2 and shape[0] % math.prod(mesh) == 0 and rng.random() < 0.3:
        return _StridedShard(0, split_factor=mesh[1]), Shard(0)
    return tuple(
        Shard(rng.randrange(len(shape))) if rng.random() < 0.7 else Replicate() for _ in mesh
    )


def local(
    whole: torch.Tensor, placed: Sequence[Placement], mesh: DeviceMesh
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What a rank holds of a tensor and where that begins, by torch's own rule."""
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placed)
    cut = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    return whole[cut] if cut else whole, tuple(offsets)


def _dtensor(
    rng: random.Random, whole: torch.Tensor, placed: Sequence[Placement], mesh: DeviceMesh
) -> DTensor:
    part, _ = local(whole, placed, mesh)
    part = part.clone() if rng.random() < 0.5 else _padded(part)
    strides = torch.empty(whole.shape, device="meta").stride()
    meta = TensorMeta(whole.shape, strides, whole.dtype)
    return DTensor(part, DTensorSpec(mesh, tuple(placed), tensor_meta=meta), requires_grad=False)


def _padded(part: torch.Tensor) -> torch.Tensor:
    """The same as a view of a larger storage, as FSDP2 keeps its parameters."""
    if part.ndim == 0:
        return part.clone()
    more = torch.zeros((part.shape[0] + 2, *part.shape[1:]), dtype=part.dtype)
    more[: part.shape[0]] = part
    return more[: part.shape[0]]


def _ranks(rng: random.Random, state: State, folder: Path) -> Source:
    shape = rng.choice(MESHES)
    world, name, seed = math.prod(shape), rng.choice(_NAMES), rng.random()
    for rank in range(world):
        own = random.Random(seed)  # noqa: S311 (a case's own choice)
        mesh = mesh_of(shape, rank)

        def sharded(whole: torch.Tensor) -> torch.Tensor:
            plain = whole.detach().resolve_conj().resolve_neg()
            can = plain.dtype not in states.PACKED and own.random() < 0.8  # noqa: B023
            placed = placements(own, plain.shape, shape)  # noqa: B023
            return _dtensor(own, plain, placed, mesh) if can else whole  # noqa: B023

        torch.save(states.mapped(state, sharded), folder / name.format(world=world, rank=rank))
    return Source(folder, "ranks", state)


# ------------------------------------------------------------------------------------- safetensors


def _safetensors(rng: random.Random, state: State, folder: Path) -> Source:
    flat = {
        name: value.detach()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        for name, value in states.tensors(state).items()
        if states.is_in_safetensors(value) and value.dtype not in states.PACKED  # it fails for some
    } or {"w": torch.ones(3)}
    whole: State = dict(sorted(flat.items()))
    if rng.random() < 0.5:
        safetensors.torch.save_file(flat, folder / "model.safetensors")
        return Source(folder / "model.safetensors", "safetensors", whole)
    weight_map = {name: f"model-0000{rng.randint(1, 2)}-of-00002.safetensors" for name in flat}
    for file in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        part = {name: flat[name] for name in flat if weight_map[name] == file}
        safetensors.torch.save_file(part, folder / file)
    size = sum(value.numel() * value.element_size() for value in flat.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return Source(folder, "safetensors", whole)
