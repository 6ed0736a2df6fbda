"""The Trainer of TorchTitan 0.2, whose parts are given by functions of one JobConfig."""

from __future__ import annotations

from dataclasses import replace

import shared
import titan_rows
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig
from torchtitan.config.job_config import (
    ActivationCheckpoint,
    Checkpoint,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Training,
)
from torchtitan.models.llama3 import get_train_spec
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec
from torchtitan.train import Trainer

STUB = ""


def spec_of(losses: list[float]) -> TrainSpec:
    """Its Llama 3 with two layers, our rows, and the losses noted unrounded."""

    class Noting(MetricsProcessor):
        def log(self, step: int, loss: float, *rest: object, **more: object) -> None:
            losses.append(float(loss))

    def loader(*, dp_world_size: int, dp_rank: int, **_: object) -> titan_rows.Rows:
        return titan_rows.Rows(dp_world_size, dp_rank)

    known = get_train_spec()
    return replace(
        known,
        model_args={"two": replace(known.model_args["debugmodel"], n_layers=2)},
        build_tokenizer_fn=None,
        build_dataloader_fn=loader,
        build_metrics_processor_fn=lambda config, dims, _: Noting(config, dims),
    )


def trainer_of(want: shared.Asked, losses: list[float]) -> Trainer:
    register_train_spec("interop", spec_of(losses))
    config = JobConfig(
        job=Job(dump_folder=titan_rows.dump_folder(want)),
        model=Model(name="interop", flavor="two"),
        optimizer=Optimizer(lr=1e-3),
        lr_scheduler=LRScheduler(warmup_steps=2, decay_type="linear"),
        training=Training(**titan_rows.training()),
        metrics=Metrics(log_freq=1),
        activation_checkpoint=ActivationCheckpoint(mode="none"),
        checkpoint=Checkpoint(**titan_rows.checkpoint(want)),
    )
    return Trainer(config)
