"""LoRA weights in a training checkpoint: to a PEFT adapter folder, or into the base weights.

`parts` sorts a checkpoint's entries, `config` is what the adapter's configuration says, `adapter`
makes the folder, `merge` the merged weights.
"""

from __future__ import annotations

from ckpt_tools.transforms.lora.adapter import AdapterTransform as AdapterTransform
from ckpt_tools.transforms.lora.config import LoraConfig as LoraConfig
from ckpt_tools.transforms.lora.config import check_beside as check_beside
from ckpt_tools.transforms.lora.config import read_config as read_config
from ckpt_tools.transforms.lora.merge import MergeTransform as MergeTransform
from ckpt_tools.transforms.lora.parts import refuse_split as refuse_split
