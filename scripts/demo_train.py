"""The demo's training job: a tiny Llama-shaped model under FSDP2, saved as a DCP directory.

    torchrun --standalone --nproc-per-node 4 scripts/demo_train.py CHECKPOINT TRAINED.json

A plain torch program that knows nothing of ckpt-tools: it is the witness. Beside the checkpoint it
writes the dtype, shape and SHA-256 of every whole tensor, gathered by torch itself. The sizes are
uneven on purpose: no rank holds the same number of rows, and one holds none of some tensors.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

VOCAB, DIM, HIDDEN, BLOCKS = 103, 24, 43, 2
HEADS, KV_HEADS, HEAD_DIM = 3, 1, 5
STEPS, BATCH, LENGTH = 3, 2, 16


class Attention(nn.Module):
    """Causal attention whose query heads share key and value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, DIM) to the same shape."""
        q, k, v = (
            project(hidden).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (kv.repeat_interleave(HEADS // KV_HEADS, dim=1) for kv in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.up_proj = nn.Linear(DIM, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, DIM) to the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(DIM)
        self.self_attn = Attention()
        self.post_attention_layernorm = nn.RMSNorm(DIM)
        self.mlp = FeedForward()

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, length, DIM) to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class TinyLlama(nn.Module):
    """The decoder and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(DIM)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) token ids to (batch, length, VOCAB) logits."""
        hidden = self.embed_tokens(tokens)
        for block in self.layers:
            hidden = block(hidden)
        return self.lm_head(self.norm(hidden))


def sharded_model(mesh: DeviceMesh) -> TinyLlama:
    """The model, made without memory, cut over `mesh`, then filled: alike on any world size."""
    with torch.device("meta"):
        model = TinyLlama()
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    same_everywhere = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=same_everywhere) * 0.1
            if parameter.ndim == 1:
                whole += 1  # a norm's weight
            parameter.copy_(distribute_tensor(whole, mesh, parameter.placements))
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """AdamW in two groups: matrices decay, norms do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """STEPS steps on random tokens, other ones on each rank."""
    own = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=own)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.4f} on rank 0")


def testimony(state: dict[str, object]) -> dict[str, dict[str, object]]:
    """What each tensor of `state` is as a whole; every rank must ask, since all gather it."""
    said: dict[str, dict[str, object]] = {}
    for fqn, value in state.items():
        if not isinstance(value, DTensor):
            raise TypeError(f"{fqn}: expected a DTensor, found {type(value).__name__}")
        whole = value.full_tensor().contiguous()
        raw = whole.view(torch.uint8).numpy().tobytes()
        said[fqn] = {
            "dtype": str(whole.dtype).removeprefix("torch."),
            "shape": list(whole.shape),
            "sha256": hashlib.sha256(raw).hexdigest(),
        }
    return said


def main(checkpoint: str, trained: str) -> None:
    """Trains, saves the checkpoint, and testifies."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = sharded_model(mesh)
    optimizer = adamw(model)
    train(model, optimizer)
    state = get_model_state_dict(model)
    optim = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim, "step": STEPS}, checkpoint_id=checkpoint)
    said = testimony(state)
    if dist.get_rank() == 0:
        Path(trained).write_text(json.dumps(said, indent=1) + "\n")
        print(f"saved {checkpoint}: {len(said)} tensors of the model, AdamW, step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
