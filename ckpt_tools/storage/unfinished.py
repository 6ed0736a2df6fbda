"""Outputs of this program that are not finished: folders ``OUT.partial`` with a manifest.

Files in them are not all there, or have their full length and zeros where nothing is written yet: a
reader that looks at lengths and headers would take them for whole.
"""

from __future__ import annotations

import os

from ckpt_tools.errors import IncompleteError
from ckpt_tools.storage import paths

SUFFIX = ".partial"
MANIFEST = ".manifest"


def is_unfinished(path: str) -> bool:
    """Whether exactly this folder is an unfinished output."""
    named = path.rstrip(os.sep).endswith(SUFFIX) and not paths.is_address(path)
    return named and os.path.isfile(os.path.join(path, MANIFEST))


def refuse_unfinished(path: str) -> None:
    """Raise IncompleteError for an unfinished output, and for what is in one."""
    around = "" if paths.is_address(path) else os.path.realpath(path)
    while around.strip(os.sep):
        if is_unfinished(around):
            raise IncompleteError(
                f"{path} is an output of ckpt-tools that is not finished: it is being written, or "
                "that was interrupted.",
                hint="Run the command that writes it again with --resume, or remove it.",
            )
        around = os.path.dirname(around)
