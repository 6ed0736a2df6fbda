"""The Trainer of TorchTitan 0.3."""

from __future__ import annotations

from dataclasses import dataclass

import shared
import titan_rows
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

STUB = "attention is torch's, not flex, which must be compiled"


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


class Batches(titan_rows.Rows, BaseDataLoader):
    """Its loader."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: object) -> None:
        titan_rows.Rows.__init__(self, dp_world_size, dp_rank)


class Metrics(MetricsProcessor):
    """The loss that the Trainer logs, unrounded."""

    losses: list[float]

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, loss: float, *rest: object, **more: object) -> None:
        Metrics.losses.append(loss)


def trainer_of(want: shared.Asked, losses: list[float]) -> Trainer:
    Metrics.losses = losses
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        tokenizer=Words.Config(),
        dataloader=Batches.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_type="linear"),
        training=TrainingConfig(**titan_rows.training(), disable_cuda_graphs=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=Metrics.Config(log_freq=1),
        activation_checkpoint=None,
        dump_folder=titan_rows.dump_folder(want),
        checkpoint=CheckpointManager.Config(**titan_rows.checkpoint(want)),
    )
    return config.build()
