"""safetensors checkpoints: one file, a Hugging Face folder, or what torch's DCP writes as such.

Finds the files that belong together and what says so: an index JSON, the numbers in their names,
or nothing. `header` parses and checks each file, `join` makes one checkpoint of many. Only headers
are read, and the eight bytes of a scalar that torch may have lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ckpt_tools.core.index import CheckpointIndex, FileEntry, TensorEntry
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, IncompleteError, paths_instead, unreadable
from ckpt_tools.formats.numbered import (
    NUMBERED,
    Gaps,
    Index,
    gaps_in_numbers,
    only_a_part,
    parse_index,
)
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.formats.safetensors import join as parts_of
from ckpt_tools.formats.safetensors.header import (
    foreign,
    length_problem,
    looks_like_safetensors,
    parse_header,
)
from ckpt_tools.formats.safetensors.join import (
    SHARD,
    TensorFile,
    make_part,
)
from ckpt_tools.formats.slices import said_by_header
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

FORMAT = "safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_USUAL_INDEX = "model.safetensors.index.json"
_MODEL = "model.safetensors"
# Beside a model: Meta's names of it, an adapter, another precision (model.fp16), a second download.
_COPY = re.compile(r"(consolidated.*|adapter_model|model(\..+| ?\(\d+\)))\.safetensors")
_CONSOLIDATED_FROM = "sharded"  # where torch's writer leaves the shards that it consolidated


@dataclass(slots=True)
class _IndexBuilder:
    """What has been found so far; becomes a CheckpointIndex at the end."""

    root: str
    files: list[FileEntry] = field(default_factory=list)
    parts: list[TensorFile] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[CheckpointError] = field(default_factory=list)

    def result(self, *, world_size: int | None = None) -> CheckpointIndex:
        said = (said_by_header(part.path, part.header.metadata) for part in self.parts)
        return CheckpointIndex(
            root=self.root,
            format=FORMAT,
            tensors=tuple(self.tensors),
            files=tuple(sorted(set(self.files), key=lambda file: file.path)),
            world_size=world_size,
            notes=tuple(self.notes),
            problems=(*islice(filter(None, said), 1), *self.problems),
            strings=parts_of.strings_of(self.parts, self.tensors),
        )


def matches(path: str) -> bool:
    """Whether this is a safetensors file, an index of some, or a folder that has one of them."""
    place = paths.normal(path)
    if paths.is_dir(place):
        return bool(_names_in(place))
    if not paths.is_file(place):
        return False
    return _is_ours(os.path.basename(place)) or looks_like_safetensors(paths.head(path, 16))


def _is_ours(name: str) -> bool:
    return name.endswith((SUFFIX, INDEX_SUFFIX)) and not name.startswith(".")


def _names_in(folder: str) -> list[str]:
    """The names of the folder's files that may be ours, sorted."""
    try:
        ours = sorted(filter(_is_ours, paths.listdir(folder)))
        return [name for name in ours if not paths.is_dir(paths.joined(folder, name))]
    except OSError as error:
        raise unreadable(folder, error, doing="listed") from error


def read_index(
    path: str,
    *,
    options: ReadOptions = ReadOptions(),  # noqa: ARG001 - all readers take them; no pickles here
) -> CheckpointIndex:
    """Index one file, an index JSON with its files, or a folder of files.

    Raises CheckpointError when nothing in it can be read; anything less is in ``problems``.
    """
    place = paths.normal(path)
    reading = _IndexBuilder(path)
    with Files() as files:
        if paths.is_dir(place):
            return _read_folder(reading, place, files)
        if path.endswith(INDEX_SUFFIX):
            index = _parse_index(place, files)
            _read_listed(reading, index, files)
            _check_consolidated(reading, paths.folder_of(place), files)
            return reading.result()
        return _read_single(reading, place, files)


# ------------------------------------------------------------------------------------- single files


def _read_single(reading: _IndexBuilder, place: str, files: Files) -> CheckpointIndex:
    """One file by itself, whatever else is in its folder."""
    _read_parts(reading, [place], files)
    if not reading.parts:
        raise reading.problems[0]
    _join(reading, {})
    shard = SHARD.fullmatch(os.path.basename(place))
    if shard:
        part = IncompleteError(
            f"{place} holds only what rank {int(shard[1]) - 1} saved of a distributed checkpoint.",
            hint="Give the folder instead.",
            instead=paths_instead(place, [paths.folder_of(place)]),
        )
        reading.problems.insert(0, part)
    if not shard:
        part_of = only_a_part(place, files)
        reading.problems[:0] = [] if part_of is None else [part_of]
        _check_consolidated(reading, paths.folder_of(place), files)
    return reading.result()


def _read_parts(reading: _IndexBuilder, file_paths: Iterable[str], files: Files) -> None:
    """Read each file's header; what cannot be read is a problem, and the others go on."""
    for path in file_paths:
        size = None
        try:
            size = files.size(path)
            header = parse_header(files, path, offset=0, length=size)
            reading.parts.append(make_part(path, header))
            short = length_problem(header, path, end=size)
            if short is not None:
                reading.problems.append(short)
        except CheckpointError as problem:
            reading.problems.append(problem)
        reading.files.append(FileEntry(path, size))


def _join(reading: _IndexBuilder, weight_map: Mapping[str, str]) -> None:
    joined = parts_of.join(reading.parts, weight_map=weight_map)
    reading.tensors.extend(joined.tensors)
    reading.problems.extend(joined.problems)


# ------------------------------------------------------------------------------------------ folders


def _read_folder(reading: _IndexBuilder, folder: str, files: Files) -> CheckpointIndex:
    """A folder: by its index JSON when it has one, else all of its files as one checkpoint."""
    present = _names_in(folder)
    index_path = _find_index(folder, present)
    names = [name for name in present if name.endswith(SUFFIX)]
    if index_path is not None:
        index = _parse_index(index_path, files)
        _read_listed(reading, index, files)
        _look_beside(reading, folder, names, files)
        _check_consolidated(reading, folder, files)
        return reading.result()
    if not names:
        raise IncompleteError(f"{folder} holds no {SUFFIX} file.")
    names = _without_copies(reading, names)
    _read_parts(reading, [paths.joined(folder, name) for name in names], files)
    if not reading.parts:
        raise reading.problems[0]
    _join(reading, {})
    return _conclude_unlisted(reading, folder, names)


def _find_index(folder: str, present: Sequence[str]) -> str | None:
    """The index JSON to go by, None when there is none."""
    index_files = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if _USUAL_INDEX in index_files:
        return paths.joined(folder, _USUAL_INDEX)
    if len(index_files) > 1:
        raise CheckpointError(
            f"{folder} holds {len(index_files)} checkpoints: {some(index_files, 3)}.",
            hint=f"Name one of them: {paths.joined(folder, index_files[0])}",
        )
    return paths.joined(folder, index_files[0]) if index_files else None


def _without_copies(reading: _IndexBuilder, names: list[str]) -> list[str]:
    """The files of a folder without those that hold its model again, or an adapter of it."""
    numbered = filter(None, map(NUMBERED.fullmatch, names))
    copies = [name for name in names if _COPY.fullmatch(name)]
    if _MODEL not in names and all(match[1] != "model" for match in numbered):
        return names
    if copies:
        reading.notes.append(f"Beside the model, and not read: {some(copies, 5)}.")
    return [name for name in names if name not in copies]


def _conclude_unlisted(
    reading: _IndexBuilder, folder: str, names: Sequence[str]
) -> CheckpointIndex:
    """Without an index: what the numbers in the names say, and what nothing says."""
    ranks = [int(match[1]) for name in names if (match := SHARD.fullmatch(name))]
    _add_gaps(reading, parts_of.gaps_in_ranks(folder, names, reading.tensors))
    _add_gaps(reading, gaps_in_numbers(folder, [n for n in names if not SHARD.fullmatch(n)]))
    if ranks:
        reading.notes.append(
            f"Shapes come from the boxes in the files of {max(ranks)} ranks, since the format has "
            f"none: if more than {max(ranks)} ranks saved it, the last rows are missing unnoticed."
        )
    stems = {match[1] if (match := NUMBERED.fullmatch(name)) else name for name in names}
    if not ranks and len(stems) > 1:
        reading.notes.append(
            f"There is no index file; {len(names)} files are read as one checkpoint."
        )
    if not ranks and _is_consolidated(folder):
        reading.problems.append(
            IncompleteError(
                f"{folder} has shards in {_CONSOLIDATED_FROM}/ but no index: torch writes it last, "
                "so the consolidation stopped half-way.",
                hint=f"Read the shards: {paths.joined(folder, _CONSOLIDATED_FROM)}",
            )
        )
    return reading.result(world_size=max(ranks, default=None))


def _add_gaps(reading: _IndexBuilder, gaps: Gaps) -> None:
    """Missing files come first: they explain the holes that follow from them."""
    reading.files.extend(FileEntry(path, None) for path in gaps.paths)
    reading.problems[:0] = gaps.problems
    reading.notes.extend(gaps.notes)


# ---------------------------------------------------------------------------------------- the index


def _parse_index(path: str, files: Files) -> Index:
    """An index JSON. Raises CheckpointError when it is not sound, or something else."""
    head = files.read(path, 0, min(64, files.size(path)))
    stranger = None if head.startswith(b"{") else foreign(path, head)
    if stranger is not None:
        raise stranger
    return parse_index(path, files)


def _read_listed(reading: _IndexBuilder, index: Index, files: Files) -> None:
    """The files of an index, and both held against each other."""
    by_file = index.by_file()
    there = [path for path in by_file if paths.is_file(path) or paths.special(path)]
    for path in there:
        known = len(reading.problems)
        _read_parts(reading, [path], files)
        reading.problems[known:] = [
            problem if problem.about else problem.concerning(by_file[path])
            for problem in reading.problems[known:]
        ]
    for path in sorted(by_file.keys() - there):
        reading.files.append(FileEntry(path, None))
        reading.problems.append(index.missing(path, by_file[path]))
    for part in reading.parts:
        reading.problems.extend(index.disagreements(part.path, part.header.tensors))
    _join(reading, index.weight_map)
    total = sum(entry.nbytes for entry in reading.tensors)
    if index.total_size is not None and index.total_size != total and not reading.problems:
        reading.notes.append(
            f"{index.name} gives a total_size of {index.total_size:,} bytes; "
            f"the tensors have {total:,}."
        )


def _look_beside(reading: _IndexBuilder, folder: str, names: Sequence[str], files: Files) -> None:
    """Files that the index leaves out: harmless, unless they hold the same names otherwise."""
    listed = {file.path for file in reading.files}
    known = {entry.fqn for entry in reading.tensors}
    for name in names:
        path = paths.joined(folder, name)
        if path in listed:
            continue
        beside = _IndexBuilder(folder)
        _read_parts(beside, [path], files)
        same = [fqn for part in beside.parts for fqn in part.header.tensors if fqn in known]
        if same and not SHARD.fullmatch(name):
            usual = paths.joined(folder, _USUAL_INDEX)
            reading.problems.append(
                CheckpointError(
                    f"{path} is not in the index, and it holds {some(sorted(same), 3)}, as the "
                    "index's own files do: two checkpoints in one folder.",
                    hint=f"Name the one that you mean: {path} or {usual}",
                )
            )
        else:
            reading.notes.append(f"{name} is not in the index, and not read.")


# --------------------------------------------------------------------- torch's consolidated folders


def _is_consolidated(folder: str) -> bool:
    """Whether torch's writer made this folder's files from the shards in its sub-folder."""
    shards = paths.joined(folder, _CONSOLIDATED_FROM)
    return paths.is_dir(shards) and any(SHARD.fullmatch(name) for name in _names_in(shards))


def _check_consolidated(reading: _IndexBuilder, folder: str, files: Files) -> None:
    """Scalars of a consolidated folder: torch 2.13 leaves zeros in their place (a fault of its)."""
    if not _is_consolidated(folder):
        return
    reading.notes.append(f"{_CONSOLIDATED_FROM}/ holds the shards of the same save; not read.")
    lengths = {file.path: file.length or 0 for file in reading.files}
    scalars = [(entry.fqn, entry.chunks[0].data) for entry in reading.tensors if not entry.shape]
    zeros = [
        fqn
        for fqn, data in scalars
        if data.offset + data.length <= lengths[data.path] and not any(files.read(*data))
    ]
    if zeros:
        shards = paths.joined(folder, _CONSOLIDATED_FROM)
        reading.problems.append(
            CheckpointError(
                f"{folder}: {some(zeros, 3)}: torch's consolidation leaves scalars as zero, "
                "whatever was saved.",
                hint=f"Read the shards, which have them: {shards}",
                about=zeros,
            )
        )
