"""What ``--param-names`` means: a list in a file, a checkpoint with names, or the word stored."""

from __future__ import annotations

import os

from ckpt_tools.cli.options import with_values
from ckpt_tools.errors import UsageError, reason_of
from ckpt_tools.formats import (
    ReadOptions,
    detect,
    frameworks,
    read_index,
)
from ckpt_tools.storage.paths import open_file
from ckpt_tools.transforms import param_names
from ckpt_tools.transforms.optimizer import ParamNames

_STORED = "stored"
_LONGEST = 64 << 20  # bytes of a list of names


def read(text: str, options: ReadOptions) -> ParamNames:
    """The names that an optimizer's own order gives; none for those that the checkpoint stores.

    Raises UsageError when nothing is there, or when what is there has no names.
    """
    if text == _STORED:
        return ParamNames()
    if os.path.isfile(text) and detect(frameworks.member(text)) is None:
        return ParamNames(param_names.parse_names(_text_of(text), where=text))
    if not os.path.exists(text):
        raise UsageError(f"--param-names: {text} does not exist.")
    return param_names.names_in(with_values(read_index(text, options=options)))


def _text_of(path: str) -> str:
    if os.path.getsize(path) > _LONGEST:
        raise UsageError(f"--param-names: {path} is too long for a list of names.")
    try:
        with open(open_file(path), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise UsageError(f"--param-names: {path} cannot be read as text: {why}.") from error
