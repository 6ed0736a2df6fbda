"""The tiny models that parity trains, their data, and their loss: the same for FSDP1 and FSDP2.

Sizes are uneven on purpose: 11, 6 and 10 rows over 2 or 4 ranks leave short and empty shards.
"""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, WIDTH, HIDDEN, BATCH, LENGTH = 11, 6, 10, 8, 5


class Adapter(nn.Module):
    """A low-rank addition to a frozen linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.a = nn.Linear(inputs, 2, bias=False)
        self.b = nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the addition."""
        return self.b(self.a(x))


class Block(nn.Module):
    """A residual block; the unit that FSDP wraps."""

    def __init__(self, *, lora: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)
        self.adapter = Adapter(WIDTH, WIDTH) if lora else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give x and what the block adds."""
        inner = self.norm(x)
        added = self.fc2(torch.nn.functional.gelu(self.fc1(inner)))
        if self.adapter is not None:
            added = added + self.adapter(inner)
        return x + added


class Tiny(nn.Module):
    """Embedding, two blocks, a head; ``kind`` is plain, tied or lora."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(lora=kind == "lora") for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if kind == "tied":
            self.head.weight = self.emb.weight
        if kind == "lora":
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("adapter" in name)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each token."""
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def seeded(kind: str, *, seed: int = 7) -> Tiny:
    """The model with weights that depend on the seed alone."""
    torch.manual_seed(seed)
    return Tiny(kind)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of one step, of all ranks together."""
    source = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=source)
    return tokens, torch.randint(VOCABULARY, (BATCH, LENGTH), generator=source)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean loss of a part of the batch."""
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def groups(model: nn.Module, *, split: bool) -> list[dict[str, object]]:
    """Parameter groups: with weight decay and without, or one for all."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not split:
        return [{"params": [p for _, p in named]}]
    decayed = [p for name, p in named if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in named if not (name.endswith("weight") and "norm" not in name)]
    found: list[dict[str, object]] = [{"params": decayed, "weight_decay": 0.1}]
    return [*found, {"params": others, "weight_decay": 0.0, "lr": 0.005}] if others else found


def group_major_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The parameters' names in the order in which the optimizer numbers them."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
