"""safetensors checkpoints: one file, a Hugging Face folder, or what torch's DCP writes as such.

Finds the files that belong together and what says so: an index JSON, the numbers in their names,
or nothing. What a header may hold is `safetensors_header`'s, what many files are together is
`safetensors_parts`'s. Only headers are read, and the eight bytes of a scalar that torch may have
lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from ckpt_tools.core.index import CheckpointIndex, FileEntry, TensorEntry
from ckpt_tools.errors import CheckpointError, IncompleteError, UnreadableError
from ckpt_tools.formats.options import ReadOptions
from ckpt_tools.formats.safetensors import join as parts_of
from ckpt_tools.formats.safetensors.header import (
    Header,
    foreign,
    is_text,
    length_problem,
    looks_like_safetensors,
    parse_header,
    read_header,
)
from ckpt_tools.formats.safetensors.join import (
    NUMBERED,
    SHARD,
    Gaps,
    Part,
    listing,
    make_part,
)
from ckpt_tools.storage import paths
from ckpt_tools.storage.paths import Place
from ckpt_tools.storage.reader import Files

__all__ = ["Header", "matches", "read_header", "read_index"]

FORMAT = "safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_USUAL_INDEX = "model.safetensors.index.json"
_CONSOLIDATED_FROM = "sharded"  # where torch's writer leaves the shards that it consolidated
_DEFAULT = ReadOptions()


@dataclass(slots=True)
class _Reading:
    """What has been found so far; becomes a CheckpointIndex at the end."""

    root: str
    files: list[FileEntry] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    tensors: list[TensorEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[CheckpointError] = field(default_factory=list)

    def result(self, *, world_size: int | None = None) -> CheckpointIndex:
        return CheckpointIndex(
            root=self.root,
            format=FORMAT,
            tensors=tuple(self.tensors),
            files=tuple(sorted(set(self.files), key=lambda file: file.path)),
            world_size=world_size,
            notes=tuple(self.notes),
            problems=tuple(self.problems),
        )


@dataclass(frozen=True, slots=True)
class _Index:
    """An index JSON: which file holds which tensor, by full path, and the bytes of all tensors."""

    path: Place
    weight_map: dict[str, str]
    total_size: int | None


def matches(path: str) -> bool:
    """Whether this is a safetensors file, an index of some, or a folder that has one of them."""
    place = Place(path)
    if place.is_dir():
        return bool(_names_in(place))
    if _is_ours(place.name):
        return place.exists()
    if not place.is_file():
        return False
    return looks_like_safetensors(paths.head(path, 16))


def _is_ours(name: str) -> bool:
    return name.endswith((SUFFIX, INDEX_SUFFIX)) and not name.startswith(".")


def _names_in(folder: Place) -> list[str]:
    """The names of the folder's files that may be ours, sorted."""
    try:
        children = [child for child in folder.iterdir() if _is_ours(child.name)]
        return sorted(child.name for child in children if not child.is_dir())
    except OSError as error:
        raise UnreadableError(f"{folder} cannot be listed: {error.strerror}.") from error


def read_index(
    path: str,
    *,
    options: ReadOptions = _DEFAULT,  # noqa: ARG001 - all readers take them; no pickles here
) -> CheckpointIndex:
    """Index one file, an index JSON with its files, or a folder of files.

    Raises CheckpointError when nothing in it can be read; anything less is in ``problems``.
    """
    place = Place(path)
    reading = _Reading(path)
    with Files() as files:
        if place.is_dir():
            return _read_folder(reading, place, files)
        if path.endswith(INDEX_SUFFIX):
            index = _parse_index(place, files)
            _read_listed(reading, index, files)
            _check_consolidated(reading, place.parent, files)
            return reading.result()
        return _read_single(reading, place, files)


# ------------------------------------------------------------------------------------- single files


def _read_single(reading: _Reading, place: Place, files: Files) -> CheckpointIndex:
    """One file by itself, whatever else lies beside it."""
    _read_parts(reading, [str(place)], files)
    if not reading.parts:
        raise reading.problems[0]
    _join(reading)
    shard, numbered = SHARD.fullmatch(place.name), NUMBERED.fullmatch(place.name)
    if shard:
        part = IncompleteError(
            f"{place} holds only what rank {int(shard[1]) - 1} saved of a distributed checkpoint.",
            hint=f"Give the folder instead: {place.parent}",
        )
        reading.problems.insert(0, part)
    elif numbered and int(numbered[3]) > 1:
        reading.notes.append(
            f"{place.name} is file {int(numbered[2])} of {int(numbered[3])}; "
            f"the folder {place.parent} holds the others."
        )
    if not shard:
        _check_consolidated(reading, place.parent, files)
    return reading.result()


def _read_parts(reading: _Reading, file_paths: Iterable[str], files: Files) -> None:
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


def _join(reading: _Reading, weight_map: Mapping[str, str] | None = None) -> None:
    joined = parts_of.join(reading.parts, weight_map=weight_map)
    reading.tensors.extend(joined.tensors)
    reading.problems.extend(joined.problems)


# ------------------------------------------------------------------------------------------ folders


def _read_folder(reading: _Reading, folder: Place, files: Files) -> CheckpointIndex:
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
    _read_parts(reading, [str(folder / name) for name in names], files)
    if not reading.parts:
        raise reading.problems[0]
    _join(reading)
    return _conclude_unlisted(reading, folder, names)


def _find_index(folder: Place, present: Sequence[str]) -> Place | None:
    """The index JSON to go by, None when there is none."""
    found = [name for name in present if name.endswith(INDEX_SUFFIX)]
    if _USUAL_INDEX in found:
        return folder / _USUAL_INDEX
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} checkpoints: {listing(found)}.",
            hint=f"Name one of them: {folder / found[0]}",
        )
    return folder / found[0] if found else None


def _conclude_unlisted(reading: _Reading, folder: Place, names: Sequence[str]) -> CheckpointIndex:
    """Without an index: what the numbers in the names say, and what nothing says."""
    ranks = [int(match[1]) for name in names if (match := SHARD.fullmatch(name))]
    _add_gaps(reading, parts_of.gaps_in_ranks(str(folder), names, reading.tensors))
    _add_gaps(reading, parts_of.gaps_in_numbers(str(folder), names))
    if ranks:
        reading.notes.append(
            f"Shapes are proven by the boxes of {max(ranks)} ranks' files. The format states no "
            f"shape, so if more than {max(ranks)} ranks saved it, tensors would end early unseen."
        )
    stems = {match[1] if (match := NUMBERED.fullmatch(name)) else name for name in names}
    if not ranks and len(stems) > 1:
        reading.notes.append(
            f"No index says what belongs together; {len(names)} files are read as one checkpoint."
        )
    if not ranks and _is_consolidated(folder):
        reading.problems.append(_unfinished(folder))
    return reading.result(world_size=max(ranks, default=None))


def _add_gaps(reading: _Reading, gaps: Gaps) -> None:
    """Missing files come first: they explain the holes that follow from them."""
    reading.files.extend(FileEntry(path, None) for path in gaps.paths)
    reading.problems[:0] = gaps.problems


# ---------------------------------------------------------------------------------------- the index


def _parse_index(path: Place, files: Files) -> _Index:
    """An index JSON, checked. Raises CheckpointError when it is not sound."""
    data = files.read(str(path), 0, files.size(str(path)))
    try:
        raw: object = json.loads(data)
    except (ValueError, RecursionError) as error:
        stranger = None if data.startswith(b"{") else foreign(str(path), data)
        raise stranger or UnreadableError(f"{path} is not sound JSON: {error}.") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(weight_map, dict):
        raise UnreadableError(f"{path} has no weight_map.")
    for fqn, name in weight_map.items():
        if not is_text(fqn) or not isinstance(name, str) or not _is_below(name):
            raise UnreadableError(
                f"{path}: {fqn!r} is in {name!r:.60}, which is no file beside it."
            )
    placed = {fqn: str(path.parent / name) for fqn, name in weight_map.items()}
    return _Index(path, placed, _total_size(raw))


def _is_below(name: str) -> bool:
    """Whether this names something beside the index or below it."""
    return (
        is_text(name)
        and not PurePosixPath(name).is_absolute()
        and ".." not in PurePosixPath(name).parts
    )


def _total_size(raw: Mapping[str, object]) -> int | None:
    metadata = raw.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, float):  # some tools divide on the way
        return int(total) if total.is_integer() else None
    return total if isinstance(total, int) else None


def _read_listed(reading: _Reading, index: _Index, files: Files) -> None:
    """The files of an index, and both held against each other."""
    by_file: dict[str, list[str]] = {}
    for fqn, path in sorted(index.weight_map.items()):
        by_file.setdefault(path, []).append(fqn)
    there = sorted(p for p in by_file if Place(p).is_file() or paths.special(p))
    _read_parts(reading, there, files)
    for path in sorted(by_file.keys() - there):
        reading.files.append(FileEntry(path, None))
        reading.problems.append(
            IncompleteError(
                f"{path} is not there; {index.path.name} has {listing(by_file[path])} in it.",
                hint="Copy the missing file into the folder, or download it again.",
                about=by_file[path],
            )
        )
    for part in reading.parts:
        reading.problems.extend(_disagreements(part, by_file[part.path], index))
    _join(reading, index.weight_map)
    _check_total(reading, index)


def _disagreements(part: Part, listed: Sequence[str], index: _Index) -> list[CheckpointError]:
    """Names that a file lacks, or has, against its index."""
    held = part.header.tensors
    problems: list[CheckpointError] = []
    lacking = [fqn for fqn in listed if fqn not in held]
    extra = sorted(fqn for fqn in held if index.weight_map.get(fqn) != part.path)
    if lacking:
        problems.append(
            IncompleteError(
                f"{part.path} lacks {listing(lacking)}; {index.path.name} has it there.",
                about=lacking,
            )
        )
    if extra:
        problems.append(
            CheckpointError(
                f"{part.path} holds {listing(extra)}; {index.path.name} does not have it there.",
                hint="They are of two saves, or one was edited without the other.",
                about=extra,
            )
        )
    return problems


def _check_total(reading: _Reading, index: _Index) -> None:
    found = sum(entry.nbytes for entry in reading.tensors)
    if index.total_size is not None and index.total_size != found and not reading.problems:
        reading.notes.append(
            f"{index.path.name} gives a total_size of {index.total_size:,} bytes; "
            f"the tensors have {found:,}."
        )


def _look_beside(reading: _Reading, folder: Place, names: Sequence[str], files: Files) -> None:
    """Files that the index leaves out: harmless, unless they hold the same names otherwise."""
    listed = {file.path for file in reading.files}
    known = {entry.fqn for entry in reading.tensors}
    for name in names:
        if str(folder / name) in listed:
            continue
        beside = _Reading(str(folder))
        _read_parts(beside, [str(folder / name)], files)
        same = [fqn for part in beside.parts for fqn in part.header.tensors if fqn in known]
        if same and not SHARD.fullmatch(name):
            reading.problems.append(_second_checkpoint(folder, name, same))
        else:
            reading.notes.append(f"{name} is not in the index, and not read.")


def _second_checkpoint(folder: Place, name: str, same: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{folder / name} is not in the index, and it holds {listing(sorted(same))}, as the "
        "index's own files do: two checkpoints in one folder.",
        hint=f"Name the one that you mean: {folder / name} or {folder / _USUAL_INDEX}",
    )


# --------------------------------------------------------------------- torch's consolidated folders


def _is_consolidated(folder: Place) -> bool:
    """Whether torch's writer made this folder's files from the shards in its sub-folder."""
    shards = folder / _CONSOLIDATED_FROM
    return shards.is_dir() and any(SHARD.fullmatch(name) for name in _names_in(shards))


def _unfinished(folder: Place) -> IncompleteError:
    return IncompleteError(
        f"{folder} has shards in {_CONSOLIDATED_FROM}/ but no index: torch writes it last, so the "
        "consolidation stopped half-way.",
        hint=f"Read the shards: {folder / _CONSOLIDATED_FROM}",
    )


def _check_consolidated(reading: _Reading, folder: Place, files: Files) -> None:
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
        reading.problems.append(
            CheckpointError(
                f"{folder}: {listing(zeros)}: torch's consolidation leaves scalars as zero, "
                "whatever was saved.",
                hint=f"Read the shards, which have them: {folder / _CONSOLIDATED_FROM}",
                about=zeros,
            )
        )
