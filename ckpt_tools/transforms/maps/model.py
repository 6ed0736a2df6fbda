"""What a map says: which names become which, and what happens to the tensors on the way.

A rule has one tensor on one side and its parts on the other (or one on each). Nothing here knows of
checkpoints or of the text that a map is written in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.protocol import Cut

Rotary = Literal["", "pairs-to-halves", "halves-to-pairs"]
ROTARY: tuple[Rotary, ...] = ("", "pairs-to-halves", "halves-to-pairs")
_OPPOSITE: dict[Rotary, Rotary] = {
    "": "",
    "pairs-to-halves": "halves-to-pairs",
    "halves-to-pairs": "pairs-to-halves",
}
_PLACEHOLDER = re.compile(r"\{([a-z_]+)(\*?)\}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Names on both sides, and how the one tensor is made of the parts, or falls into them.

    A part's rows are reordered by ``rotary`` (one for each part) in heads of ``head_dim`` rows and
    it is transposed or not; parts lie side by side along ``dim``, with ``sizes`` there (none:
    equal ones), in each of ``groups`` again; ``stack`` names the placeholder that numbers the
    layers of a new first dimension. Sizes are products of numbers and named values: ``2*head_dim``.
    ``parallel`` and ``parallel_length`` say how tensor-parallel parts have the sources, as the dims
    and the length of a `Cut` do; None: nothing is known of parts.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    rotary: tuple[Rotary, ...] = ()
    head_dim: str = "head_dim"
    transpose: bool = False
    dim: int = 0
    sizes: tuple[str, ...] = ()
    groups: str = "1"
    stack: str | None = None
    parallel: tuple[int, ...] | None = None
    parallel_length: str | None = None
    source_shape: tuple[str, ...] = ()
    target_shape: tuple[str, ...] = ()

    @property
    def gathers(self) -> bool:
        """Whether parts become one tensor; else one tensor falls into parts."""
        if len(self.sources) != len(self.targets):
            return len(self.sources) > len(self.targets)
        return self.stack is None or self.stack in placeholders(self.sources[0])

    @property
    def parts(self) -> int:
        """How many parts lie side by side in the one tensor."""
        return max(len(self.sources), len(self.targets))

    @property
    def back(self) -> Rule:
        """The rule that undoes this one."""
        return replace(
            self,
            sources=self.targets,
            targets=self.sources,
            rotary=tuple(_OPPOSITE[one] for one in self.rotary),
            source_shape=self.target_shape,
            target_shape=self.source_shape,
        )


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A named list of rules; ``drop`` are names that have no place on the other side.

    ``requires`` are patterns of which each must match a name, ``forbids`` those of which none may;
    ``model_types`` are those of config.json that the map is for (none: any). Names without a rule
    are refused, or stay as they are where the map ``keeps_rest``. ``is_back`` is of a map that is
    read backwards: what its rules say of tensor-parallel parts is of the other side.
    """

    name: str
    rules: tuple[Rule, ...] = field(repr=False)
    drop: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    keeps_rest: bool = False
    is_back: bool = False

    @property
    def back(self) -> TensorMap:
        """The map that undoes this one: what it drops cannot come back."""
        return replace(
            self,
            name=f"{self.name}, back",
            rules=tuple(rule.back for rule in self.rules),
            drop=(),
            is_back=not self.is_back,
            requires=self._there(self.requires),
            forbids=self._there(self.forbids),
        )

    @property
    def forced(self) -> TensorMap:
        """The map that asks for nothing but its rules."""
        return replace(self, name=f"{self.name}, forced", requires=(), forbids=(), model_types=())

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """How tensor-parallel parts have the sources; empty where the map does not say it."""
        known = [
            Cut(pattern(text).pattern, rule.parallel, rule.parallel_length)
            for rule in self.rules
            for text in rule.sources
            if rule.parallel is not None and not self.is_back
        ]
        dropped = [Cut(pattern(text).pattern) for text in self.drop]
        return (*known, *dropped) if known else ()

    def _there(self, texts: tuple[str, ...]) -> tuple[str, ...]:
        """These patterns as the other side has them: names without a rule are the same there."""
        targets = {text: rule.targets for rule in self.rules for text in rule.sources}
        return tuple(there for text in texts for there in targets.get(text, (text,)))


@cache
def pattern(text: str) -> re.Pattern[str]:
    """A regular expression for a name with placeholders: ``{n}`` a number, ``{m*}`` any text."""
    seen: set[str] = set()
    parts: list[str] = []
    place = 0
    for placeholder in _PLACEHOLDER.finditer(text):
        parts.append(re.escape(text[place : placeholder.start()]))
        name, any_text = placeholder.groups()
        number_or_text = ".+" if any_text else r"\d+"
        parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>{number_or_text})")
        seen.add(name)
        place = placeholder.end()
    parts.append(re.escape(text[place:]))
    return re.compile("".join(parts))


@cache
def placeholders(text: str) -> frozenset[str]:
    """The names of the placeholders in a name."""
    return frozenset(name for name, _ in _PLACEHOLDER.findall(text))


def filled(text: str, bound: Mapping[str, str]) -> str:
    """The name with its placeholders filled in."""
    return _PLACEHOLDER.sub(lambda placeholder: bound[placeholder.group(1)], text)


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """The number that a product such as ``2*head_dim`` means.

    Raises UsageError for a value that is not known.
    """
    product = 1
    for factor in _factors(text):
        if factor.isdecimal():
            product *= int(factor)
        elif factor in values:
            product *= values[factor]
        else:
            raise UsageError(
                f"The map needs the value of {factor!r}, which is not known.",
                hint=f"Give it with --map-value {factor}=N, or put the model's config.json into "
                "the folder of the checkpoint (export also takes it from --hf-assets).",
            )
    return product


def is_known(text: str, values: Mapping[str, int]) -> bool:
    """Whether a product can be evaluated."""
    return all(factor.isdecimal() or factor in values for factor in _factors(text))


def _factors(text: str) -> list[str]:
    return [part.strip() for part in text.split("*")]
