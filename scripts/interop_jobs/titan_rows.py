"""The batches of TorchTitan's jobs, and what they are told about them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import shared
import torch


class Rows:
    """The rows of this rank; its position is one for any number of ranks."""

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank, self.step = world, rank, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = shared.batch(self.step).tensor_split(self.world)[self.rank]
            self.step += 1
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def training() -> dict[str, object]:
    """Options of a training that both generations have."""
    return {
        "local_batch_size": shared.ROWS // int(os.environ["WORLD_SIZE"]),
        "seq_len": shared.LENGTH,  # of which 0.2 wants two halves; one token less is taken
        "steps": 2 * shared.STEPS,
        "mixed_precision_param": "float32",
    }


def checkpoint(want: shared.Asked) -> dict[str, object]:
    """Options of a checkpoint that both generations have."""
    return {
        "enable": True,
        "interval": shared.STEPS,
        "last_save_model_only": False,
        "load_only": not want.is_new,
        "initial_load_path": want.ckpt or None,
        "initial_load_model_only": False,
    }


def dump_folder(want: shared.Asked) -> str:
    """Where it writes: beside the others, if it only goes on."""
    return want.saved if want.is_new else os.path.join(want.folder, f"{want.name}.titan")
