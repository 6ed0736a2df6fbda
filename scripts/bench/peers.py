"""What others do, each as a command of its own: python peers.py NAME SOURCE OUT.

Every peer is called as its own documentation calls it; imports are part of what it costs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def dcp_to_torch(source: str, out: str) -> None:
    """torch: a DCP directory to one torch.save file."""
    from torch.distributed.checkpoint import format_utils

    format_utils.dcp_to_torch_save(source, out)


def torch_to_dcp(source: str, out: str) -> None:
    """torch: one torch.save file to a DCP directory."""
    from torch.distributed.checkpoint import format_utils

    format_utils.torch_save_to_dcp(source, out)


def consolidate(source: str, out: str) -> None:
    """torch: the safetensors shards of all ranks to one safetensors file, with two threads."""
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as torch_hf

    os.makedirs(out, exist_ok=True)
    mapping = dict.fromkeys(_safetensors_names(source), 1)
    torch_hf.consolidate_safetensors_files(source, out, mapping, num_threads=2)


def consolidate_on_every_rank(source: str, out: str) -> None:
    """torch: the same by the call that a training job makes, here with one rank."""
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as torch_hf

    os.makedirs(out, exist_ok=True)
    mapping = dict.fromkeys(_safetensors_names(source), 1)
    torch_hf.consolidate_safetensors_files_on_every_rank(source, out, mapping, num_threads=2)


def _safetensors_names(folder: str) -> list[str]:
    from safetensors import safe_open

    first = min(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    with safe_open(os.path.join(folder, first), framework="pt") as file:
        return list(file.keys())


def accelerate(source: str, out: str) -> None:
    """accelerate: an FSDP checkpoint to a folder with safetensors."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(source, out, safe_serialization=True)


def merge_ranks(source: str, out: str) -> None:
    """What people write themselves: load the files of all ranks, cat, save."""
    import torch
    from safetensors.torch import save_file

    paths = sorted(os.path.join(source, name) for name in os.listdir(source))
    states = [torch.load(path, weights_only=False) for path in paths if path.endswith(".pt")]
    merged = {}
    for fqn, first in states[0].items():
        parts = [getattr(state[fqn], "_local_tensor", state[fqn]) for state in states]
        merged[fqn] = torch.cat(parts) if hasattr(first, "_local_tensor") else parts[0]
    save_file(merged, out)


def reload(source: str, out: str) -> None:
    """Torch under torchrun: dcp.load into the shards of this job, then dcp.save."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    metadata = dcp.FileSystemReader(source).read_metadata()
    state = {
        fqn: zeros(*meta.size, dtype=meta.properties.dtype, device_mesh=mesh, placements=[Shard(0)])
        for fqn, meta in metadata.state_dict_metadata.items()
    }
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=out)
    dist.destroy_process_group()


def read_metadata(source: str, _out: str) -> None:
    """torch: what a DCP directory's .metadata says."""
    from torch.distributed.checkpoint import FileSystemReader

    FileSystemReader(source).read_metadata()


def bare_unpickling(source: str, _out: str) -> None:
    """The least that reading .metadata costs: slim stand-ins, no check, the collector off."""
    import bare

    bare.load(os.path.join(source, ".metadata"))


def click_and_tabulate(_source: str, _out: str) -> None:
    """Importing what a small command line takes at least."""
    import click  # noqa: F401
    import tabulate  # noqa: F401


PEERS: dict[str, Callable[[str, str], None]] = {
    peer.__name__: peer
    for peer in (
        dcp_to_torch,
        torch_to_dcp,
        consolidate,
        consolidate_on_every_rank,
        accelerate,
        merge_ranks,
        reload,
        read_metadata,
        bare_unpickling,
        click_and_tabulate,
    )
}

if __name__ == "__main__":
    PEERS[sys.argv[1]](sys.argv[2], sys.argv[3])
