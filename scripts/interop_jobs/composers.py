"""Composer's Trainer with FSDP1, or FSDP2 where its version has it; it takes FSDP on GPUs only."""

from __future__ import annotations

import os

import shared
import torch
import torch.distributed as dist
from composer import Trainer
from composer.models import ComposerModel


class Task(ComposerModel):
    """The tiny model; Composer asks its blocks whether FSDP wraps them."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.model, self.losses = shared.Tiny(), losses
        for block in self.model.blocks:
            block._fsdp_wrap = True  # noqa: SLF001  (Composer's own way to say so)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        loss = shared.loss_of(outputs, batch)
        self.losses.append(shared.mean(loss))
        return loss


def main() -> None:
    want = shared.asked()
    shared.device()
    side, _, form = want.side.partition("-")
    losses: list[float] = []
    model = Task(losses)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shared.LR)
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    rows = [shared.batch(n).tensor_split(ranks)[rank] for n in range(2 * shared.STEPS)]
    config = {"state_dict_type": form or "sharded", "sharding_strategy": "FULL_SHARD"}
    parallel = {"fsdp": config} if side == "fsdp1" else {"fsdp2": {}}
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=None),
        max_duration=f"{2 * shared.STEPS}ba",
        save_folder=want.saved if want.is_new else None,
        save_interval=f"{shared.STEPS}ba",
        load_path=want.ckpt or None,
        parallelism_config=parallel,
        progress_bar=False,
    )
    trainer.fit()
    shared.note(want, losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
