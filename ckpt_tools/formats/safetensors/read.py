"""safetensors checkpoints: one file, a Hugging Face folder, or what torch's DCP writes as such.

Finds the files that belong together and what says so: an index JSON, the numbers in their names,
or nothing. `header` parses and checks each file, `join` makes one checkpoint of many. Only headers
are read, and the eight bytes of a scalar that torch may have lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, IncompleteError, paths_instead
from ckpt_tools.formats.foreign import sniff
from ckpt_tools.formats.numbered import (
    INDEX_SUFFIX,
    NUMBERED,
    Reading,
    index_among,
    names_in,
    only_a_part,
    parse_index,
)
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.safetensors import join as parts_of
from ckpt_tools.formats.safetensors.header import PlacedHeader, length_problem, parse_header, placed
from ckpt_tools.formats.safetensors.join import SHARD
from ckpt_tools.formats.slices import said_by_header
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

FORMAT = "safetensors"
SUFFIX = ".safetensors"
_MODEL = "model.safetensors"
# Beside a model: Meta's names of it, an adapter, another precision (model.fp16), a second download.
_COPY = re.compile(r"(consolidated.*|adapter_model|model(\..+| ?\(\d+\)))\.safetensors")
_CONSOLIDATED_FROM = "sharded"  # where torch's writer leaves the shards that it consolidated


@dataclass(slots=True)
class _Reading(Reading):
    """With the header of each file, and its tensors as the checkpoint has them."""

    parts: list[PlacedHeader] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)

    def read_one(self, path: str, size: int) -> Collection[str]:
        header = placed(parse_header(self.opened, path, offset=0, length=size))
        self.parts.append(header)
        short = length_problem(header, end=size)
        self.problems += [] if short is None else [short]
        return header.tensors.keys()

    def join(self, weight_map: Mapping[str, str]) -> None:
        tensors, problems = parts_of.join(self.parts, weight_map=weight_map)
        self.tensors += tensors
        self.problems += problems

    def result(self, *, world_size: int | None = None) -> CheckpointIndex:
        said = (said_by_header(part.path, part.metadata) for part in self.parts)
        strings = parts_of.strings_of(self.parts)
        return CheckpointIndex(
            root=self.root,
            format=FORMAT,
            tensors=tuple(self.tensors),
            files=tuple(sorted(self.files)),
            world_size=world_size,
            notes=tuple(self.notes),
            problems=(*islice(filter(None, said), 1), *self.missing, *self.problems),
            strings=strings,
            strings_for={e.fqn: (e.dtype, e.shape) for e in self.tensors} if strings else {},
        )


def matches(path: str) -> bool:
    """Whether this is a safetensors file, an index of some, or a folder that has one of them."""
    place = paths.normal(path)
    if paths.is_dir(place):
        return bool(names_in(place, SUFFIX))
    if not paths.is_file(place):
        return False
    name = os.path.basename(place)
    is_ours = name.endswith((SUFFIX, SUFFIX + INDEX_SUFFIX)) and not name.startswith(".")
    return is_ours or sniff(paths.head(path, 16)) == "safetensors"


def read_index(
    path: str,
    *,
    options: ReadOptions = ReadOptions(),  # noqa: ARG001 - all readers take them; no pickles here
) -> CheckpointIndex:
    """Index one file, an index JSON with its files, or a folder of files.

    Raises CheckpointError when nothing in it can be read; anything less is in ``problems``.
    """
    place = paths.normal(path)
    is_folder = paths.is_dir(place)
    folder = place if is_folder else paths.folder_of(place)
    names = names_in(place, SUFFIX) if is_folder else [os.path.basename(place)]
    listed = index_among(folder, names)
    with Files() as files:
        reading = _Reading(path, files)
        if listed is None and is_folder:
            return _read_folder(reading, folder, names)
        if listed is None:
            return _read_single(reading, place)
        weight_map, total_size = parse_index(listed, files)
        reading.read_listed(listed, weight_map)
        reading.join(weight_map)
        total = sum(entry.nbytes for entry in reading.tensors)
        if total_size not in (None, total) and not reading.problems:
            reading.notes.append(
                f"{os.path.basename(listed)} gives a total_size of {total_size:,} bytes; "
                f"the tensors have {total:,}."
            )
        _look_beside(reading, listed, (paths.joined(folder, name) for name in names))
        _check_consolidated(reading, folder)
        return reading.result()


def _read_single(reading: _Reading, place: str) -> CheckpointIndex:
    """One file by itself, whatever else is in its folder."""
    reading.read_unlisted([place])
    reading.join({})
    folder = paths.folder_of(place)
    shard = SHARD.fullmatch(os.path.basename(place))
    if shard:
        part = IncompleteError(
            f"{place} holds only what rank {int(shard[1]) - 1} saved of a distributed checkpoint.",
            hint="Give the folder instead.",
            instead=paths_instead(place, [folder]),
        )
        reading.problems.insert(0, part)
    else:
        part_of = only_a_part(place, reading.opened)
        reading.problems[:0] = [] if part_of is None else [part_of]
        _check_consolidated(reading, folder)
    return reading.result()


# ------------------------------------------------------------------------ folders without an index


def _read_folder(reading: _Reading, folder: str, names: list[str]) -> CheckpointIndex:
    """All files as one checkpoint; what is missing is what the numbers in their names say."""
    if not names:
        raise IncompleteError(f"{folder} holds no {SUFFIX} file.")
    # Not those that hold the folder's model again, or an adapter of it.
    copies = [name for name in names if _COPY.fullmatch(name)]
    numbered = filter(None, map(NUMBERED.fullmatch, names))
    if copies and (_MODEL in names or any(match[1] == "model" for match in numbered)):
        reading.notes.append(f"Beside the model, and not read: {some(copies, 5)}.")
        names = [name for name in names if name not in copies]
    reading.read_unlisted(paths.joined(folder, name) for name in names)
    reading.join({})
    ranks = [int(match[1]) for name in names if (match := SHARD.fullmatch(name))]
    reading.find_gaps(folder, [name for name in names if not SHARD.fullmatch(name)])
    parts_of.find_gaps_in_ranks(reading, folder, names, reading.tensors)
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


def _look_beside(reading: _Reading, index: str, present: Iterable[str]) -> None:
    """Files that the index leaves out: harmless, unless they hold the same names otherwise."""
    listed = {file.path for file in reading.files}
    known = {entry.fqn for entry in reading.tensors}
    for path in present:
        if path in listed or not path.endswith(SUFFIX):
            continue
        name = os.path.basename(path)
        beside = _Reading(path, reading.opened)
        beside.read([path], by_file={})
        same = [fqn for fqn in beside.names.get(path, ()) if fqn in known]
        if same and not SHARD.fullmatch(name):
            reading.problems.append(
                CheckpointError(
                    f"{path} is not in the index, and it holds {some(sorted(same), 3)}, as the "
                    "index's own files do: two checkpoints in one folder.",
                    hint=f"Name the one that you mean: {path} or {index}",
                )
            )
        else:
            reading.notes.append(f"{name} is not in the index, and not read.")


# --------------------------------------------------------------------- torch's consolidated folders


def _is_consolidated(folder: str) -> bool:
    """Whether torch's writer made this folder's files from the shards in its sub-folder."""
    shards = paths.joined(folder, _CONSOLIDATED_FROM)
    return paths.is_dir(shards) and any(map(SHARD.fullmatch, names_in(shards, SUFFIX)))


def _check_consolidated(reading: _Reading, folder: str) -> None:
    """Scalars of a consolidated folder: torch 2.13 leaves zeros in their place (a fault of its)."""
    if not _is_consolidated(folder):
        return
    reading.notes.append(f"{_CONSOLIDATED_FROM}/ holds the shards of the same save; not read.")
    lengths = {file.path: file.length or 0 for file in reading.files}
    scalars = [(entry.fqn, entry.chunks[0].data) for entry in reading.tensors if not entry.shape]
    zeros = [
        fqn
        for fqn, data in scalars
        if data.offset + data.length <= lengths[data.path] and not any(reading.opened.read(*data))
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
