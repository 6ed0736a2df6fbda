"""How each side saves and loads, with torch's own calls alone."""

from __future__ import annotations

import os
import warnings

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scenarios import Row, Saved
from sides import Run
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor


def save(run: Run, folder: str, saved: Saved) -> None:
    """Write the model and the optimizer in one of the ways in which people save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(run.model, FullyShardedDataParallel):
            state = _fsdp1_state(run, full=saved == "full")
        else:
            state = _fsdp2_state(run, saved)
        if saved == "full":
            if dist.get_rank() == 0:
                torch.save(state, f"{folder}.pt")
        elif saved == "ranks":
            _save_ranks(state, folder)
        else:
            dcp.save(state, checkpoint_id=folder)
        if saved == "numbered" and dist.get_rank() == 0:
            names = tiny.group_major_names(run.model, run.optimizer)
            with open(f"{folder}.names", "w") as file:
                file.write("".join(f"{name}\n" for name in names))


def _fsdp1_state(run: Run, *, full: bool) -> dict[str, object]:
    """FSDP1's own calls: state_dict under a StateDictType, and FSDP.optim_state_dict."""
    kind = StateDictType.FULL_STATE_DICT if full else StateDictType.SHARDED_STATE_DICT
    to_cpu = run.device.type == "cuda"  # on the CPU, torch 2.13 dies of offloading to it
    if full:
        configs: tuple[object, object] = (
            FullStateDictConfig(to_cpu, rank0_only=True),
            FullOptimStateDictConfig(to_cpu, rank0_only=True),
        )
    else:
        configs = ShardedStateDictConfig(to_cpu), ShardedOptimStateDictConfig(to_cpu)
    with FullyShardedDataParallel.state_dict_type(run.model, kind, *configs):
        model = run.model.state_dict()
        optim = FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer)
    return {"model": model, "optim": optim}


def _fsdp2_state(run: Run, saved: Saved) -> dict[str, object]:
    """FSDP2's: get_state_dict, whole, nested or flattened; or the optimizer's own numbered one."""
    if saved == "numbered":
        return {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    options = StateDictOptions(
        full_state_dict=saved == "full",
        cpu_offload=saved == "full",
        flatten_optimizer_state_dict=saved == "flattened",
    )
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    return {"model": model, "optim": optim}


def _save_ranks(state: dict[str, object], folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    for family, part in state.items():
        name = f"{family}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
        torch.save(part, os.path.join(folder, name))


def load(run: Run, path: str, row: Row) -> None:
    """Load a converted checkpoint as a job of this side does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        {"dcp": _load_dcp, "ranks": _load_ranks, "torch": _load_file}[row.target](run, path)
    dist.barrier()


def _load_dcp(run: Run, path: str) -> None:
    if run.side.engine == "fsdp1" and run.side.mesh == "none":
        _load_dcp_into_sharded_tensors(run, path)
        return
    model, optim = get_state_dict(run.model, run.optimizer)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
    )


def _load_dcp_into_sharded_tensors(run: Run, path: str) -> None:
    """The way of FSDP1 without a device_mesh, whose state dicts hold ShardedTensors."""
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": run.model.state_dict()}
        dcp.load(state, checkpoint_id=path)
        run.model.load_state_dict(state["model"])
        optim = load_sharded_optimizer_state_dict(
            model_state_dict=state["model"],
            optimizer_key="optim",
            storage_reader=dcp.FileSystemReader(path),
        )
        flat = FullyShardedDataParallel.optim_state_dict_to_load(
            run.model, run.optimizer, optim["optim"]
        )
        run.optimizer.load_state_dict(flat)


def _load_ranks(run: Run, path: str) -> None:
    parts = {}
    for family in ("model", "optim"):
        name = f"{family}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
        loaded = torch.load(os.path.join(path, name), weights_only=False)
        parts[family] = _on_mesh_of(run, loaded) if run.mesh.ndim > 1 else loaded
    get_optimizer_state_dict(run.model, run.optimizer)  # it makes the state that set_… fills
    set_model_state_dict(run.model, parts["model"])
    set_optimizer_state_dict(run.model, run.optimizer, parts["optim"])


def _on_mesh_of(run: Run, value: object) -> object:
    """The same with its DTensors on this job's mesh.

    A mesh that was loaded has no process groups of this job. With one dimension that does no harm;
    with two, torch's optimizer keeps the loaded mesh, and fails at the next full_tensor().
    """
    if isinstance(value, DTensor):
        local = value.to_local().to(run.device)
        options = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(local, run.mesh, value.placements, **options)
    if isinstance(value, dict):
        return {key: _on_mesh_of(run, one) for key, one in value.items()}
    return value


def _load_file(run: Run, path: str) -> None:
    """A FULL_STATE_DICT, by FSDP1's own loader."""
    state = torch.load(path, weights_only=True)
    kind = StateDictType.FULL_STATE_DICT
    configs = FullStateDictConfig(), FullOptimStateDictConfig()
    with FullyShardedDataParallel.state_dict_type(run.model, kind, *configs):
        run.model.load_state_dict(state["model"])
        flat = FullyShardedDataParallel.optim_state_dict_to_load(
            run.model, run.optimizer, state["optim"]
        )
        run.optimizer.load_state_dict(flat)
