"""Checkpoints of many files as Hugging Face names them: ``NAME-00001-of-00003`` and an index JSON.

Which files belong together, what each should hold and which are missing, for safetensors and .bin
files. What is in one is read by its format (`Reading.read_one`).
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from posixpath import basename

from ckpt_tools.core.index import FileEntry
from ckpt_tools.core.text import is_name, is_text, some
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    UnreadableError,
    paths_instead,
    unreadable,
)
from ckpt_tools.formats.foreign import not_a, sniff
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

INDEX_SUFFIX = ".index.json"
_USUAL_INDEX = "model.safetensors.index.json"
NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.(safetensors|bin)")
_HEAD = 64 << 10  # bytes of each file of a store, which are asked for together: most headers
_SHOWN = 3  # names shown of a longer list
_MOST_MISSING = 1000  # a gap in numbers is not listed further than this


def names_in(folder: str, suffix: str) -> list[str]:
    """The names of a folder's files with this suffix, and of their index JSON, sorted."""
    ends = (suffix, suffix + INDEX_SUFFIX)
    try:
        ours = sorted(n for n in paths.listdir(folder) if n.endswith(ends) and n[0] != ".")
        return [name for name in ours if not paths.is_dir(paths.joined(folder, name))]
    except OSError as error:
        raise unreadable(folder, error, doing="listed") from error


def index_among(folder: str, names: Iterable[str]) -> str | None:
    """The path of the index JSON among these names, None when there is none.

    Raises CheckpointError when there are several.
    """
    listed = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if _USUAL_INDEX in listed:
        return paths.joined(folder, _USUAL_INDEX)
    if len(listed) > 1:
        raise CheckpointError(
            f"{folder} holds {len(listed)} checkpoints: {some(listed, _SHOWN)}.",
            hint=f"Name one of them: {paths.joined(folder, listed[0])}",
        )
    return paths.joined(folder, listed[0]) if listed else None


def parse_index(path: str, files: Files) -> tuple[dict[str, str], int | None]:
    """What an index JSON says: the full path of each tensor's file, and the bytes of all tensors.

    Raises UnreadableError when it is not sound.
    """
    data = files.read(path, 0, files.size(path))
    kind = sniff(data[:64])
    if kind not in ("json", "unknown"):
        raise not_a("JSON file", path, kind)
    try:
        raw: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} is not valid JSON: {error}.") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(weight_map, dict):
        raise UnreadableError(f"{path} has no weight_map.")
    folder = paths.folder_of(path)
    placed: dict[str, str] = {}
    for fqn, name in weight_map.items():
        try:
            is_named = is_name(fqn) and isinstance(name, str) and is_text(name)
            placed[fqn] = paths.joined(folder, paths.inside(name if is_named else ""))
        except UnreadableError as error:
            where = f"{fqn!r:.80} is in {name!r:.60}"
            raise UnreadableError(f"{path}: {where}, which is not a file beside it.") from error
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float) and total.is_integer():  # some tools divide on the way
        total = int(total)
    return placed, total if isinstance(total, int) else None


@dataclass(slots=True)
class Reading(ABC):
    """The files of one checkpoint, read one after another; what cannot be read is a problem.

    ``names`` are the names in each file that was read, by its path. ``missing`` are the problems of
    files that others prove to have been there: they explain the holes among the other problems.
    """

    root: str
    opened: Files
    files: list[FileEntry] = field(default_factory=list)
    names: dict[str, Collection[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[CheckpointError] = field(default_factory=list)
    missing: list[CheckpointError] = field(default_factory=list)

    @abstractmethod
    def read_one(self, path: str, size: int) -> Collection[str]:
        """Take in a file of ``size`` bytes, and give the names in it. Raises CheckpointError."""

    def read(self, file_paths: Iterable[str], *, by_file: Mapping[str, Sequence[str]]) -> None:
        """Read files; a problem that names nothing is about all that the file should hold."""
        file_paths = [*file_paths]
        with suppress(CheckpointError):  # it is said of each when it is read
            self.opened.fetch(((path, 0, _HEAD) for path in file_paths), most=_HEAD)
        for path in file_paths:
            size, known = None, len(self.problems)
            try:
                size = self.opened.size(path)
                self.names[path] = self.read_one(path, size)
            except CheckpointError as error:
                self.problems.append(error)
            if path in by_file:
                self.problems[known:] = [
                    problem if problem.about else problem.concerning(by_file[path])
                    for problem in self.problems[known:]
                ]
            self.files.append(FileEntry(path, size))

    def read_unlisted(self, file_paths: Iterable[str]) -> None:
        """Read files that no index lists. Raises the first problem when none can be read."""
        self.read(file_paths, by_file={})
        if self.problems and not self.names:
            raise self.problems[0]

    def read_listed(self, listed: str, weight_map: Mapping[str, str]) -> None:
        """Read the files of an index JSON, and hold both against each other."""
        index = basename(listed)
        by_file: dict[str, list[str]] = defaultdict(list)
        for fqn, path in sorted(weight_map.items()):
            by_file[path].append(fqn)
        there = [path for path in by_file if paths.is_file(path) or paths.special(path)]
        self.read(there, by_file=by_file)
        for path in sorted(by_file.keys() - there):
            what = "is a folder" if paths.is_dir(path) else "does not exist"
            missing = IncompleteError(
                f"{path} {what}; {index} has {some(by_file[path], _SHOWN)} in it.",
                hint="Copy the missing file into the folder, or download it again.",
                about=by_file[path],
            )
            self.files.append(FileEntry(path, None))
            self.problems.append(missing)
        for path, held in self.names.items():
            lacking = [fqn for fqn in by_file[path] if fqn not in held]
            extra = sorted(fqn for fqn in held if weight_map.get(fqn) != path)
            if lacking:
                text = f"{path} lacks {some(lacking, _SHOWN)}; {index} has it there."
                self.problems.append(IncompleteError(text, about=lacking))
            if extra:
                is_unknown = weight_map.keys().isdisjoint(extra)
                way = " -x leaves out what the index does not have." if is_unknown else ""
                disagreement = CheckpointError(
                    f"{path} holds {some(extra, _SHOWN)}; {index} does not have it there.",
                    hint=f"They are from two saves, or one was edited.{way}",
                    about=extra,
                )
                self.problems.append(disagreement)

    def lacks(self, path: str, problem: CheckpointError) -> None:
        """Take in a file that others prove to have been there."""
        self.files.append(FileEntry(path, None))
        self.missing.append(problem)

    def find_gaps(self, folder: str, present: Iterable[str]) -> None:
        """Take in what the numbers in ``NAME-i-of-N`` names prove to be missing."""
        families: dict[tuple[str, str], list[re.Match[str]]] = defaultdict(list)
        for name in present:
            match = NUMBERED.fullmatch(name)
            if match:
                families[match[1], match[4]].append(match)
        for (stem, suffix), matches in sorted(families.items()):
            counts = sorted({int(match[3]) for match in matches})
            if len(counts) > 1:
                self.missing.append(two_saves(folder, counts))
                continue
            width = len(matches[0][2])
            numbers = {int(match[2]) for match in matches}
            top = counts[0] - (0 in numbers)  # some count from 0
            for number in absent(numbers, top):
                path = f"{folder}/{stem}-{number:0{width}}-of-{matches[0][3]}.{suffix}"
                self.lacks(path, IncompleteError(f"{path} does not exist."))


def owners(
    holders: Mapping[str, Sequence[str]], weight_map: Mapping[str, str]
) -> tuple[dict[str, str], dict[tuple[str, str], list[str]]]:
    """Of names that several files hold the one that counts: the listed one, else the first.

    With it the names for which nothing says so, by the first two files that hold them.
    """
    counting: dict[str, str] = {}
    doubles: dict[tuple[str, str], list[str]] = defaultdict(list)
    for fqn, (first, second, *more) in sorted(holders.items()):
        listed = weight_map.get(fqn)
        counting[fqn] = listed if listed in (first, second, *more) else first
        if counting[fqn] != listed:
            doubles[first, second].append(fqn)
    return counting, doubles


def two_saves(folder: str, counts: Sequence[int]) -> CheckpointError:
    """The error for files that count to different numbers."""
    shown = " and ".join(f"-of-{count:05}" for count in counts)
    return CheckpointError(
        f"{folder} holds files of more than one save: {shown}.",
        hint="Move the files of the other save away.",
    )


def absent(numbers: Collection[int], top: int) -> list[int]:
    """The numbers from 1 to ``top`` that are not there, a thousand of them at most."""
    return list(islice((n for n in range(1, top + 1) if n not in numbers), _MOST_MISSING))


def only_a_part(path: str, files: Files) -> IncompleteError | None:
    """The error for one numbered file that is read by itself; None for one that is all there was.

    It is about the names that an index beside the file has in others, and without one about
    nothing: what the others held is then not known.
    """
    place = paths.normal(path)
    folder, name = paths.folder_of(place), basename(place)
    match = NUMBERED.fullmatch(name)
    if match is None or int(match[3]) < 2:
        return None
    about: list[str] = []
    beside = paths.joined(folder, f"{match[1]}.{match[4]}.index.json")
    if paths.is_file(beside):
        weight_map, _ = parse_index(beside, files)
        about = sorted(fqn for fqn, file in weight_map.items() if file != place)
        if not about:
            return None
    others = f"; {some(about, _SHOWN)} are in the others" if about else ""
    return IncompleteError(
        f"{place} is file {int(match[2])} of {int(match[3])} of one checkpoint{others}.",
        hint="Give the folder instead, with all of its files"
        + (", or choose by name what is in this file." if about else "."),
        instead=paths_instead(path, [folder]),
        about=about,
    )
