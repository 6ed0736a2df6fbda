"""Makes the folder that PEFT loads an adapter from: its tensors, renamed, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.core.text import counted
from ckpt_tools.transforms.base import TransformedTensor, TransformResult, small_file
from ckpt_tools.transforms.lora.config import LoraConfig, check_ranks, content_of
from ckpt_tools.transforms.lora.parts import PREFIX, parts_of

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
        out: list[TransformedTensor] = []
        for one in parts.factors:
            for side, factor in (("A", one.a), ("B", one.b)):
                kind = f"lora_embedding_{side}" if one.embedding else f"lora_{side}.weight"
                out.append(factor.named(f"{PREFIX}{one.module}.{kind}"))
        out += [saved.named(f"{PREFIX}{name}") for name, saved in parts.saved.items()]
        ranks = sorted({one.rank for one in parts.factors})
        data = content_of(self.config, parts)
        who = f"Adapter {parts.adapter or '(without a name)'}"
        what = f"{counted(len(parts.factors), 'module')} of rank {', '.join(map(str, ranks))}"
        notes = [f"{who}: {what}, alpha {self.config.alpha:g}."]
        if parts.saved:
            whole = counted(len(parts.saved), "tensor")
            notes.append(f"With {whole} of modules that were trained whole.")
        notes.append(f"Left out {len(made) - len(out)} other tensors: those of the base model.")
        return TransformResult(tuple(out), tuple(notes), (small_file(_CONFIG, data),))
