"""Maps: other names and other cuts of the same tensors, from small TOML files.

`toml` reads them, `model` is what they say, `views` are the tensors they make, `apply` does it;
`auto` chooses one, `renaming` is for what needs no map.
"""

from __future__ import annotations

from ckpt_tools.transforms.maps.apply import MapTransform, apply, knows_all
from ckpt_tools.transforms.maps.auto import AutoMapTransform
from ckpt_tools.transforms.maps.model import TensorMap
from ckpt_tools.transforms.maps.renaming import (
    RenameTransform,
    UnderTransform,
    UntieTransform,
    VocabularyTransform,
    parse_rename,
    parse_values,
)
from ckpt_tools.transforms.maps.toml import builtin_names, builtins_to_hf, find, parse

__all__ = [
    "AutoMapTransform",
    "MapTransform",
    "RenameTransform",
    "TensorMap",
    "UnderTransform",
    "UntieTransform",
    "VocabularyTransform",
    "apply",
    "builtin_names",
    "builtins_to_hf",
    "find",
    "knows_all",
    "parse",
    "parse_rename",
    "parse_values",
]
