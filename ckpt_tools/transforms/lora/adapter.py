"""Makes the folder that PEFT loads an adapter from: its tensors, renamed, and its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt_tools.core.text import counted
from ckpt_tools.transforms.base import TransformedTensor, TransformResult, small_file
from ckpt_tools.transforms.lora.config import LoraConfig, check_ranks, content_of
from ckpt_tools.transforms.lora.parts import PREFIX, AdapterParts, parts_of

_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class AdapterTransform:
    """Keeps the tensors of one adapter, under the names that PEFT's own folders have."""

    config: LoraConfig
    adapter: str | None = None

    def __call__(self, made: tuple[TransformedTensor, ...], *_: object) -> TransformResult:
        """Choose and rename. Raises what `parts_of` and `check_ranks` raise."""
        parts = parts_of(made, self.adapter)
        check_ranks(self.config, parts)
        out = tuple(_renamed(parts))
        ranks = sorted({one.rank for one in parts.factors})
        data = content_of(self.config, parts)
        who = f"Adapter {parts.adapter or '(without a name)'}"
        what = f"{counted(len(parts.factors), 'module')} of rank {', '.join(map(str, ranks))}"
        notes = [f"{who}: {what}, alpha {self.config.alpha:g}."]
        if parts.saved:
            whole = counted(len(parts.saved), "tensor")
            notes.append(f"With {whole} of modules that were trained whole.")
        notes.append(f"Left out {len(made) - len(out)} other tensors: those of the base model.")
        return TransformResult(out, tuple(notes), (small_file(_CONFIG, data),))


def _renamed(parts: AdapterParts) -> Iterator[TransformedTensor]:
    for one in parts.factors:
        for side, made in (("A", one.a), ("B", one.b)):
            kind = f"lora_embedding_{side}" if one.embedding else f"lora_{side}.weight"
            yield made.named(f"{PREFIX}{one.module}.{kind}")
    for name, made in parts.saved.items():
        yield made.named(f"{PREFIX}{name}")
