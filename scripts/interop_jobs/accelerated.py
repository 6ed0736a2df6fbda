"""Accelerate's Accelerator: save_state and load_state, with a scheduler and a prepared loader."""

from __future__ import annotations

import shared
import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from cpu_stub import stub_accelerate


class Counter:
    """Where the job stands in its data; Accelerate saves it as custom_checkpoint_0.pkl."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def accelerator_of(side: str, form: str, device: torch.device) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(side[-1]),
        state_dict_type=f"{form.upper()}_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        use_orig_params=True if side == "fsdp1" else None,
    )
    loading = DataLoaderConfiguration(split_batches=True)  # a batch is that of all ranks together
    return Accelerator(fsdp_plugin=plugin, dataloader_config=loading, cpu=device.type == "cpu")


def main() -> None:
    want, device = shared.asked(), shared.device()
    side, form = want.side.split("-")
    stubs = stub_accelerate(device)
    accelerator = accelerator_of(side, form, device)
    model = shared.Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=shared.LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, shared.schedule)
    rows = torch.cat([shared.batch(n) for n in range(2 * shared.STEPS)])
    loader = torch.utils.data.DataLoader(rows, batch_size=shared.ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    counter = Counter()
    accelerator.register_for_checkpointing(counter, scheduler)
    if not want.is_new:
        accelerator.load_state(want.ckpt)
    losses: list[float] = []
    for mine in accelerator.skip_first_batches(loader, counter.steps):
        loss = shared.loss_of(model(mine), mine)
        accelerator.backward(loss)
        losses.append(shared.mean(loss))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.steps += 1
        if want.is_new and counter.steps == shared.STEPS:
            accelerator.save_state(want.saved)
    shared.note(want, losses, stubs=stubs)
    accelerator.end_training()


if __name__ == "__main__":
    main()
