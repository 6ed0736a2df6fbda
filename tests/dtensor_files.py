"""Rank files of DTensors for tests, made and read without any process group."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from ckpt_tools.core import layout
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.rank_files import exchange

Entry = tuple[torch.Tensor, Sequence[Placement]]


def device_mesh(
    shape: Sequence[int], *, rank: int, names: tuple[str, ...] | None, device_type: str = "cpu"
) -> DeviceMesh:
    """The mesh as torch makes it, without a process group."""
    ranks = torch.arange(layout.Mesh(tuple(shape)).size).reshape(tuple(shape))
    if "_rank" in inspect.signature(DeviceMesh).parameters:
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
    with mock.patch("torch.distributed.device_mesh.get_rank", return_value=rank):  # torch 2.6
        return DeviceMesh(device_type, ranks, mesh_dim_names=names, _init_backend=False)


def mesh_of(shape: Sequence[int], rank: int) -> DeviceMesh:
    return device_mesh(shape, rank=rank, names=tuple(f"dim{i}" for i in range(len(shape))))


def shard(whole: torch.Tensor, placements: Sequence[Placement], mesh: DeviceMesh) -> torch.Tensor:
    """What a rank of the mesh holds; placements cut from left to right, as ours do."""
    ours = tuple(
        layout.Shard(p.dim) if isinstance(p, Shard) else layout.Replicate() for p in placements
    )
    placed = layout.Layout(layout.Mesh(tuple(mesh.shape)), ours)
    box = placed.box(whole.shape, mesh.get_coordinate())
    return whole[tuple(slice(a, b) for a, b in zip(box.offsets, box.ends, strict=True))].clone()


def dtensor(
    local: torch.Tensor, shape: Sequence[int], placements: Sequence[Placement], mesh: DeviceMesh
) -> DTensor:
    strides = torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def save_ranks(
    folder: Path,
    entries: Mapping[str, Entry],
    mesh_shape: Sequence[int],
    *,
    name: str = "model_world_size_{world}_rank_{rank}.pt",
    plain: Mapping[str, object] | None = None,
) -> list[Path]:
    """One file a rank, of DTensors with these placements and of what is not cut."""
    folder.mkdir(exist_ok=True)
    world = layout.Mesh(tuple(mesh_shape)).size
    paths = []
    for rank in range(world):
        mesh = mesh_of(mesh_shape, rank)
        state: dict[str, object] = dict(plain or {})
        for fqn, (whole, placements) in entries.items():
            local = shard(whole, placements, mesh)
            state[fqn] = dtensor(local, whole.shape, placements, mesh)
        paths.append(folder / name.format(world=world, rank=rank))
        torch.save(state, paths[-1])
    return paths


def read_by_ranks(folder: Path) -> CheckpointIndex:
    """The index that the engine gather joins from what each rank reads of its own files."""
    where = str(folder)
    listing = exchange.listing(where)
    families = exchange.families_of([listing], where=where)
    headers = [
        exchange.read_headers(families, rank=rank, where=where, options=ReadOptions())
        for rank in sorted({file.rank for file in listing})
    ]
    return exchange.joined_index(where, headers, families)


ROWS = (Shard(0),)
HYBRID = (Replicate(), Shard(0))


def drifted(folder: Path, *, by: float = 1.0, columns: int = 100_000) -> Path:
    """Rank files on 2x2, of which rank 3 holds a value that is larger ``by`` than its replica's.

    Each shard is a part of a larger storage, so that no CRC in a header tells it.
    """
    folder.mkdir()
    whole = torch.arange(8 * columns, dtype=torch.float32).view(8, columns)
    for rank in range(4):
        mesh = mesh_of((2, 2), rank)
        local = torch.cat([shard(whole, HYBRID, mesh), torch.zeros(1, columns)])[:4]
        local[3, 7] += by if rank == 3 else 0.0
        state = {"w": dtensor(local, whole.shape, HYBRID, mesh)}
        torch.save(state, folder / f"model_world_size_4_rank_{rank}.pt")
    return folder
