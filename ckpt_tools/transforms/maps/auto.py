"""Chooses a built-in map by the names alone, and only when they leave no doubt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms.base import TransformedTensor, TransformResult
from ckpt_tools.transforms.maps.apply import apply, knows_all
from ckpt_tools.transforms.maps.toml import builtin_names, builtins_to_hf

_ON_HUB = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class AutoMapTransform:
    """Applies the one built-in map to Hugging Face's names that knows every name."""

    values: Mapping[str, int]
    model_type: str | None = None

    def __call__(self, made: tuple[TransformedTensor, ...], files: Files) -> TransformResult:  # noqa: ARG002 (a step's signature)
        """Choose and apply a map, or none when the names are Hugging Face's already.

        Raises UsageError when no map, or more than one, knows all names, and what `apply` raises.
        """
        names = [one.entry.fqn for one in made]
        known = [one for one in builtins_to_hf() if not one.keeps_rest and knows_all(one, names)]
        if len(known) == 1:
            outcome = apply(known[0], made, values=self.values, model_type=self.model_type)
            chosen = f"--map auto chose {known[0].name}: the only map that knows all names."
            return outcome._replace(notes=(chosen, *outcome.notes))
        if _ON_HUB in names and not known:
            return TransformResult(made, ("--map auto: the names are Hugging Face's already.",))
        fitting = ", ".join(one.name for one in known) or "no built-in map"
        raise UsageError(
            f"--map auto is not certain: {fitting} would fit all {len(names)} names.",
            hint=f"Name the map: {', '.join(builtin_names())}, or a file of your own.",
        )
