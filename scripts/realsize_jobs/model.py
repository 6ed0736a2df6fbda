"""The state dict that every source is made of, its sizes, and what commands are to make of it.

Values are random, and each tensor is held flat and row-major by torch itself: that is the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

State = dict[str, object]
Flat = Mapping[str, object]
Tensors = Mapping[str, torch.Tensor]

LAYER = "model.layers.{n}."
EMBED, NORM, ROTARY = "model.embed_tokens.weight", "model.norm.weight", "model.rotary.table"
HUGE = "model.huge.weight"
QKV, GATE, UP = "self_attn.qkv_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"
DOWN = "mlp.down_proj.weight"
LORA_A, LORA_B = "mlp.down_proj.lora_A.default.weight", "mlp.down_proj.lora_B.default.weight"
LORA_RANK, LORA_ALPHA = 8, 16
EXTRA = ("extra.blob", "extra.step")
TRAINED = (EMBED, NORM)  # each a group of the optimizer

_BLOB = 68_000_000
_UNIT = 1_249_300  # bytes of a model of one unit


class Size(NamedTuple):
    """How large the model is: rows of matrices are multiples of ``unit``."""

    unit: int
    width: int = 2048
    layers: int = 1
    blob: int = _BLOB
    huge: bool = False


def of_gib(gib: float, *, huge: bool) -> Size:
    """About so many GiB. From 1.25 on, half of a matrix is larger than 64 MiB."""
    nbytes = int(gib * 2**30)
    blob = min(_BLOB, nbytes // 18)
    return Size(max(1, (nbytes - blob) // _UNIT), blob=blob, huge=huge)


MANY_TENSORS = Size(1, width=32, layers=3300, blob=100_000)
MANY_RANKS = Size(40, width=32, layers=4, blob=100_000)


def made(size: Size) -> State:
    """The model, AdamW's state of what was trained, and objects."""
    model = _model(size)
    state = {name: _moments(model[name]) for name in TRAINED}
    groups = [
        {"params": [name], "lr": 1e-3 / (1 + place), "betas": (0.9, 0.95), "weight_decay": 0.1}
        for place, name in enumerate(TRAINED)
    ]
    extra = {"blob": torch.randint(256, (size.blob,), dtype=torch.uint8).numpy().tobytes()}
    return {
        "model": model,
        "optim": {"state": state, "param_groups": groups},
        "extra": extra | {"step": 7},
    }


def _model(size: Size) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    unit, width = size.unit, size.width
    model = {EMBED: torch.randn(33 * unit + 1, width)}
    for n in range(size.layers):
        layer = LAYER.format(n=n)
        model[layer + QKV] = _half(33 * unit + 9, width)
        model[layer + GATE] = _half(17 * unit + 1, width)
        model[layer + UP] = _half(width, 17 * unit + 1).t()  # stored by columns
        model[layer + DOWN] = _half(width, 34 * unit + 2)
        # Eighths, whose products and sums float32 holds exactly in any order.
        model[layer + LORA_A] = torch.randint(-8, 8, (LORA_RANK, 34 * unit + 2)) / 8
        model[layer + LORA_B] = torch.randint(-8, 8, (width, LORA_RANK)) / 8
    model |= {NORM: torch.randn(width), ROTARY: torch.randn(3 * unit + 1, width)}
    if size.huge:
        model[HUGE] = _half(2 * 2**30 // width + 100_001, width)
    return model


def _half(rows: int, columns: int) -> torch.Tensor:
    """Random bfloat16, without a float32 copy of all of it."""
    return torch.empty(rows, columns, dtype=torch.bfloat16).normal_()


def _moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    first, second = torch.randn_like(weight), torch.rand_like(weight)
    return {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second}


def flat(state: State) -> dict[str, object]:
    """The leaves by the names that torch's DCP gives them."""
    return dict(flatten_state_dict(state)[0])


# ------------------------------------------------------------- what commands are to make of a model


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """All floating tensors in another type."""
    return {name: value.to(dtype) for name, value in tensors.items()}


def tied(tensors: Tensors) -> Tensors:
    """What --untie adds."""
    return {**tensors, "lm_head.weight": tensors[EMBED]}


MAP = """
name = "realsize"
keep_rest = true

[[rule]]
from = "model.layers.{n}.self_attn.qkv_proj.weight"
to = ["model.layers.{n}.q.weight", "model.layers.{n}.k.weight", "model.layers.{n}.v.weight"]

[[rule]]
from = ["model.layers.{n}.mlp.gate_proj.weight", "model.layers.{n}.mlp.up_proj.weight"]
to = "model.layers.{n}.mlp.gate_up_proj.weight"

[[rule]]
from = "model.layers.{n}.mlp.down_proj.weight"
to = ["model.layers.{n}.left.weight", "model.layers.{n}.right.weight"]
dim = 1
"""


def mapped(tensors: Tensors) -> Tensors:
    """What MAP makes: a matrix split by rows, two fused, one split by columns."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith(QKV):
            layer = name.removesuffix(QKV)
            rows = found.pop(name).chunk(3)
            found |= {
                f"{layer}{letter}.weight": part for letter, part in zip("qkv", rows, strict=True)
            }
            fused = torch.cat((found.pop(layer + GATE), found.pop(layer + UP)))
            found[f"{layer}mlp.gate_up_proj.weight"] = fused
            left, right = found.pop(layer + DOWN).chunk(2, dim=1)
            found |= {f"{layer}left.weight": left, f"{layer}right.weight": right}
    return found


def merged(tensors: Tensors) -> Tensors:
    """The base weights with LoRA's in them: in float32, then cast."""
    found = {name: value for name, value in tensors.items() if "lora_" not in name}
    for name in tensors:
        if name.endswith(LORA_A):
            layer = name.removesuffix(LORA_A)
            base, a, b = (tensors[layer + one] for one in (DOWN, LORA_A, LORA_B))
            product = (b @ a) * (LORA_ALPHA / LORA_RANK)
            found[layer + DOWN] = (base + product).to(base.dtype)
    return found
