"""Which element type each tensor is written in: what --dtype and its exceptions mean.

It knows types and names, never values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.text import counted, some

# What quantization libraries call the scales of a weight: cast, a scale is another number.
_SCALES = ("_scale", "_scale_inv", "_scales", ".scale", ".scales")

# What optimizers of mixed precision call their own float32 copy of a weight.
_MASTERS = frozenset({"master_param", "master_weight", "master", "fp32_param", "param"})


def cast_dtype(entry: TensorEntry, dtype: DType | None) -> DType:
    """The output type of a tensor: floating tensors follow ``dtype``, all others stay.

    float8 tensors stay too: without their scales they mean nothing, and a cast leaves those behind.
    """
    if dtype is None or entry.dtype.kind != "float" or _is_float8(entry):
        return entry.dtype
    return dtype


def chosen_dtypes(
    entries: Sequence[TensorEntry],
    dtype: DType | None,
    rules: Sequence[tuple[str, DType | None]],
) -> tuple[dict[str, DType], list[str]]:
    """The output type of each tensor by its name, and notes on what stays against ``dtype``.

    ``rules`` are name patterns and their types (None: keep); the last match wins, over float8 too.
    Raises UsageError for a pattern that cannot be read.
    """
    matchers = [(names.selector((pattern,), ()), wanted) for pattern, wanted in rules]
    kept = _kept_for_float8(entries) if dtype is not None else set()
    chosen: dict[str, DType] = {}
    for entry in entries:
        chosen[entry.fqn] = entry.dtype if entry.fqn in kept else cast_dtype(entry, dtype)
        for matches, wanted in matchers:
            if matches(entry.fqn) and entry.dtype.kind == "float":
                chosen[entry.fqn] = wanted or entry.dtype
                kept.discard(entry.fqn)
    if not kept:
        return chosen, []
    return chosen, [
        f"{len(kept)} float8 tensors and their scales keep their types: {some(sorted(kept))}."
    ]


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
    return [f"The optimizer holds {kept}; written are the model's own, {own}."]


def _is_float8(entry: TensorEntry) -> bool:
    return entry.dtype.kind == "float" and entry.dtype.bits == 8


def _kept_for_float8(entries: Sequence[TensorEntry]) -> set[str]:
    """float8 tensors, and the scales beside them."""
    eights = {entry.fqn for entry in entries if _is_float8(entry)}
    stems = {fqn.rpartition(".")[0] for fqn in eights} | eights
    scales = {
        entry.fqn
        for entry in entries
        if entry.fqn.endswith(_SCALES) and not stems.isdisjoint(_prefixes(entry.fqn))
    }
    return eights | scales


def _prefixes(fqn: str) -> Iterable[str]:
    """What a scale's name may begin with: its module's name, or its weight's."""
    yield fqn.rpartition(".")[0]
    for ending in _SCALES:
        yield fqn.removesuffix(ending)
