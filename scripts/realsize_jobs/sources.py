"""The model as torch and safetensors themselves save it: four sources, and one of 600 rank files.

torchrun … sources.py STATE dcp|ranks OUT     saves the state dict of a file on all ranks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from fuzz_cases.sources import local, mesh_of  # noqa: E402
from realsize_jobs import model, running  # noqa: E402

SHARDS = 3  # files of the folder of safetensors
_MOST_PROCESSES = 4


def loaded(path: Path) -> model.State:
    """A state dict whose tensors stay on the disk."""
    state: model.State = torch.load(path, mmap=True, weights_only=True)
    return state


def save(form: str, ranks: int, *, truth: Path, out: Path) -> None:
    """Have a source saved: all at once, by a job of so many ranks, or by many one after another."""
    if form == "safetensors":
        _save_hf(loaded(truth), out)
    elif ranks > _MOST_PROCESSES:
        _save_many_ranks(loaded(truth), out, ranks)
    elif form != "pt":  # which the truth itself is
        running.end(running.start(running.command(__file__, truth, form, out, ranks=ranks)))


def _save_hf(state: model.State, folder: Path) -> None:
    """A folder of safetensors with the model under its own names, and the index."""
    tensors = {name: value.contiguous() for name, value in state["model"].items()}
    files = [f"model-{n + 1:05d}-of-{SHARDS:05d}.safetensors" for n in range(SHARDS)]
    weight_map = {name: files[place % SHARDS] for place, name in enumerate(tensors)}
    folder.mkdir()
    for file in files:
        part = {name: value for name, value in tensors.items() if weight_map[name] == file}
        safetensors.torch.save_file(part, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _save_many_ranks(state: model.State, folder: Path, ranks: int) -> None:
    """What so many ranks would save, one after another in this process."""
    folder.mkdir()
    for rank in range(ranks):
        mesh = mesh_of((ranks,), rank)
        torch.save(sharded(state, mesh), folder / f"rank_{rank}.pt")


def sharded(state: object, mesh: DeviceMesh, name: str = "") -> object:
    """The same with a DTensor of this rank for each tensor, but for one that all have whole."""
    if isinstance(state, dict):
        return {key: sharded(value, mesh, str(key)) for key, value in state.items()}
    if not isinstance(state, torch.Tensor) or not state.ndim or name == model.ROTARY:
        return state
    placed = (Shard(1) if name.endswith(model.DOWN) else Shard(0),)
    part, _ = local(state, placed, mesh)
    meta = TensorMeta(state.shape, state.stride(), state.dtype)
    spec = DTensorSpec(mesh, placed, tensor_meta=meta)
    return DTensor(_stored(part, name), spec, requires_grad=False)


def _stored(part: torch.Tensor, name: str) -> torch.Tensor:
    """By columns; as a view of a larger storage, as FSDP2 pads what is uneven; or plainly."""
    if name.endswith(model.UP):
        return part.t().contiguous().t()
    if name == model.EMBED:
        return torch.cat((part, part.new_zeros(1, part.shape[1])))[: len(part)]
    return part.clone(memory_format=torch.contiguous_format)


def main(source: str, form: str, out: str) -> None:
    """Save on all ranks of this job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    state = sharded(loaded(Path(source)), mesh)
    if form == "dcp":
        dcp.save(state, checkpoint_id=out)
    else:
        Path(out).mkdir(exist_ok=True)
        # Protocol 2, which "pt" has, takes torch two seconds for an object of 64 MB in each file.
        torch.save(state, Path(out, f"rank_{rank}.pt"), pickle_protocol=4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
