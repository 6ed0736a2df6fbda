"""Finding the checkpoint that a person means, and reading its index, whatever format it has.

This room knows which formats there are and in which order to ask them; each format's own room knows
all the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

from ckpt_tools.core.index import CheckpointIndex, FileState, ObjectEntry
from ckpt_tools.core.text import first_of
from ckpt_tools.errors import IncompleteError, UnreadableError
from ckpt_tools.formats import foreign, frameworks
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files, refuse_special

__all__ = [
    "FORMATS",
    "Format",
    "ReadOptions",
    "as_archives",
    "detect",
    "locate",
    "open_object",
    "open_objects",
    "read_index",
]


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
    Format("torch", "ckpt_tools.formats.torch_file.folder"),
)


def locate(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with every chunk as raw elements, each item checked against the index.

    What cannot be used becomes a problem of the index, named with the tensor.
    """
    from ckpt_tools.formats.dcp import items as dcp_items

    return dcp_items.locate(index, files)


def open_objects(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with the values of its plain objects, and with the tensors of tuples that a
    format keeps as objects.

    Raises UnsafePickleError when an object asks for a global that could run code.
    """
    if all(entry.opened or entry.codec is None for entry in index.objects):
        return index
    from ckpt_tools.formats.dcp import items as dcp_items

    return dcp_items.open_objects(index, files)


def open_object(index: CheckpointIndex, entry: ObjectEntry, files: Files) -> ObjectEntry:
    """One object of the index with its value, when it is plain; a tuple with tensors is not."""
    opened = open_objects(replace(index, tensors=(), objects=(entry,)), files)
    return opened.object(entry.fqn) or replace(entry, type_name="tuple or list with tensors")


def as_archives(index: CheckpointIndex, files: Files) -> CheckpointIndex:
    """The same index with every object that has bytes of its own, and no value that was read, as
    an archive of torch.save.
    """
    if all(entry.opened or entry.codec is None for entry in index.objects):
        return index
    from ckpt_tools.formats.dcp import items as dcp_items

    return dcp_items.as_archives(index, files)


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
    refuse_special([path])
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
    before = _states(place)  # a file that changes while headers are read has changed, too
    index = _with_states(form.read_index(place, options), before)
    framework, told_by = frameworks.framework(index)
    notes = list(index.notes)
    if paths.normal(place) != paths.normal(path):
        notes.insert(0, f"Reading {place}.")
    if told_by is not None:
        notes.append(f"Framework: {framework}, told by {told_by}.")
    others = _beside(place, index)
    if others:
        shown = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
        notes.append(f"Beside it, and not read: {shown}.")
    return replace(index, framework=framework, notes=tuple(notes))


def _beside(place: str, index: CheckpointIndex) -> list[str]:
    """What else in the folder that was read looks like a checkpoint, and no note speaks of."""
    read = [file.path for file in index.files]
    found = frameworks.beside(place, read, lambda path: detect(path) is not None)
    return [name for name in found if not any(name in note for note in index.notes)]


def _states(place: str) -> dict[str, FileState]:
    try:
        return paths.states(place)
    except OSError:
        return {}  # reading it will say what is wrong


def _with_states(index: CheckpointIndex, before: Mapping[str, FileState]) -> CheckpointIndex:
    """The same index, its files with the states that they had before they were read.

    A store is asked for no more than its listing: each file by itself would be a request.
    """
    known = {paths.normal(path): state for path, state in before.items()}
    where = {file: paths.normal(file.path) for file in index.files}
    known |= paths.states_now(
        path for path in where.values() if path not in known and not paths.is_address(path)
    )
    return replace(index, files=tuple(f._replace(state=known.get(at)) for f, at in where.items()))


def _read_glob(path: str, options: ReadOptions) -> CheckpointIndex:
    """The rank files that a glob chooses, as one checkpoint."""
    found = paths.glob(path) if any(c in path for c in "*?[") else []
    if not found:
        raise IncompleteError(f"{path} is not there.")
    if len(found) == 1:
        return read_index(found[0], options=options)
    from ckpt_tools.formats.rank_files import read as rank_files

    before = paths.states_now(found)
    return _with_states(rank_files.read_index(found, options=options), before)


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
