"""Which element type each tensor is written in: what --dtype and its exceptions mean.

It knows types and names, never values. What a quantized weight is made of, `quantized` tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import DType, parse_dtype
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms import quantized
from ckpt_tools.transforms.base import TransformedTensor
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


def cast_dtype(entry: TensorEntry, dtype: DType | None) -> DType:
    """The output type of a tensor of no quantized weight: floating ones follow ``dtype``.

    Those of 8 bits and fewer stay: without a scale they mean nothing.
    """
    follows = entry.dtype.kind == "float" and entry.dtype.bits > 8
    return dtype if dtype is not None and follows else entry.dtype


def chosen_dtypes(
    made: Sequence[TransformedTensor],
    dtype: DType | None,
    rules: Sequence[tuple[str, DType | None]],
    *,
    source: CheckpointIndex,
) -> tuple[dict[str, DType], list[str]]:
    """The output type of each tensor by its new name, and notes on what stays against ``dtype``.

    ``rules`` are patterns of new names and their types (None: keep); the last match wins. A tensor
    of a quantized weight, as it is called in ``source``, follows rules only.
    Raises UsageError for a pattern that cannot be read, for a cast of packed codes, and for one of
    tensors that may belong to a quantized weight.
    """
    matchers = [(names.selector((pattern,), ()), wanted) for pattern, wanted in rules]
    known = quantized.recognise(source) if dtype is not None or rules else quantized.NONE
    chosen: dict[str, DType] = {}
    kept: list[TransformedTensor] = []
    ruled: list[str] = []
    doubtful: dict[str, str] = {}
    for one in made:
        fqn, own = one.entry.fqn, one.entry.dtype
        ways = [wanted for matches, wanted in matchers if matches(fqn)]
        is_member = not known.members.keys().isdisjoint(one.origins)
        if ways and own.kind == "float":
            chosen[fqn] = ways[-1] or own
            if is_member and chosen[fqn] != own:
                _refuse_codes(one, known)
                ruled.append(fqn)
                continue
        else:
            chosen[fqn] = own if is_member else cast_dtype(one.entry, dtype)
            near = [known.doubtful[name] for name in one.origins if name in known.doubtful]
            if near and chosen[fqn] != own:
                doubtful[fqn] = near[0]
        if is_member:
            kept.append(one)
    _refuse_doubtful(doubtful)
    return chosen, [*_kept_notes(kept, known), *_ruled_notes(ruled)]


def _refuse_codes(one: TransformedTensor, known: Quantized) -> None:
    """Raise UsageError when packed codes in a floating type would be cast."""
    if not known.codes.isdisjoint(one.origins):
        raise UsageError(
            f"{one.entry.fqn} holds packed 4-bit codes in {one.entry.dtype.name}: a cast would "
            "make them unreadable.",
            hint=f"Add --dtype-for '{one.entry.fqn}=keep' as the last one, or leave it out with "
            "--exclude.",
        )


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


def _kept_notes(kept: Sequence[TransformedTensor], known: Quantized) -> list[str]:
    """A line on the quantized weights that stay, for those that a cast could have changed."""
    families: dict[str, list[TransformedTensor]] = defaultdict(list)
    for one in kept:
        origin = next(name for name in one.origins if name in known.members)
        families[known.members[origin].family].append(one)
    parts = []
    for family, members in sorted(families.items()):
        if any(one.entry.dtype.kind == "float" for one in members):
            of = {known.members[name].weight for one in members for name in one.origins}
            tensors, weights = counted(len(members), "tensor"), counted(len(of), f"{family} weight")
            parts.append(f"{tensors} of {weights} ({some(sorted(of))})")
    return [f"Kept exact: {'; '.join(parts)}."] if parts else []


def _ruled_notes(ruled: Sequence[str]) -> list[str]:
    if not ruled:
        return []
    tensors = counted(len(ruled), "tensor")
    return [f"--dtype-for casts {tensors} of quantized weights: {some(sorted(ruled))}."]


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
