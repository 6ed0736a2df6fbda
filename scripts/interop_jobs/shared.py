"""What every job of interop trains: one tiny model, the same batches on any number of ranks.

A job is called as `JOB.py train|resume SIDE FOLDER [CKPT NAME]` by torchrun. `train` takes STEPS
steps, saves to FOLDER/saved by its framework's own call, and goes on to FOLDER/truth.json; `resume`
loads CKPT by the framework's own call, and goes on to FOLDER/NAME.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

STEPS = 3  # before the checkpoint, and after it
ROWS, LENGTH, VOCAB, WIDTH = 12, 10, 61, 20
WIDE = 2102  # matrices of 33 MiB, of which half is above 16
LR = 1e-2


class Asked(NamedTuple):
    """What the command line asks of a job: ``side`` is fsdp1 or fsdp2, and a form of saving."""

    verb: str
    side: str
    folder: str
    ckpt: str
    name: str

    @property
    def saved(self) -> str:
        """Where `train` saves."""
        return os.path.join(self.folder, "saved")

    @property
    def is_new(self) -> bool:
        """Whether nothing is loaded."""
        return self.verb == "train"


def asked() -> Asked:
    """The command line of a job. Sets what every framework would ask for by itself."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Asked(*sys.argv[1:4], *(sys.argv[4:] or ("", "truth")))


def device() -> torch.device:
    """This rank's GPU, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


class Block(nn.Module):
    """One layer; its sizes divide by no number of ranks above 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width + 1)
        self.fc2 = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(functional.gelu(self.fc1(self.norm(x))))


class Tiny(nn.Module):
    """Token by token; there is nothing in it that FSDP would treat in another way."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> Tensor:
    """The tokens of one step, for all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(VOCAB, (ROWS, LENGTH), generator=generator)


def part(tokens: Tensor) -> Tensor:
    """This rank's rows."""
    return tokens.tensor_split(dist.get_world_size())[dist.get_rank()]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss of the next tokens."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def mean(loss: Tensor) -> float:
    """A loss over all ranks, which have as many rows each."""
    found = loss.detach().clone()
    dist.all_reduce(found)
    return found.item() / dist.get_world_size()


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Two parameter groups, as most jobs have them: biases and norms do not decay."""
    named = list(model.named_parameters())
    flat = [p for name, p in named if name.endswith("bias") or "norm" in name]
    rest = [p for name, p in named if not (name.endswith("bias") or "norm" in name)]
    return [{"params": rest, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]


def schedule(step: int) -> float:
    """A learning rate that is another one at every step."""
    return 1 / (1 + step)


def note(want: Asked, losses: Sequence[float], *, stubs: str = "nothing") -> None:
    """Write down the losses after the checkpoint, and what was stubbed.

    A job that resumes has no others: one that loaded nothing would begin at step 0, and come to
    the same losses in the end.
    """
    after = losses[STEPS:] if want.is_new else losses
    if dist.get_rank() == 0:
        with open(os.path.join(want.folder, f"{want.name}.json"), "w") as file:
            json.dump({"losses": list(after), "stubs": stubs}, file)
    dist.barrier()
