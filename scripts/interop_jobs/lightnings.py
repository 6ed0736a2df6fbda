"""Lightning's Trainer with FSDPStrategy (FSDP1) and ModelParallelStrategy (FSDP2)."""

from __future__ import annotations

import lightning as pl
import shared
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

STUB = "the strategy's root_device is the CPU, its backend gloo: it takes CUDA devices only"


class Task(pl.LightningModule):
    """The tiny model, its loss noted at each step."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.model, self.losses = shared.Tiny(), losses

    def configure_model(self) -> None:
        if self.device_mesh is not None and not hasattr(self.model, "set_requires_gradient_sync"):
            for block in self.model.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, _: torch.Tensor) -> torch.Tensor:
        # By the step: Lightning begins a plain loader again when it resumes within an epoch.
        mine = shared.part(shared.batch(self.global_step)).to(self.device)
        loss = shared.loss_of(self.model(mine), mine)
        self.losses.append(shared.mean(loss))
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=shared.LR)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shared.schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def strategy_of(side: str, device: torch.device) -> tuple[object, str]:
    """The strategy of a side; on the CPU, a child of it that runs there."""
    base = FSDPStrategy if side == "fsdp1" else ModelParallelStrategy
    options: dict[str, object] = {"process_group_backend": "gloo"} if device.type == "cpu" else {}
    if side == "fsdp1":
        options |= {"state_dict_type": "sharded", "auto_wrap_policy": {shared.Block}}
        options |= {"use_orig_params": True}
    else:
        options |= {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    if device.type != "cpu":
        return base(**options), "nothing"
    begin = FullyShardedDataParallel.__init__
    FullyShardedDataParallel.__init__ = lambda self, *given, **more: begin(
        self, *given, **{**more, "device_id": device}
    )
    child = type(base.__name__, (base,), {"root_device": property(lambda _: device)})
    return child(**options), STUB


def main() -> None:
    want, device = shared.asked(), shared.device()
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    strategy, stubs = strategy_of(want.side, device)
    losses: list[float] = []
    callback = ModelCheckpoint(
        want.folder, filename="saved-{step}", every_n_train_steps=shared.STEPS, save_top_k=-1
    )
    trainer = pl.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=2 * shared.STEPS,
        callbacks=[callback] if want.is_new else [],
        enable_checkpointing=want.is_new,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = torch.utils.data.DataLoader(range(2 * shared.STEPS), batch_size=None)
    trainer.fit(Task(losses), data, ckpt_path=want.ckpt or None)
    shared.note(want, losses, stubs=stubs)


if __name__ == "__main__":
    main()
