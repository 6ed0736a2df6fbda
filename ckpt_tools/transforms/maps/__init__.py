"""Maps: other names and other cuts of the same tensors, from small TOML files.

`toml` reads them, `model` is what they say, `views` are the tensors they make, `apply` chooses one
and does it, `renaming` is for what needs no map.
"""

from __future__ import annotations

from ckpt_tools.transforms.maps.apply import AutoMapTransform, MapTransform
from ckpt_tools.transforms.maps.renaming import (
    RenameTransform,
    UnderTransform,
    UntieTransform,
    VocabularyTransform,
    parse_rename,
    parse_values,
)
from ckpt_tools.transforms.maps.toml import builtin_names, find, parse

__all__ = [
    "AutoMapTransform",
    "MapTransform",
    "RenameTransform",
    "UnderTransform",
    "UntieTransform",
    "VocabularyTransform",
    "builtin_names",
    "find",
    "parse",
    "parse_rename",
    "parse_values",
]
