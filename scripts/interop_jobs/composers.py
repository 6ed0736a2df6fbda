"""Composer's Trainer with FSDP1, and with FSDP2; it takes both for GPUs only."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import shared
import torch
import torch.distributed as dist
from cpu_stub import NO_OFFLOAD, stub_offload
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

NAMES = {
    "": (),
    ".datasets": ("VisionDataset",),
    ".models": (),
    ".models.resnet": ("Bottleneck",),
    ".ops": ("box_convert",),
    ".transforms": (),
    ".transforms.functional": (),
    ".utils": ("draw_segmentation_masks",),
}


def stub_torchvision() -> None:
    """Modules with the names that Composer imports from it. Before Composer is imported."""
    import_module("torchmetrics")  # it would find the stub, and ask more of it
    for module, names in NAMES.items():
        stub = ModuleType(f"torchvision{module}")
        vars(stub).update(dict.fromkeys(names, object))
        sys.modules[stub.__name__] = stub


def stub_scaler() -> None:
    """Let gradient scalers be for the CPU, so that they are saved: those for CUDA are off there."""
    for kind in (GradScaler, ShardedGradScaler):
        kind.__init__.__defaults__ = ("cpu", *kind.__init__.__defaults__[1:])


DEVICE = shared.device()
STUBS = []
if DEVICE.type == "cpu":
    STUBS += ["torch.cuda.current_device() is the CPU (FSDP wraps models for it)", NO_OFFLOAD]
    STUBS += ["gradient scalers are those of the CPU"]
    stub_offload()
    stub_scaler()
    torch.cuda.current_device = lambda: DEVICE
if find_spec("torchvision") is None:
    STUBS += ["torchvision is an empty module (its wheel on PyPI is for CUDA)"]
    stub_torchvision()

from composer import Trainer  # noqa: E402
from composer.models import ComposerModel  # noqa: E402
from composer.optim import ComposerScheduler  # noqa: E402
from composer.utils import FSDP2Config  # noqa: E402
from composer.utils.dist import get_sampler, initialize_dist  # noqa: E402


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


class Falling(ComposerScheduler):
    """A learning rate that is another one at every step."""

    def __call__(self, state: object, ssr: float = 1.0) -> float:
        return shared.schedule(int(state.timestamp.batch))


def main() -> None:
    want = shared.asked()
    side, _, form = want.side.partition("-")
    initialize_dist("gpu" if DEVICE.type == "cuda" else "cpu")
    losses: list[float] = []
    model = Task(losses)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shared.LR)
    # The sampler deals rows out by turns: a step has the same ones on any number of ranks.
    rows = torch.cat([shared.batch(n) for n in range(2 * shared.STEPS)])
    mine = shared.ROWS // int(os.environ["WORLD_SIZE"])
    sampler = get_sampler(rows, shuffle=False)
    options = {"state_dict_type": form or "sharded"}
    config = options if side == "fsdp1" else FSDP2Config(**options)
    trainer = Trainer(
        model=model,
        optimizers=optimizer,
        schedulers=Falling(),
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=mine, sampler=sampler),
        max_duration=f"{2 * shared.STEPS}ba",
        save_folder=want.saved if want.is_new else None,
        save_interval=f"{shared.STEPS}ba",
        load_path=want.ckpt or None,
        parallelism_config={"fsdp": config},
        precision="fp32",  # on a GPU it would take fp16
        progress_bar=False,
    )
    trainer.fit()
    shared.note(want, losses, stubs="; ".join(STUBS) or "nothing")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
