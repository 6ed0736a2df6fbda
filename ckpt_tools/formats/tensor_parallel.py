"""Meta's ``consolidated.00.pth``, ``consolidated.01.pth`` …: each file is one tensor-parallel part.

Which tensors are cut, and along which dimension, stands in no file: it is the model's code that
knows it. So one part is no checkpoint, and several are not joined.
"""

from __future__ import annotations

import os
import re

from ckpt_tools.core.text import some
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.storage import paths

_PART = re.compile(r"consolidated\.(\d+)\.pth")


def refuse(path: str) -> None:
    """Raise UnsupportedError for such a part, or a folder of them; a lone first one is whole."""
    is_folder = paths.is_dir(path)
    if not is_folder and not _PART.fullmatch(os.path.basename(path)):
        return
    folder = path if is_folder else os.path.dirname(path) or "."
    try:
        parts = sorted(name for name in paths.listdir(folder) if _PART.fullmatch(name))
    except OSError:
        return
    if len(parts) > 1 or (parts and not re.search(r"\.0+\.", parts[0])):
        raise UnsupportedError(
            f"{folder} holds {len(parts)} tensor-parallel parts of one model ({some(parts)}): the "
            "rows or columns that each has of a tensor stand in no file.",
            hint="Convert them with the model's own script (for Llama: transformers' "
            "convert_llama_weights_to_hf.py), and give the result.",
        )
