"""Which entries of a checkpoint are LoRA's, which are the base model's, by PEFT's names.

PEFT wraps a module into a layer with `base_layer`, `lora_A.<adapter>` and `lora_B.<adapter>`, and a
module that is trained whole into `original_module` and `modules_to_save.<adapter>`. Whatever else
PEFT puts there (tokens trained alone, other methods, parameters that are no weight) is refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.core import names
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import AnswerNo, UnsupportedError, UsageError
from ckpt_tools.transforms.base import TransformedTensor

PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>embedding_|)(?P<side>[AB])(?:\.(?P<adapter>(?!weight$)[^.]+))?"
    r"(?P<rest>\.weight|)"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_ORIGINAL = re.compile(r".+\.original_module\..+")
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.(?P<rest>.+)")
# What other methods of PEFT call their parameters (its PEFT_TYPE_TO_PREFIX_MAPPING, 0.21).
_OTHER = re.compile(
    r"(?P<module>.*)\.((\w*lora|p?vera|hada|lokr|ia3|b?oft|hra|fourierft|waveft|trainable_tokens"
    r"|shira|adamss|psoft|c3a|miss)_\w+|token_adapter)(\.(?P<adapter>[^.]+).*)?"
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

    ``saved`` are modules that were trained whole, ``base`` all weights of the base model but for
    those whose place ``saved`` takes.
    """

    adapter: str | None
    factors: list[Factors] = field(default_factory=list)
    saved: dict[str, TransformedTensor] = field(default_factory=dict)
    base: dict[str, TransformedTensor] = field(default_factory=dict)


def parts_of(made: Sequence[TransformedTensor], adapter: str | None) -> AdapterParts:
    """Sort the entries; ``adapter`` names one of several adapters.

    Raises AnswerNo when there is no LoRA, UsageError when several adapters leave a choice, and
    UnsupportedError for weights of another kind of adapter.
    """
    factors, rest = _factors(made)
    name = _chosen(_adapters(one.entry.fqn for one in made), adapter)
    parts = AdapterParts(name)
    own = {of[:2]: sides for of, sides in factors.items() if of[2] == name}
    for (module, embedding), sides in sorted(own.items()):
        if sides.keys() != {"A", "B"}:
            raise UnsupportedError(f"{module}: of the factors A and B only {min(sides)} is there.")
        parts.factors.append(Factors(module, sides["A"], sides["B"], embedding))
    _refuse_others(rest, factors)
    for one in rest:
        fqn = one.entry.fqn
        saved, base = _SAVED.fullmatch(fqn), _BASE.fullmatch(fqn)
        if saved is not None and saved["adapter"] == name:
            parts.saved[f"{saved['module']}.{saved['rest']}".removeprefix(PREFIX)] = one
        elif saved is None and not _ORIGINAL.fullmatch(fqn):
            name_in_base = f"{base['module']}.{base['rest']}" if base else fqn
            parts.base[name_in_base.removeprefix(PREFIX)] = one
    if name is None and not any(_BASE.fullmatch(one.entry.fqn) for one in rest):
        # Names as in PEFT's own folders: there is no base, and what is no factor was trained whole.
        parts.saved, parts.base = {**parts.base, **parts.saved}, {}
    return parts


def refuse_split(index: CheckpointIndex, chosen: CheckpointIndex, adapter: str | None) -> None:
    """Raise UsageError when filters leave out what the adapter adds to a module that they keep.

    What is made without it (a merge without DoRA's magnitudes, a base weight without its factors)
    is not the trained model. Whole modules may be left out, and other adapters.
    """
    clean = {e.fqn: names.clean(e.fqn) for e in index.tensors if e.section == "model"}
    kept = {clean[entry.fqn] for entry in chosen.tensors if entry.fqn in clean}
    modules = {parent.replace(PREFIX, "", 1) for name in kept for parent in _parents(name)}
    layers = {match["module"] for name in clean.values() if (match := _BASE.fullmatch(name))}
    others = _adapters(clean.values()) - (_adapters(kept) if adapter is None else {adapter})
    split = []
    for fqn, name in clean.items():
        module: str | None
        match = _FACTOR.fullmatch(name) or _SAVED.fullmatch(name) or _OTHER.fullmatch(name)
        if match is not None:
            module, of = match["module"], match["adapter"]
        else:
            module, of = _layer_of(name, layers), name.rpartition(".")[2]
        if name in kept or module is None or of in others:
            continue
        if module.replace(PREFIX, "", 1) in modules:
            split.append(fqn)
    if split:
        raise UsageError(
            f"The filters leave out {counted(len(split), 'tensor')} of the LoRA adapter, and keep "
            f"their modules: {some(split)}.",
            hint="That would not be the trained model. Leave out whole modules, or nothing of "
            "them. PEFT itself can merge or save what is not plain LoRA.",
        )


def _adapters(clean: Iterable[str]) -> set[str | None]:
    """The names of the adapters that these tensors are of."""
    matches = (_FACTOR.fullmatch(name) or _SAVED.fullmatch(name) for name in clean)
    return {match["adapter"] for match in matches if match is not None}


def _layer_of(name: str, layers: Collection[str]) -> str | None:
    """The layer of PEFT's that a tensor stands in beside the base layer; None for all others."""
    layer = next((parent for parent in _parents(name) if parent in layers), None)
    return None if layer is None or name.startswith(f"{layer}.base_layer.") else layer


def _parents(name: str) -> list[str]:
    """What stands before each dot of a name, from the shortest on."""
    return [name[:place] for place, letter in enumerate(name) if letter == "."]


# The factors A and B by module, whether it is an embedding, and adapter.
_Sides = Mapping[tuple[str, bool, str | None], Mapping[str, TransformedTensor]]


def _factors(made: Sequence[TransformedTensor]) -> tuple[_Sides, list[TransformedTensor]]:
    """The LoRA factors by what they are and whose, and all other entries."""
    factors: dict[tuple[str, bool, str | None], dict[str, TransformedTensor]] = defaultdict(dict)
    rest: list[TransformedTensor] = []
    for one in made:
        name = one.entry.fqn
        match = _FACTOR.fullmatch(name)
        if match is not None:
            of = match["module"].removeprefix(PREFIX), bool(match["kind"]), match["adapter"]
            factors[of][match["side"]] = one
        elif _OTHER.fullmatch(name):
            raise _not_understood(name)
        else:
            rest.append(one)
    if not factors:
        raise AnswerNo("There are no LoRA weights (lora_A, lora_B) among the chosen tensors.")
    return factors, rest


def _refuse_others(rest: Sequence[TransformedTensor], factors: _Sides) -> None:
    """Raise UnsupportedError for what PEFT put into a checkpoint and is not understood here.

    In a layer of PEFT's stand its base layer and the factors; beside its model stands nothing.
    """
    layers: dict[str, list[TensorEntry]] = defaultdict(list)
    for one in rest:
        match = _BASE.fullmatch(one.entry.fqn)
        if match is not None:
            layers[match["module"]].append(one.entry)
    every = (one for sides in factors.values() for one in sides.values())
    inside = any(one.entry.fqn.startswith(PREFIX) for one in every)
    for one in rest:
        name = one.entry.fqn
        nested = name.split(".").count("base_layer") > 1
        if nested or _layer_of(name, layers) is not None:
            raise _not_understood(name)
        if inside and not name.startswith(PREFIX):
            raise _not_understood(name, " --exclude leaves out what is not of this model at all.")
    for module, *_ in factors:
        own = layers.get(module, layers.get(PREFIX + module, []))
        if own and not any(
            e.dtype.kind != "float" or e.fqn.endswith(".base_layer.weight") for e in own
        ):
            raise _not_understood(own[0].fqn)


def _not_understood(name: str, more: str = "") -> UnsupportedError:
    return UnsupportedError(
        f"{name} is not plain LoRA: of PEFT only lora_A and lora_B of linear layers and "
        "embeddings, and modules_to_save, are understood.",
        hint=f"PEFT itself can merge or save it.{more}",
    )


def _chosen(adapters: set[str | None], asked: str | None) -> str | None:
    """The adapter that is meant. Raises UsageError."""
    if asked is None and len(adapters) == 1:
        return adapters.pop()
    shown = ", ".join(sorted(name or "(without a name)" for name in adapters))
    if asked in adapters and asked is not None:
        return asked
    if asked is None:
        raise UsageError(
            f"There are {len(adapters)} adapters: {shown}.", hint="Choose with --adapter-name NAME."
        )
    raise UsageError(f"There is no adapter {asked!r}; there are: {shown}.")
