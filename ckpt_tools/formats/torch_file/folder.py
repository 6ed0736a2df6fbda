"""A folder of numbered .bin files with an index JSON, as transformers saved large models.

Each file is a torch.save file of whole tensors; the index, or the numbers in their names, say which
belong together.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.formats.numbered import (
    INDEX_SUFFIX,
    NUMBERED,
    Reading,
    index_among,
    names_in,
    owners,
    parse_index,
)
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.slices import both_hold, lost_between
from ckpt_tools.formats.torch_file import read as torch_file
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

SUFFIX = ".bin"


def matches(path: str) -> bool:
    """Whether this is an index JSON of .bin files, or a folder with one or with numbered files."""
    if not paths.is_dir(path):
        return path.endswith(SUFFIX + INDEX_SUFFIX) and paths.is_file(path)
    names = names_in(path, SUFFIX)
    numbers = [match for name in names if (match := NUMBERED.fullmatch(name))]
    is_listed = any(name.endswith(INDEX_SUFFIX) for name in names)
    return is_listed or any(int(match[3]) > 1 for match in numbers)


def read_index(
    path: str | Sequence[str], *, options: ReadOptions = ReadOptions()
) -> CheckpointIndex:
    """The index of all files of a folder, of an index JSON or of a list, one after the other.

    Raises CheckpointError when none can be read; files that are lost or damaged, and names in two
    files, are problems of the index.
    """
    with Files() as files:
        if not isinstance(path, str):
            reading = _Reading(os.path.commonpath(path), files, options=options)
            reading.read_unlisted(path)
            lost = lost_between(path)
            reading.problems += [] if lost is None or reading.problems else [lost]
            return reading.result({})
        reading = _Reading(path, files, options=options)
        names = names_in(path, SUFFIX) if paths.is_dir(path) else []
        listed = index_among(path, names) if paths.is_dir(path) else paths.normal(path)
        if listed is not None:
            weight_map, _ = parse_index(listed, files)
            reading.read_listed(listed, weight_map)
            return reading.result(weight_map)
        numbered = [name for name in names if NUMBERED.fullmatch(name)]
        reading.read_unlisted(f"{path}/{name}" for name in numbered)
        reading.find_gaps(path, numbered)
        return reading.result({})


@dataclass(slots=True)
class _Reading(Reading):
    """With the index of each file."""

    options: ReadOptions = ReadOptions()
    parts: list[CheckpointIndex] = field(default_factory=list)

    def read_one(self, path: str, size: int) -> Collection[str]:  # noqa: ARG002
        part = torch_file.read_file(path, options=self.options)
        self.parts.append(part)
        self.problems += part.problems
        return {entry.fqn for entry in part.entries}

    def result(self, weight_map: Mapping[str, str]) -> CheckpointIndex:
        """The index of all files; of a name in two of them, the file that is listed counts."""
        holders: dict[str, list[str]] = defaultdict(list)
        for path, names in self.names.items():
            for fqn in names:
                holders[fqn].append(path)
        several = {fqn: held for fqn, held in holders.items() if len(held) > 1}
        counting, doubles = owners(several, weight_map)
        index = CheckpointIndex(
            root=self.root,
            format=torch_file.FORMAT,
            tensors=(),
            files=tuple(sorted(self.files)),
            ties=tuple(tie for part in self.parts for tie in part.ties),
            notes=tuple(note for part in self.parts for note in part.notes),
            problems=(
                *self.missing,
                *self.problems,
                *(both_hold(*two, fqns) for two, fqns in doubles.items()),
            ),
        )
        return index.holding(
            entry
            for part in self.parts
            for entry in part.entries
            if counting.get(entry.fqn, part.root) == part.root
        )
