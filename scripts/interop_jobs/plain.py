"""Plain torch: get_state_dict, dcp.async_save, an LR scheduler, torchdata's StatefulDataLoader."""

from __future__ import annotations

import shared
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torchdata.stateful_dataloader import StatefulDataLoader


class App(Stateful):
    """Model and optimizer, as torch's tutorial on DCP has them."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, object]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, object]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )


def main() -> None:
    want, device = shared.asked(), shared.device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model = shared.Tiny(shared.WIDE).to(device)
    if want.side == "fsdp1":
        options = {"device_mesh": mesh, "device_id": device, "use_orig_params": True}
        policy = ModuleWrapPolicy({shared.Block})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(shared.groups(model), lr=shared.LR / 100)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shared.schedule)
    # Every rank reads the whole batch and takes its rows: one position for any number of ranks.
    loader = StatefulDataLoader([shared.batch(n) for n in range(2 * shared.STEPS)], batch_size=None)
    state = {"app": App(model, optimizer), "scheduler": scheduler, "loader": loader}
    if not want.is_new:
        dcp.load(state, checkpoint_id=want.ckpt)
    losses: list[float] = []
    saving = None
    for tokens in loader:
        mine = shared.part(tokens).to(device)
        loss = shared.loss_of(model(mine), mine)
        loss.backward()
        losses.append(shared.mean(loss))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if want.is_new and len(losses) == shared.STEPS:
            # Its thread talks while the training does: they must not share a process group.
            group = dist.new_group(backend="gloo")
            saving = dcp.async_save(state, checkpoint_id=want.saved, process_group=group)
    if saving is not None:
        saving.result()
    shared.note(want, losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
