"""What headers say beside their tensors (safetensors' ``__metadata__``), in an output.

It may say how to read the tensors, as torchao's and ComfyUI's does, or what they mean, as the alpha
of a LoRA: a reader goes wrong without it. Nobody here knows of what it speaks, so it goes along
where names, types, shapes and values are those that it was written for, and else is named.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import Target
from ckpt_tools.core.text import some
from ckpt_tools.transforms.base import TransformedTensor

NO_PLACE = "this format has no place for it"
# What an export says of its own source.
_OWN = frozenset({"ckpt_tools", "source_format", "source_world_size", "proof"})


def kept_strings(
    index: CheckpointIndex,
    located: CheckpointIndex,
    made: Sequence[TransformedTensor],
    targets: Sequence[Target],
    *,
    form: str,
) -> tuple[dict[str, str], list[str]]:
    """The strings that are true of these targets, and notes on those that are left out.

    ``made`` are the targets' tensors, from those of ``located`` and of ``index``.
    """
    if not index.strings:
        return {}, []
    chunks = {entry.fqn: entry.chunks for entry in located.tensors}
    is_same = all(
        len(one.origins) == 1 and one.entry.chunks == chunks.get(one.origins[0]) for one in made
    )
    now = {target.fqn: target.entry.shape for target in targets}
    written_for = {fqn: shape for fqn, (_, shape) in index.strings_for.items()}
    if not formats.named(form).strings:
        return {}, left_out_strings(index, NO_PLACE)
    if not is_same or not now.items() <= written_for.items():
        return {}, left_out_strings(index, "tensors were changed or renamed, and it may be of them")
    if len(now) < len(written_for):
        return {}, left_out_strings(index, "tensors were left out, and it may be of them")
    if any(target.dtype != index.strings_for[target.fqn][0] for target in targets):
        return {}, left_out_strings(index, "element types were changed, and it may be of them")
    differing = [name for name, text in index.strings.items() if text is None]
    same = {n: text for n, text in index.strings.items() if text is not None and n not in _OWN}
    return same, _note(differing, "it is not the same in all files")


def left_out_strings(index: CheckpointIndex, why: str) -> list[str]:
    """A note on what headers say, which is left out of an output; none where they say nothing."""
    return _note(list(index.strings), why)


def _note(names: Sequence[str], why: str) -> list[str]:
    shown = some([name for name in names if name not in _OWN])
    return [f"Left out what the header's __metadata__ says ({shown}): {why}."] if shown else []
