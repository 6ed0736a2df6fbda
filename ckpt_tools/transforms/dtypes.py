"""Which element type each tensor is written in: what --dtype and its exceptions mean.

It knows types and names, never values. What a quantized weight is made of, `quantized` tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import DType, parse_dtype
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.transforms.quantized import Quantized

# What optimizers of mixed precision call their own float32 copy of a weight.
_MASTERS = frozenset({"master_param", "master_weight", "master", "fp32_param", "param"})


def parse_cast(text: str) -> DType | None:
    """The type that --dtype means, None for ``keep``. Raises ValueError."""
    dtype = parse_dtype(text)
    if text != "keep" and (dtype is None or not dtype.holds_weights):
        raise ValueError(
            f"{text!r} is not a floating type for weights; use keep, bf16, fp16 or fp32."
        )
    return dtype


def parse_rule(text: str) -> tuple[str, DType | None]:
    """The pattern and the type that ``GLOB=TYPE`` means. Raises UsageError."""
    pattern, equals, name = text.rpartition("=")
    dtype = parse_dtype(name)
    is_known = name == "keep" or (dtype is not None and dtype.holds_weights)
    if not equals or not pattern or not is_known:
        raise UsageError(f"--dtype-for is written GLOB=TYPE with a floating type, not {text!r}.")
    return pattern, dtype


# A tensor to write, and the names in the source that its elements come from.
_Made = tuple[TensorEntry, tuple[str, ...]]


@dataclass(frozen=True)
class DtypePolicy:
    """The types in which one run writes the tensors of ``source``.

    ``rules`` are patterns of new names and their types (None: keep); the last match wins. All else
    follows ``dtype`` (None: keep), but for tensors of quantized weights and scalars that count.
    """

    dtype: DType | None
    rules: Sequence[tuple[str, DType | None]]
    source: CheckpointIndex = field(repr=False)

    @cached_property
    def quantized(self) -> Quantized:
        """The quantized weights of the source, by its own names."""
        from ckpt_tools.transforms.quantized import recognise  # late: casts alone ask

        return recognise(self.source)

    @cached_property
    def _matchers(self) -> list[tuple[Callable[[str], object], DType | None]]:
        return [(names.matcher(pattern), wanted) for pattern, wanted in self.rules]

    def of_plain(self, entry: TensorEntry) -> DType:
        """The type of a tensor of no quantized weight. Raises UsageError for a bad pattern.

        Floating types of 8 bits and fewer follow rules only: without a scale they mean nothing.
        """
        return self._ruled(entry) or self._cast(entry)

    def _ruled(self, entry: TensorEntry) -> DType | None:
        """The type that the rules give, None where none of them is for this tensor."""
        ways = [wanted for matches, wanted in self._matchers if matches(entry.fqn)]
        return (ways[-1] or entry.dtype) if ways and entry.dtype.kind == "float" else None

    def _cast(self, entry: TensorEntry) -> DType:
        follows = entry.dtype.kind == "float" and entry.dtype.bits > 8
        if self.dtype is None or not follows or _counts(entry, self.dtype):
            return entry.dtype
        return self.dtype

    def types_of(self, made: Sequence[_Made]) -> tuple[dict[str, DType], list[str]]:
        """The type of each tensor by its new name, and notes on what stays against ``dtype``.

        Raises UsageError for a bad pattern, for a cast of packed codes, and for one of tensors that
        may belong to a quantized weight.
        """
        if self.dtype is None and not self._matchers:
            return {entry.fqn: entry.dtype for entry, _ in made}, []
        known = self.quantized
        chosen: dict[str, DType] = {}
        kept: list[_Made] = []
        cast: list[str] = []
        counting: list[str] = []
        doubtful: dict[str, str] = {}
        for entry, origins in made:
            fqn, own, ruled = entry.fqn, entry.dtype, self._ruled(entry)
            if known.members.keys().isdisjoint(origins):
                chosen[fqn] = ruled or self._cast(entry)
                if self.dtype is not None and ruled is None and _counts(entry, self.dtype):
                    counting.append(fqn)
                near = [known.doubtful[name] for name in origins if name in known.doubtful]
                if near and ruled is None and chosen[fqn] != own:
                    doubtful[fqn] = near[0]
                continue
            chosen[fqn] = ruled or own
            if chosen[fqn] == own:
                kept.append((entry, origins))
                continue
            if not known.codes.isdisjoint(origins):
                raise UsageError(
                    f"{fqn} holds packed 4-bit codes in {own.name}: a cast would make them "
                    "unreadable.",
                    hint=f"Add --dtype-for '{fqn}=keep' as the last one, or leave it out with "
                    "--exclude.",
                )
            cast.append(fqn)
        _refuse_doubtful(doubtful)
        notes = _kept_notes(kept, known)
        notes += idle_notes("--dtype-for", (pattern for pattern, _ in self.rules), chosen)
        if counting:
            scalars = f"{counted(len(counting), 'scalar')} outside of the model"
            notes.append(f"Not cast: {scalars}, such as step counters ({some(sorted(counting))}).")
        if cast:
            tensors = counted(len(cast), "tensor")
            notes.append(f"--dtype-for casts {tensors} of quantized weights: {some(sorted(cast))}.")
        return chosen, notes


def _counts(entry: TensorEntry, dtype: DType) -> bool:
    """Whether it is a step, a learning rate …, and the type no wider: bfloat16 has no 257."""
    is_scalar = entry.section != "model" and not entry.shape and entry.dtype.kind == "float"
    return is_scalar and dtype != entry.dtype and dtype.bits <= entry.dtype.bits


def _refuse_doubtful(doubtful: Mapping[str, str]) -> None:
    """Raise UsageError, with the tensors that they stand beside, when there are any."""
    if not doubtful:
        return
    first, beside = min(doubtful.items())
    raise UsageError(
        f"--dtype would cast {counted(len(doubtful), 'tensor')} that may belong to quantized "
        f"weights: {some(sorted(doubtful))}. {first} is beside {beside}, and its name "
        "does not say what it is.",
        hint=f"Leave --dtype out; or decide for each: --dtype-for '{first}=keep' or =bf16; "
        "or leave it out with --exclude.",
    )


def _kept_notes(kept: Sequence[_Made], known: Quantized) -> list[str]:
    """A line on the quantized weights that stay, for those that a cast could have changed."""
    families: dict[str, list[_Made]] = defaultdict(list)
    for entry, origins in kept:
        origin = next(name for name in origins if name in known.members)
        families[known.members[origin].family].append((entry, origins))
    parts = []
    for family, members in sorted(families.items()):
        if any(entry.dtype.kind == "float" for entry, _ in members):
            of = {known.members[name].weight for _, origins in members for name in origins}
            tensors, weights = counted(len(members), "tensor"), counted(len(of), f"{family} weight")
            parts.append(f"{tensors} of {weights} ({some(sorted(of))})")
    return [f"Kept exact: {'; '.join(parts)}."] if parts else []


def master_weights_note(index: CheckpointIndex, chosen: Sequence[TensorEntry]) -> list[str]:
    """A note when the optimizer holds wider copies of the weights: these are not written."""
    narrow = {entry.dtype.name for entry in chosen if entry.dtype.kind == "float"} - {"float32"}
    taken = {entry.fqn for entry in chosen}
    masters = [
        entry.fqn
        for entry in index.tensors
        if entry.section == "optim"
        and entry.fqn not in taken
        and entry.dtype.name == "float32"
        and entry.fqn.rpartition(".")[2] in _MASTERS
    ]
    if not masters or not narrow:
        return []
    kept = f"{counted(len(masters), 'float32 master weight')} ({some(sorted(masters))})"
    own = ", ".join(sorted(narrow))
    return [f"The optimizer holds {kept}; the model's own weights are written, in {own}."]


def idle_notes(option: str, patterns: Iterable[str], held: Iterable[str]) -> list[str]:
    """A note on each pattern of an option that matches no tensor to write."""
    return [
        f"{option} '{text}' matches no tensor; a glob is for the whole name."
        for text in names.idle(patterns, held)
    ]


def overflow_notes(overflowed: Collection[str]) -> list[str]:
    """A note on the tensors of which a cast made finite values infinite, when there are any."""
    if not overflowed:
        return []
    note = f"Finite values of {counted(len(overflowed), 'tensor')} are too large for the new type, "
    note += f"and are infinite in it: {some(sorted(overflowed))}. "
    return [f"{note}bf16 has nearly the range of fp32; --dtype-for 'GLOB=keep' keeps a type."]
