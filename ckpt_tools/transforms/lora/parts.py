"""Which entries of a checkpoint are LoRA's, which are the base model's, by PEFT's names.

PEFT wraps a module into a layer with `base_layer`, `lora_A.<adapter>` and `lora_B.<adapter>`, and a
module that is trained whole into `original_module` and `modules_to_save.<adapter>`. Whatever else
PEFT puts there (tokens trained alone, other methods, parameters that are no weight) is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.core.index import TensorEntry
from ckpt_tools.errors import AnswerNo, UnsupportedError, UsageError
from ckpt_tools.transforms.base import TransformedTensor

PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_|)(?P<side>[AB])(?:\.(?P<adapter>(?!weight$)[^.]+))?"
    r"(?P<rest>\.weight|)"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_ORIGINAL = re.compile(r"(?P<module>.+)\.original_module\.(?P<rest>.+)")
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.(?P<rest>.+)")
# What other methods of PEFT call their parameters (its PEFT_TYPE_TO_PREFIX_MAPPING, 0.21).
_OTHER = re.compile(
    r".*\.((\w*lora|p?vera|hada|lokr|ia3|b?oft|hra|fourierft|waveft|trainable_tokens|shira|adamss"
    r"|psoft|c3a|miss)_\w+|token_adapter)(\..+)?"
)


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of one module: ``a`` is (r, in), ``b`` is (out, r), or an embedding's."""

    module: str
    a: TransformedTensor
    b: TransformedTensor
    embedding: bool

    @property
    def rank(self) -> int:
        """The rank r. Raises UnsupportedError when the shapes are no two factors."""
        a, b = self.a.entry, self.b.entry
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise UnsupportedError(
                f"{self.module}: LoRA factors of {list(a.shape)} and {list(b.shape)} are no "
                "matrices of one rank; convolutions are not supported."
            )
        return a.shape[0]


@dataclass(slots=True)
class AdapterParts:
    """The entries of one adapter and of the base model, under the base model's own names.

    ``saved`` are modules that were trained whole, ``base`` all weights of the base model,
    ``replaced`` those of them that ``saved`` takes the place of, which are not in ``base``.
    """

    adapter: str | None
    factors: list[Factors] = field(default_factory=list)
    saved: dict[str, TransformedTensor] = field(default_factory=dict)
    base: dict[str, TransformedTensor] = field(default_factory=dict)
    replaced: dict[str, TransformedTensor] = field(default_factory=dict)


def parts_of(made: Sequence[TransformedTensor], adapter: str | None) -> AdapterParts:
    """Sort the entries; ``adapter`` names one of several adapters.

    Raises AnswerNo when there is no LoRA, UsageError when several adapters leave a choice, and
    UnsupportedError for weights of another kind of adapter.
    """
    factors, rest = _factors(made)
    saved = (_SAVED.fullmatch(one.entry.fqn) for one in rest)
    adapters = {match["adapter"] for match in saved if match is not None}
    name = _chosen({adapter for _, adapter in factors} | adapters, adapter)
    parts = AdapterParts(name)
    sides: dict[tuple[str, bool], dict[str, TransformedTensor]] = {}
    for (factor, of), one in factors.items():
        if of == name:
            sides.setdefault((factor.module, factor.embedding), {})[factor.side] = one
    for (module, embedding), both in sorted(sides.items()):
        if both.keys() != {"A", "B"}:
            raise UnsupportedError(f"{module}: of the factors A and B only {min(both)} is there.")
        parts.factors.append(Factors(module, both["A"], both["B"], embedding))
    _refuse_others(rest, factors)
    for one in rest:
        _put(parts, one)
    if name is None and not any(_BASE.fullmatch(one.entry.fqn) for one in rest):
        # Names as in PEFT's own folders: there is no base, and what is no factor was trained whole.
        parts.saved, parts.base = {**parts.base, **parts.saved}, {}
    return parts


@dataclass(frozen=True, slots=True)
class _Factor:
    module: str
    side: str
    embedding: bool


def _factors(
    made: Sequence[TransformedTensor],
) -> tuple[dict[tuple[_Factor, str | None], TransformedTensor], list[TransformedTensor]]:
    """The LoRA factors by what they are and whose, and all other entries."""
    factors: dict[tuple[_Factor, str | None], TransformedTensor] = {}
    rest: list[TransformedTensor] = []
    for one in made:
        name = one.entry.fqn
        match = _FACTOR.fullmatch(name)
        if match is not None:
            factor = _Factor(_bare(match["module"]), match["side"], bool(match["kind"]))
            factors[factor, match["adapter"]] = one
        elif _OTHER.fullmatch(name):
            raise _not_understood(name)
        else:
            rest.append(one)
    if not factors:
        raise AnswerNo("There are no LoRA weights (lora_A, lora_B) among the chosen tensors.")
    return factors, rest


def _refuse_others(
    rest: Sequence[TransformedTensor],
    factors: Mapping[tuple[_Factor, str | None], TransformedTensor],
) -> None:
    """Raise UnsupportedError for what PEFT put into a checkpoint and is not understood here.

    In a layer of PEFT's stand its base layer and the factors; beside its model stands nothing.
    """
    layers: dict[str, list[TensorEntry]] = defaultdict(list)
    for one in rest:
        match = _BASE.fullmatch(one.entry.fqn)
        if match is not None:
            layers[match["module"]].append(one.entry)
    inside = any(one.entry.fqn.startswith(PREFIX) for one in factors.values())
    for one in rest:
        name = one.entry.fqn
        parents = [name[:place] for place, letter in enumerate(name) if letter == "."]
        layer = next((parent for parent in parents if parent in layers), None)
        known = layer is None or name.startswith(f"{layer}.base_layer.")
        nested = name.split(".").count("base_layer") > 1
        if not known or nested or (inside and not name.startswith(PREFIX)):
            raise _not_understood(name)
    for factor, _ in factors:
        own = layers.get(factor.module, layers.get(PREFIX + factor.module, []))
        if own and not any(
            e.dtype.kind != "float" or e.fqn.endswith(".base_layer.weight") for e in own
        ):
            raise _not_understood(own[0].fqn)


def _not_understood(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is not plain LoRA: of PEFT only lora_A and lora_B of linear layers and "
        "embeddings, and modules_to_save, are understood.",
        hint="PEFT itself can merge or save it. --exclude leaves out what is not the model's.",
    )


def _chosen(names: set[str | None], asked: str | None) -> str | None:
    """The adapter that is meant. Raises UsageError."""
    if asked is None and len(names) == 1:
        return names.pop()
    shown = ", ".join(sorted(name or "(without a name)" for name in names))
    if asked in names and asked is not None:
        return asked
    if asked is None:
        raise UsageError(
            f"There are {len(names)} adapters: {shown}.", hint="Choose with --adapter-name NAME."
        )
    raise UsageError(f"There is no adapter {asked!r}; there are: {shown}.")


def _put(parts: AdapterParts, one: TransformedTensor) -> None:
    """Put an entry that is no factor where it belongs."""
    name = one.entry.fqn
    for pattern, place in ((_SAVED, parts.saved), (_ORIGINAL, parts.replaced)):
        match = pattern.fullmatch(name)
        if match is not None:
            if place is parts.replaced or match["adapter"] == parts.adapter:
                place[_bare(f"{match['module']}.{match['rest']}")] = one
            return
    match = _BASE.fullmatch(name)
    parts.base[_bare(f"{match['module']}.{match['rest']}" if match else name)] = one


def _bare(name: str) -> str:
    """The name in the base model."""
    return name.removeprefix(PREFIX)
