"""A folder of numbered .bin files with an index JSON, as transformers saved large models.

Each file is a torch.save file of whole tensors; the index, or the numbers in their names, say which
belong together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt_tools.core.index import CheckpointIndex, FileEntry, ObjectEntry, TensorEntry
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.numbered import (
    NUMBERED,
    Index,
    gaps_in_numbers,
    parse_index,
)
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.formats.slices import both_hold, lost_between
from ckpt_tools.formats.torch_file import read as torch_file
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

INDEX_SUFFIX = ".bin.index.json"


def matches(path: str) -> bool:
    """Whether this is an index JSON of .bin files, or a folder with one or with numbered files."""
    if not paths.is_dir(path):
        return path.endswith(INDEX_SUFFIX) and paths.is_file(path)
    return any(name.endswith(INDEX_SUFFIX) or _number_of(name) > 1 for name in _names(path))


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in paths.listdir(folder) if not name.startswith("."))
    except OSError:
        return []


def _number_of(name: str) -> int:
    """How many files there are, as the name of one says; 0 when it says nothing."""
    match = NUMBERED.fullmatch(name)
    return int(match[3]) if match and match[4] == "bin" else 0


def read_index(
    path: str | Sequence[str], *, options: ReadOptions = ReadOptions()
) -> CheckpointIndex:
    """The index of all files of a folder, of an index JSON or of a list, one after the other.

    Raises CheckpointError when none can be read; files that are lost or damaged, and names in two
    files, are problems of the index.
    """
    if not isinstance(path, str):
        chosen = _IndexBuilder(os.path.commonpath(path), options)
        chosen.read(path)
        lost = lost_between(path)
        chosen.problems += [] if lost is None or chosen.problems else [lost]
        return chosen.index(None)
    is_folder = paths.is_dir(path)
    folder = path if is_folder else paths.folder_of(path)
    names = _names(folder)
    listed = [name for name in names if name.endswith(INDEX_SUFFIX)]
    reading = _IndexBuilder(path, options)
    if is_folder and not listed:
        numbered = [name for name in names if _number_of(name)]
        reading.read(f"{folder}/{name}" for name in numbered)
        gaps = gaps_in_numbers(folder, numbered)
        reading.files += [FileEntry(lost, None) for lost in gaps.paths]
        reading.problems += gaps.problems
        return reading.index(None)
    if len(listed) > 1 and is_folder:
        raise CheckpointError(
            f"{folder} holds {len(listed)} checkpoints: {some(listed, 3)}.",
            hint=f"Name one of them: {folder}/{listed[0]}",
        )
    with Files() as files:
        index = parse_index(paths.normal(f"{folder}/{listed[0]}" if is_folder else path), files)
    by_file = index.by_file()
    there = [file for file in by_file if paths.is_file(file)]
    reading.read(there, about=by_file)
    for file in sorted(by_file.keys() - there):
        reading.files.append(FileEntry(file, None))
        reading.problems.append(index.missing(file, by_file[file]))
    return reading.index(index)


@dataclass(slots=True)
class _IndexBuilder:
    """What the files read so far hold."""

    root: str
    options: ReadOptions
    parts: list[CheckpointIndex] = field(default_factory=list)
    files: list[FileEntry] = field(default_factory=list)
    problems: list[CheckpointError] = field(default_factory=list)

    def read(self, files: Iterable[str], *, about: dict[str, list[str]] | None = None) -> None:
        """Read files; what cannot be read is a problem about the names that it should hold."""
        for file in files:
            try:
                self.parts.append(torch_file.read_file(file, options=self.options))
            except CheckpointError as error:
                self.files.append(FileEntry(file, paths.size(file)))
                held = (about or {}).get(file, ())
                self.problems.append(error.concerning(held))

    def index(self, listed: Index | None) -> CheckpointIndex:
        """The index of all files; of a name in two of them, the file that is listed counts."""
        if not self.parts and self.problems and listed is None:
            raise self.problems[0]
        tensors: dict[str, TensorEntry] = {}
        objects: dict[str, ObjectEntry] = {}
        where: dict[str, str] = {}
        for part in self.parts:
            held = {entry.fqn for entry in part.entries}
            doubles = sorted(held & where.keys())
            if listed is not None:
                self.problems += listed.disagreements(part.root, held)
                held -= {fqn for fqn in doubles if listed.weight_map.get(fqn) != part.root}
            elif doubles:
                held -= set(doubles)
                self.problems.append(both_hold(where[doubles[0]], part.root, doubles))
            where |= dict.fromkeys(held, part.root)
            tensors |= {entry.fqn: entry for entry in part.tensors if entry.fqn in held}
            objects |= {entry.fqn: entry for entry in part.objects if entry.fqn in held}
            self.problems += part.problems
            self.files += part.files
        return CheckpointIndex(
            root=self.root,
            format=torch_file.FORMAT,
            tensors=tuple(tensors[fqn] for fqn in sorted(tensors)),
            objects=tuple(objects[fqn] for fqn in sorted(objects)),
            files=tuple(sorted(set(self.files))),
            ties=tuple(tie for part in self.parts for tie in part.ties),
            notes=tuple(note for part in self.parts for note in part.notes),
            problems=tuple(self.problems),
        )
