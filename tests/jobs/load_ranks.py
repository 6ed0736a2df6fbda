"""Loads rank files as a job does: torch's own hash, full_tensor() and copy_() on its own mesh.

Arguments: the name of the files with {rank} in it, and the file that rank 0 saves whole tensors to.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor


def main(files: str, out: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = torch.load(files.replace("{rank}", str(rank)), weights_only=True)
    whole = {}
    for fqn, held in state.get("model", state).items():
        whole[fqn] = held
        if isinstance(held, DTensor):
            mesh = held.device_mesh
            own = init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names)
            assert (own, hash(own)) == (mesh, hash(mesh))
            copied = distribute_tensor(torch.zeros(held.shape), own, held.placements)
            copied.copy_(held)
            whole[fqn] = held.full_tensor()
            assert copied.full_tensor().equal(whole[fqn])
    if rank == 0:
        torch.save(whole, out)
    dist.destroy_process_group()


main(sys.argv[1], sys.argv[2])
