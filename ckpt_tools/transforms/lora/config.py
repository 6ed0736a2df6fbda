"""What an adapter's configuration says: alpha above all, which no tensor tells.

It is read from PEFT's adapter_config.json, or any JSON object with `lora_alpha` (verl's
lora_train_meta.json); the rank is always the tensors' own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from ckpt_tools.errors import UnsupportedError, UsageError, reason_of
from ckpt_tools.transforms.lora import orientation
from ckpt_tools.transforms.lora.parts import AdapterParts

# Where PEFT, and verl, keep it.
_BESIDE = ("adapter_config.json", "lora_train_meta.json")
# What of PEFT's LoraConfig (0.21) changes nothing here: bookkeeping, which modules were trained
# (the tensors tell), how the factors began, and what only counts in training.
_UNDERSTOOD = frozenset(
    {"peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"}
    | {"revision", "inference_mode", "runtime_config", "target_modules", "exclude_modules"}
    | {"modules_to_save", "layers_to_transform", "layers_pattern", "init_lora_weights"}
    | {"loftq_config", "eva_config", "corda_config", "lora_ga_config"}
    | {"lora_dropout", "ensure_weight_tying", "megatron_core", "qalora_group_size"}
    | {"r", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "fan_in_fan_out"}
)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Alpha for all modules, exceptions by module pattern, and how alpha becomes a factor.

    ``transposed`` says whether square weights are (in, out), as those of transformers' Conv1D, None
    when nothing says it; ``asked`` whether a person did. ``said`` is the file's own content, None
    when only alpha was given.
    """

    alpha: float
    alphas: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    transposed: bool | None = None
    asked: bool = False
    said: Mapping[str, object] | None = field(default=None, repr=False)

    def scale(self, module: str, rank: int) -> float:
        """The factor of B·A for this module: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        pattern = _matching(module, list(self.alphas))
        alpha = self.alpha if pattern is None else self.alphas[pattern]
        return alpha / (sqrt(rank) if self.rslora else rank)


def read_config(path: str) -> LoraConfig:
    """The configuration in a JSON file.

    Raises UsageError when it cannot be read or has no alpha, UnsupportedError for another method
    than plain LoRA.
    """
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason_of(error)}.") from error
    if not isinstance(said, dict) or not _is_number(said.get("lora_alpha")):
        raise UsageError(f"{path} has no number `lora_alpha`.")
    refused = [
        f"{key} = {value!r}"
        for key, value in said.items()
        if key not in _UNDERSTOOD and value and (key, value) != ("bias", "none")
    ]
    if said.get("peft_type", "LORA") != "LORA":
        refused = [f"peft_type = {said['peft_type']!r}"]
    if "peft_type" not in said:  # another program's file, with settings of its own
        ours = ("use_", "lora_", "trainable_", "target_")
        refused = [one for one in refused if one.startswith(ours)]
    if refused:
        raise UnsupportedError(
            f"{path} is not plain LoRA, or is not supported here: {', '.join(refused)}.",
            hint="PEFT itself can merge or save it.",
        )
    patterns = said.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_is_number, patterns.values())):
        raise UsageError(f"{path}: `alpha_pattern` is not an object of numbers.")
    return LoraConfig(
        alpha=said["lora_alpha"],
        alphas=patterns,
        rslora=said.get("use_rslora") is True,
        transposed=bool(said["fan_in_fan_out"]) if "fan_in_fan_out" in said else None,
        said=said,
    )


def check_beside(config: LoraConfig, ckpt: str) -> None:
    """Raise UsageError when a configuration in the checkpoint's folder says more than alpha alone.

    Raises what `read_config` raises of that file.
    """
    folder = os.path.dirname(ckpt) or "." if os.path.isfile(ckpt) else ckpt
    for path in (os.path.join(folder, name) for name in _BESIDE):
        if not os.path.isfile(path):
            continue
        beside = read_config(path)
        said = [f"lora_alpha = {beside.alpha:g}"] if beside.alpha != config.alpha else []
        said += ["use_rslora = True"] if beside.rslora else []
        said += [f"alpha_pattern = {dict(beside.alphas)}"] if beside.alphas else []
        if said:
            raise UsageError(
                f"{path} says {', '.join(said)}; --lora-alpha {config.alpha:g} alone means this "
                "alpha divided by the rank, for all modules.",
                hint=f"--adapter-config {shlex.quote(path)} in place of --lora-alpha.",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _matching(module: str, patterns: Sequence[str]) -> str | None:
    """The first pattern for a module, as PEFT looks for it: at the end, from a dot on."""
    for text in patterns:
        try:
            if re.fullmatch(rf"(.*\.)?({text})", module):
                return text
        except re.error as error:
            raise UsageError(f"The pattern {text!r} cannot be read: {error}.") from error
    return None


def check_ranks(config: LoraConfig, parts: AdapterParts) -> None:
    """Raise UsageError when the configuration says other ranks than the tensors have.

    Also for alpha alone where modules have different ranks: no tensor says what alphas they have
    then, and whether rsLoRA divides by the root of the rank.
    """
    said = config.said
    ranks = {one.rank for one in parts.factors}
    if said is None and len(ranks) > 1:
        raise UsageError(
            f"The modules have ranks {', '.join(map(str, sorted(ranks)))} (PEFT's rank_pattern), "
            "and --lora-alpha alone does not say whether alphas differ, too (alpha_pattern), or "
            "are divided by the root of the rank (use_rslora).",
            hint="--adapter-config FILE, the job's adapter_config.json. When it is one alpha "
            'divided by each rank, a file with {"lora_alpha": ALPHA} says so.',
        )
    if said is None:
        return
    usual, patterns = said.get("r"), said.get("rank_pattern") or {}
    if usual is None or not isinstance(patterns, dict):
        return
    for one in parts.factors:
        pattern = _matching(one.module, list(patterns))
        wanted = usual if pattern is None else patterns[pattern]
        if wanted != one.rank:
            raise UsageError(
                f"{one.module}: the configuration says rank {wanted}, its tensors have {one.rank}.",
                hint="It is of another adapter; give the one that this job was trained with.",
            )


def content_of(config: LoraConfig, parts: AdapterParts) -> bytes:
    """The adapter_config.json to write: the given one, or one with only what is known."""
    said = dict(config.said or {})
    if "peft_type" not in said:
        ranks = {one.module: one.rank for one in parts.factors}
        usual = Counter(ranks.values()).most_common(1)[0][0]
        last = {module.rpartition(".")[2] for module in ranks}
        modules = {name.rpartition(".")[0] for name in parts.base}
        others = {module for module in modules - ranks.keys() if module.rpartition(".")[2] in last}
        saved = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in parts.saved})
        said = {
            "peft_type": "LORA",
            "task_type": said.get("task_type"),
            "base_model_name_or_path": said.get("base_model_name_or_path"),
            "r": usual,
            "lora_alpha": int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
            # The last parts of the names, where they mean these modules and no other.
            "target_modules": sorted(ranks if others or not modules else last),
            "modules_to_save": saved or None,
            "rank_pattern": {
                f"^{re.escape(m)}": rank for m, rank in ranks.items() if rank != usual
            },
            "alpha_pattern": dict(config.alphas),
            "use_rslora": config.rslora,
            "use_dora": False,
            "fan_in_fan_out": orientation.is_transposed(parts, said=config.transposed),
            "bias": "none",
            "lora_dropout": 0.0,
            "inference_mode": True,
        }
    return json.dumps(said, indent=2, sort_keys=True).encode() + b"\n"
