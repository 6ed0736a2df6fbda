"""The training jobs of the tests: plain torch programs that know nothing of ckpt-tools.

    torchrun … tests/jobs/training.py save OUT [KIND]     trains, and saves OUT/dcp and OUT/ranks
    torchrun … tests/jobs/training.py step RESULT TASK…   loads each checkpoint and takes a step

A TASK is `KIND:CHECKPOINT`; KIND is 1d (the one to save, too), hsdp, tp or fsdp1. The model is
built on the meta device, so that every number comes from the checkpoint. RESULT is JSON: for each
task the next loss and a digest of all parameters, moments and steps after it.

Runs on CPUs, and on GPUs where TRAINING_DEVICE=cuda says so; TRAINING_SIZE=large has matrices
of the size of real ones.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

DEVICE = os.environ.get("TRAINING_DEVICE", "cpu")
# 10 over 3 ranks and 7 over 4 are uneven, 12 divides by tp = 2. Matrices of the large model have
# 64 MiB, and are uneven over any number of ranks.
SIZES = {"tiny": (10, 12, 7), "large": (2051, 8191, 7)}
DIM, HIDDEN, VOCAB = SIZES[os.environ.get("TRAINING_SIZE", "tiny")]


class Block(nn.Module):
    """Two linear layers, which tensor parallelism cuts by columns and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallel(kind: str) -> nn.Module:
    """The model without values, cut over all ranks of this job."""
    world = dist.get_world_size()
    with torch.device("meta"):
        model = Model()
    if kind == "fsdp1":
        mesh = init_device_mesh(DEVICE, (world,))
        model.to_empty(device=DEVICE)
        here = torch.device(DEVICE) if DEVICE == "cpu" else torch.cuda.current_device()
        return FullyShardedDataParallel(
            model, device_mesh=mesh, use_orig_params=True, device_id=here
        )
    if kind == "tp":
        mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        mesh = mesh["dp"]
    elif kind == "hsdp":
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=names)
    else:
        mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("dp_shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=DEVICE)
    return model


def batch(step: int) -> Tensor:
    """The same tokens on every rank, so that the loss is too."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (2, 6), generator=generator).to(DEVICE)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step; gives the loss before it."""
    tokens = batch(step)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(out: str, kind: str = "1d") -> None:
    """Train two steps from values that are the same on any number of ranks, and save."""
    model = parallel(kind)
    fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(2):
        train(model, optimizer, step)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state, "step": 2, "note": "as it was"}
    dcp.save(state, checkpoint_id=f"{out}/dcp")
    Path(out, "ranks").mkdir(exist_ok=True)
    name = f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(model_state, Path(out, "ranks", name))


def fill(model: nn.Module) -> None:
    """Give every parameter values that do not depend on how it is cut."""
    torch.manual_seed(0)
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.3)
        return
    with torch.no_grad():
        for parameter in model.parameters():
            values = (torch.randn(parameter.shape) * 0.3).to(DEVICE)
            mesh, placements = parameter.device_mesh, parameter.placements
            parameter.copy_(distribute_tensor(values, mesh, placements))


def next_step(kind: str, checkpoint: str) -> dict[str, str]:
    """Load a checkpoint, take one step, and say what came of it."""
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    model_state, optim_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state, "step": 0, "note": ""}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
    )
    loaded = digest(state)
    loss = train(model, optimizer, state["step"])
    model_state, optim_state = get_state_dict(model, optimizer)
    after = digest({"model": model_state, "optim": optim_state})
    return {"loaded": loaded, "loss": loss.hex(), "after": after, "note": state["note"]}


def digest(value: object) -> str:
    """A digest of a nested state dict, of whole tensors."""
    found = hashlib.sha256()
    for text in _leaves(value, ""):
        found.update(text)
    return found.hexdigest()


def _leaves(value: object, name: str) -> list[bytes]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key], f"{name}.{key}")]
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return [f"{name}={value!r}".encode()]
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [f"{name} {value.dtype} {tuple(value.shape)}".encode(), raw]


def main(verb: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(mode=True)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")
    if verb == "save":
        save(*arguments)
    else:
        result, *tasks = arguments
        found = {task: next_step(*task.split(":", 1)) for task in tasks}
        if dist.get_rank() == 0:
            Path(result).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
