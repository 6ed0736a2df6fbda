"""Finding the checkpoint that a person means, and reading its index, whatever format it has.

This room knows which formats there are and in which order to ask them; each format's own room knows
all the rest.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.text import first_of
from ckpt_tools.errors import IncompleteError, UnreadableError
from ckpt_tools.formats import foreign, frameworks
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

__all__ = ["FORMATS", "Format", "ReadOptions", "detect", "locate", "open_objects", "read_index"]


class Format(NamedTuple):
    """A format: its name, and the module that knows whether a path is of it, and reads it.

    The module has ``matches(path) -> bool`` and ``read_index(path, *, options)``. It is imported
    when it is first asked, so that looking at one format does not cost the start of all.
    """

    name: str
    module: str

    def matches(self, path: str) -> bool:
        """Whether this file or directory is of the format."""
        return bool(import_module(self.module).matches(path))

    def read_index(self, path: str, options: ReadOptions) -> CheckpointIndex:
        """The index of a checkpoint of this format."""
        index = import_module(self.module).read_index(path, options=options)
        if not isinstance(index, CheckpointIndex):
            raise TypeError(f"{self.module}.read_index gave {type(index).__name__}")
        return index


# In the order in which they are asked: a DCP directory may have .pt side files beside it.
FORMATS = (
    Format("dcp", "ckpt_tools.formats.dcp.read"),
    Format("ranks", "ckpt_tools.formats.rank_files.read"),
    Format("safetensors", "ckpt_tools.formats.safetensors.read"),
    Format("torch", "ckpt_tools.formats.torch_file.read"),
)


def locate(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with every chunk as raw elements, each item checked against the index.

    What cannot be used becomes a problem of the index, named with the tensor.
    """
    from ckpt_tools.formats.dcp import items as dcp_items

    return dcp_items.locate(index, files)


def open_objects(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with the values of its plain objects.

    Raises UnsafePickleError when an object asks for a global that could run code.
    """
    if all(entry.opened or entry.codec is None for entry in index.objects):
        return index
    from ckpt_tools.formats.dcp import items as dcp_items

    return dcp_items.open_objects(index, files)


def detect(path: str) -> Format | None:
    """The format of exactly this file or directory, or None; folders inside are not looked into."""
    return next((form for form in FORMATS if form.matches(path)), None)


def read_index(path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
    """The index of the checkpoint that ``path`` means.

    ``path`` is a file, a directory, a parent with one checkpoint inside, or a glob of rank files.
    Where it is not the checkpoint itself, a note of the index says which was read.

    Raises IncompleteError when nothing is there, UnsupportedError for a format of other tools,
    UnreadableError when there are several checkpoints, which its hint lists.
    """
    if not paths.exists(path):
        return _read_glob(path, options)
    place = frameworks.member(path)
    foreign.refuse_foreign(place)
    form = detect(place)
    if form is None:
        place = _only_one_inside(place)
        form = detect(place)
    if form is None:
        raise UnreadableError(
            f"{path} is no checkpoint of a known format.", hint=frameworks.SUPPORTED
        )
    index = form.read_index(place, options)
    framework, told_by = frameworks.framework(index)
    notes = list(index.notes)
    if paths.normal(place) != paths.normal(path):
        notes.insert(0, f"Reading {place}.")
    if told_by is not None:
        notes.append(f"Framework: {framework}, told by {told_by}.")
    return replace(index, framework=framework, notes=tuple(notes))


def _read_glob(path: str, options: ReadOptions) -> CheckpointIndex:
    """The rank files that a glob chooses, as one checkpoint."""
    found = paths.glob(path) if any(c in path for c in "*?[") else []
    if not found:
        raise IncompleteError(f"{path} is not there.")
    if len(found) == 1:
        return read_index(found[0], options=options)
    from ckpt_tools.formats.rank_files import read as rank_files

    return rank_files.read_index(found, options=options)


def _only_one_inside(folder: str) -> str:
    """The only checkpoint below a folder; raises when there is none or more than one."""
    everything = frameworks.inside(
        folder, lambda path: foreign.is_foreign(path) or detect(path) is not None
    )
    found = [path for path in everything if not foreign.is_foreign(path)]
    if len(found) == 1:
        return found[0]
    if not found:
        for path in everything:
            foreign.refuse_foreign(path)
        foreign.refuse_inside(folder)
        raise UnreadableError(f"{folder} holds no checkpoint.", hint=frameworks.SUPPORTED)
    shown = first_of([f"ckpt-tools inspect {frameworks.quote(path)}" for path in found], 20)
    raise UnreadableError(
        f"{folder} is no checkpoint itself; {len(found)} are inside.", hint="\n".join(shown)
    )
