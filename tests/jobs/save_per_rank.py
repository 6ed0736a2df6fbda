"""Saves with use_collectives=False: every rank its own metadata, its shards, and all that is whole.

Arguments: the folder of the checkpoint, and what differs between ranks: "nothing",
"buffer", or "step", as if the files of several saves were brought together.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def main(folder: str, differs: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    odd = rank if differs == "buffer" else 0
    state = {
        "model": {
            "w": distribute_tensor(torch.arange(30.0).view(10, 3), mesh, [Shard(0)]),
            "buffer": torch.arange(5.0) + odd,
            "large": torch.arange(40_000.0) + odd,
        },
        "rng_state": torch.arange(6, dtype=torch.uint8) + rank,
        "step": 7 + (rank if differs == "step" else 0),
        "dataloader": {"seen": 100 + rank},
    }
    dcp.save(state, checkpoint_id=folder, use_collectives=False)
    dist.destroy_process_group()


main(sys.argv[1], sys.argv[2])
