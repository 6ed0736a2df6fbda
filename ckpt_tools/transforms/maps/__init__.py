"""Maps: other names and other cuts of the same tensors, from small TOML files.

`toml` reads them, `model` is what they say, `views` are the tensors they make, `apply` chooses one
and does it, `renaming` is for what needs no map.
"""

from __future__ import annotations

from ckpt_tools.transforms.maps.apply import MapTransform as MapTransform
from ckpt_tools.transforms.maps.renaming import RenameTransform as RenameTransform
from ckpt_tools.transforms.maps.renaming import UnderTransform as UnderTransform
from ckpt_tools.transforms.maps.renaming import VocabularyTransform as VocabularyTransform
from ckpt_tools.transforms.maps.renaming import parse_rename as parse_rename
from ckpt_tools.transforms.maps.renaming import parse_values as parse_values
from ckpt_tools.transforms.maps.renaming import untie as untie
from ckpt_tools.transforms.maps.toml import builtin_names as builtin_names
from ckpt_tools.transforms.maps.toml import find as find
from ckpt_tools.transforms.maps.toml import parse as parse
