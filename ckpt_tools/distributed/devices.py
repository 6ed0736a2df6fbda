"""torch's own process group and device mesh, on the devices that are there: NCCL or gloo."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_tools.core.geometry import row_major_strides
from ckpt_tools.core.layout import Layout, Mesh, Replicate
from ckpt_tools.distributed.group import Group
from ckpt_tools.errors import PeerFailedError, UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@contextmanager
def process_group(group: Group) -> Iterator[str]:
    """Torch's default process group during the block; yields the device type.

    NCCL on GPUs when this machine has one for each of its ranks, else gloo on CPUs. All ranks must
    find the same. Collectives of objects go through gloo in both cases.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    place = group.place
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= place.local_world_size
    own_type = "cuda" if enough and dist.is_nccl_available() else "cpu"
    device_type = group.broadcast(own_type)
    error = None
    if device_type != own_type:
        error = UsageError(f"This rank has {own_type} devices, and rank 0 has {device_type}.")
    group.barrier(error)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    if device_type == "cuda":
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        store=PrefixStore("torch", group.store),  # type: ignore[arg-type]
        rank=place.rank,
        world_size=place.world_size,
    )
    is_broken = False
    try:
        yield device_type
    except PeerFailedError:
        is_broken = True  # destroying it would wait for the ranks that are gone
        raise
    finally:
        if not is_broken:
            _destroy_groups()


def _destroy_groups() -> None:
    """Destroy all of torch's process groups, each gloo backend after its group.

    With torch 2.6 a group that ends waits for gloo's threads and keeps Python's lock (GIL), which a
    thread needs to drop its last tensor: both hang. A backend that ends releases the lock.
    """
    import torch
    from torch.distributed import destroy_process_group, distributed_c10d

    cpu = torch.device("cpu")
    groups = distributed_c10d._world.pg_map  # noqa: SLF001 (torch lists its groups nowhere else)
    backends = [group._get_backend(cpu) for group in groups if cpu in group._device_types]  # noqa: SLF001
    destroy_process_group()
    backends.clear()


def require_world(world_size: int, mesh: Mesh, *, engine: str, whose: str) -> None:
    """Raise UsageError unless the job has exactly as many ranks as a mesh.

    ``whose`` says what mesh it is, for a person.
    """
    if world_size == mesh.size:
        return
    raise UsageError(
        f"--engine {engine} needs one rank for each of {whose}'s {mesh.size} ({mesh}); "
        f"this job has {world_size}.",
        hint=f"torchrun --nproc-per-node {mesh.size} -m ckpt_tools reshard … --engine {engine}, "
        "or --engine copy, which any number of ranks can do.",
    )


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Torch's mesh of all ranks of the job, numbered row-major."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.names)


def placements_of(layout: Layout) -> list[Placement]:
    """Torch's placements for a layout; a cut that comes after one to its right is strided.

    Raises UnsupportedError for an order of cuts that torch has no placement for.
    """
    from torch.distributed.tensor.placement_types import Replicate as TorchReplicate
    from torch.distributed.tensor.placement_types import Shard as TorchShard
    from torch.distributed.tensor.placement_types import _StridedShard

    placements: list[Placement] = []
    for mesh_dim, placement in enumerate(layout.placements):
        if isinstance(placement, Replicate):
            placements.append(TorchReplicate())
            continue
        factor = layout.split_factor(mesh_dim)
        if factor == 1:
            placements.append(TorchShard(placement.dim))
        else:
            placements.append(_StridedShard(placement.dim, split_factor=factor))
    return placements


def dtensor(
    local: torch.Tensor, layout: Layout, mesh: DeviceMesh, *, shape: tuple[int, ...]
) -> DTensor:
    """A tensor of this shape of which this rank holds ``local``."""
    import torch
    from torch.distributed.tensor import DTensor

    made: DTensor = DTensor.from_local(
        local,
        mesh,
        placements_of(layout),
        run_check=False,
        shape=torch.Size(shape),
        stride=row_major_strides(shape),
    )
    return made


def check_box(
    layout: Layout, shape: tuple[int, ...], mesh: DeviceMesh, *, fqn: str, rank: int
) -> tuple[int, ...]:
    """The sizes of this rank's shard, when torch computes the same box as the layout does.

    Raises UnsupportedError when it does not: its own loader would then be wrong.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placements = placements_of(layout)
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    box = layout.box(shape, layout.mesh.coordinate(rank))
    same = tuple(sizes) == box.sizes and (0 in box.sizes or tuple(offsets) == box.offsets)
    if not same:
        raise UnsupportedError(
            f"{fqn}: torch places {tuple(sizes)} at {tuple(offsets)} on rank {rank} for "
            f"({layout}) of {list(shape)}, where {box} is right.",
            hint="--engine copy, which needs no DTensors.",
        )
    return box.sizes
