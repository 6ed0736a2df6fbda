"""Which base weights are (in, out), not (out, in): those of transformers' Conv1D, as in GPT-2.

PEFT asks the module's class, which no checkpoint has. The shape tells, unless a weight is square:
then others of its kind do, or the configuration (`fan_in_fan_out`), or it must be asked for.
"""

from __future__ import annotations

import re

from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.lora.parts import AdapterParts, Factors

# What Conv1D layers are called: in transformers 5 no other names, but other models have linear
# layers under these.
_CONV1D = re.compile(r"(.+\.)?(c_attn|c_proj|c_fc|q_attn)")
# Linear layers in every model of transformers 5 that has them.
_LINEAR = re.compile(
    r"(.+\.)?(([qkvo]|qkv|in|out|gate|up|down|gate_up)_proj|query|key|value|query_key_value|lm_head"
    r"|to_[qkv]|w[qkvo123])"
)


def transposed(parts: AdapterParts, *, said: bool | None, asked: bool) -> frozenset[str]:
    """The modules whose base weight is (in, out).

    ``said`` is what the configuration, or a person who was ``asked``, says of square weights.
    Raises UsageError for square weights that may be either, or of which the configuration says
    other than the weights beside them.
    """
    modules, open_ones = set(), []
    elsewhere = _ways_elsewhere(parts)
    for factors in parts.factors:
        ways = _ways(factors, parts)
        beside = elsewhere[_is_conv1d(factors.module)]
        if len(ways) > 1 and asked:
            ways = {said is True}
        elif len(ways) > 1 and said is not None:
            ways = {said, *beside} if len(beside) == 1 else {said}
        elif len(ways) > 1 and len(beside) == 1:
            ways = beside
        elif len(ways) > 1 and not beside and _LINEAR.fullmatch(factors.module):
            ways = {False}
        if len(ways) > 1:
            open_ones.append(factors.module)
        elif ways == {True}:
            modules.add(factors.module)
    if open_ones:
        raise UsageError(
            f"Square weights with LoRA ({len(open_ones)}): neither shape nor config says whether "
            f"they are (out, in) or (in, out): {', '.join(sorted(open_ones)[:5])}.",
            hint="--lora-fan-in-fan-out no for linear layers, yes for transformers' Conv1D (GPT-2)."
            " PEFT's adapter_config.json says it too; where the other weights say otherwise, ask "
            "the model.",
        )
    return frozenset(modules)


def is_transposed(parts: AdapterParts, *, said: bool | None) -> bool:
    """The value for a new configuration; PEFT itself corrects it by the module's class."""
    seen = set().union(*_ways_elsewhere(parts).values())
    return seen == {True} if said is None else said


def _ways(factors: Factors, parts: AdapterParts) -> set[bool]:
    """Whether a module's base weight may be (in, out), by its shape: both when it is square."""
    made = parts.base.get(f"{factors.module}.weight")
    if factors.embedding or made is None:
        return {False}
    fits = (factors.b.entry.shape[0], factors.a.entry.shape[1]) if factors.rank else ()
    return {way for way in (False, True) if made.entry.shape == (fits[::-1] if way else fits)}


def _ways_elsewhere(parts: AdapterParts) -> dict[bool, set[bool]]:
    """The orientations of other weights, by factors or biases: of names of Conv1D and of others."""
    elsewhere: dict[bool, set[bool]] = {True: set(), False: set()}
    for factors in parts.factors:
        ways = _ways(factors, parts)
        if len(ways) == 1 and not factors.embedding:
            elsewhere[_is_conv1d(factors.module)] |= ways
    for name, one in parts.base.items():
        module, _, leaf = name.rpartition(".")
        shape, bias = one.entry.shape, parts.base.get(f"{module}.bias")
        if leaf != "weight" or bias is None or len(shape) != 2 or shape[0] == shape[1]:
            continue
        if bias.entry.shape in ((shape[0],), (shape[1],)):
            elsewhere[_is_conv1d(module)].add(bias.entry.shape == (shape[1],))
    return elsewhere


def _is_conv1d(module: str) -> bool:
    return _CONV1D.fullmatch(module) is not None
