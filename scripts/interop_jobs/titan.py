"""TorchTitan's Trainer: its own loop and CheckpointManager, a Llama 3 with two small layers.

Two generations of it are known: 0.3 for new versions of torch, and 0.2 for torch up to 2.11.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import shared
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

STUB = (
    "the device is the CPU, with no memory monitor and no shorter timeouts (it takes accelerators "
    "only); gradients are summed without a factor, which gloo has not"
)


def stub_device() -> None:
    """Let it take the CPU for its accelerator. Before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"  # noqa: SLF001
    torch.cpu.get_device_name = lambda *_: "CPU"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30, name="CPU")
    torch.cpu.memory_stats = lambda *_: {}
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cpu, name, lambda *_: None)


def stub_trainer(model: torch.nn.Module) -> None:
    """What it asks of a process group that gloo has not."""
    import_module("torchtitan.distributed.utils").set_pg_timeouts = lambda **_: None
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def main() -> None:
    want, device = shared.asked(), shared.device()
    if device.type == "cpu":
        stub_device()
    new = find_spec("torchtitan.trainer") is not None
    generation = import_module("titan_03" if new else "titan_02")
    losses: list[float] = []
    trainer = generation.trainer_of(want, losses)
    stubs = [generation.STUB] if generation.STUB else []
    if device.type == "cpu":
        stub_trainer(trainer.model_parts[0])
        stubs.insert(0, STUB)
    trainer.train()
    shared.note(want, losses, stubs="; ".join(stubs) or "nothing")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
