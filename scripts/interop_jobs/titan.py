"""TorchTitan's Trainer: its own loop and CheckpointManager, a Llama 3 with two small layers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace

import shared
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

STUB = (
    "the device is the CPU, with no memory monitor and no shorter timeouts (it takes accelerators "
    "only); gradients are summed without a factor, which gloo has not; "
)
SDPA = "attention is torch's, not flex, which must be compiled"


def stub_device() -> None:
    """Let it take the CPU for its accelerator. Before it is imported."""
    torch._utils._get_available_device_type = lambda: "cpu"  # noqa: SLF001
    torch.cpu.get_device_name = lambda *_: "CPU"
    torch.cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 30, name="CPU")
    torch.cpu.memory_stats = lambda *_: {}
    for name in ("reset_peak_memory_stats", "empty_cache"):
        setattr(torch.cpu, name, lambda *_: None)


DEVICE = shared.device()
if DEVICE.type == "cpu":
    stub_device()

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class Words(BaseTokenizer):
    """No text is read: the loader gives tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: object) -> None:
        super().__init__()

    def encode(self, *_: object, **__: object) -> list[int]:
        return []

    def decode(self, *_: object, **__: object) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return shared.VOCAB


class Batches(BaseDataLoader):
    """The rows of this rank; its position is one for any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: object) -> None:
        self.world, self.rank, self.step = dp_world_size, dp_rank, 0

    def __iter__(self) -> object:
        while True:
            tokens = shared.batch(self.step).tensor_split(self.world)[self.rank]
            self.step += 1
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


LOSSES: list[float] = []


class Metrics(MetricsProcessor):
    """The loss that the Trainer logs, unrounded."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, loss: float, *rest: object, **more: object) -> None:
        LOSSES.append(loss)


def main() -> None:
    want = shared.asked()
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    ranks = int(os.environ["WORLD_SIZE"])
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        tokenizer=Words.Config(),
        dataloader=Batches.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_type="linear"),
        training=TrainingConfig(
            local_batch_size=shared.ROWS // ranks,
            seq_len=shared.LENGTH - 1,
            steps=2 * shared.STEPS,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=Metrics.Config(log_freq=1),
        activation_checkpoint=None,
        dump_folder=want.saved if want.is_new else os.path.join(want.folder, f"{want.name}.titan"),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=shared.STEPS,
            last_save_model_only=False,
            load_only=not want.is_new,
            initial_load_path=want.ckpt or None,
            initial_load_model_only=False,
        ),
    )
    trainer = config.build()
    if DEVICE.type == "cpu":
        dist_utils.set_pg_timeouts = lambda **_: None
        for module in trainer.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    trainer.train()
    shared.note(want, LOSSES, stubs=STUB + SDPA if DEVICE.type == "cpu" else SDPA)
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
