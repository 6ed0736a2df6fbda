"""LoRA weights in a training checkpoint: to a PEFT adapter folder, or into the base weights.

`parts` sorts a checkpoint's entries, `config` is what the adapter's configuration says, `adapter`
makes the folder, `merge` the merged weights.
"""

from __future__ import annotations

from ckpt_tools.transforms.lora.adapter import AdapterTransform
from ckpt_tools.transforms.lora.config import LoraConfig, check_beside, read_config
from ckpt_tools.transforms.lora.merge import MergeTransform
from ckpt_tools.transforms.lora.parts import refuse_split

__all__ = [
    "AdapterTransform",
    "LoraConfig",
    "MergeTransform",
    "check_beside",
    "read_config",
    "refuse_split",
]
