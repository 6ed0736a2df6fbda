"""Checks a DCP directory by `.metadata` and file sizes: which files are missing or short, which
entries are in them, and what is still complete.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Grid, GridChunks
from ckpt_tools.core.text import are, some
from ckpt_tools.errors import CheckpointError, IncompleteError, UnreadableError
from ckpt_tools.formats.foreign import is_lfs_pointer, lfs_pointer
from ckpt_tools.storage import paths

DATA_FILE = re.compile(r"__(\d+)_(\d+)\.distcp")


def rank_of(path: str) -> int | None:
    """The rank that wrote a data file, by its name."""
    match = DATA_FILE.fullmatch(os.path.basename(path))
    return int(match[1]) if match else None


def problems_of(index: CheckpointIndex, sizes: Mapping[str, int]) -> list[CheckpointError]:
    """What keeps a DCP directory from being whole: files missing or short, holes, overlaps.

    ``sizes`` are the lengths in bytes of the files that are there, by name.
    """
    problems = _file_problems(index, sizes)
    whole: set[tuple[Grid | None, tuple[int, ...]]] = set()
    for entry in index.tensors:
        kind = entry.grid, entry.shape
        if kind in whole:
            continue
        holes = list(uncovered([entry]))
        problems += holes
        if not holes and entry.grid is not None:
            whole.add(kind)
    return problems


def _file_problems(index: CheckpointIndex, sizes: Mapping[str, int]) -> list[CheckpointError]:
    """Missing and short files, each with the names that it damages, and items at one place."""
    ends: dict[str, list[int]] = defaultdict(list)
    for path, end in _ends(index):
        ends[path].append(end)
    needs = {path: max(own) for path, own in ends.items()}
    shared = {path for path, own in ends.items() if len(set(own)) < len(own)}
    problems: list[CheckpointError] = []
    if shared and index.format == "dcp":  # of safetensors, an empty chunk ends with its neighbour
        problems.append(_at_one_place(index, shared))
    bad = {}
    for path, need in needs.items():
        size = sizes.get(os.path.relpath(path, index.root))
        if size is None or size < need:
            bad[path] = size
    if not bad:
        return problems
    damaged = _names_in(index, bad)
    missing = sorted(path for path, size in bad.items() if size is None)
    if missing:
        folders = {path: " (a folder)" for path in missing if paths.is_dir(path)}
        shown = ", ".join(os.path.basename(path) + folders.get(path, "") for path in missing)
        problems.append(
            IncompleteError(
                f"{index.root}: {len(missing)} of {len(needs)} data files {are(len(missing))} not "
                f"there: {shown}.",
                hint=_damage(index, damaged, missing),
                about=sorted(set().union(*(damaged[path] for path in missing))),
            )
        )
    for path, size in sorted(bad.items()):
        if size is not None and is_lfs_pointer(paths.head(path, 64)):
            problems.append(lfs_pointer(path).concerning(sorted(damaged[path])))
        elif size is not None:
            problems.append(
                UnreadableError(
                    f"{path} is truncated: {size:,} bytes, the index needs {needs[path]:,}.",
                    hint=_damage(index, damaged, [path]),
                    about=sorted(damaged[path]),
                )
            )
    return problems


def _ends(index: CheckpointIndex) -> Iterator[tuple[str, int]]:
    """The file of each chunk and object, and the byte after its last."""
    for entry in index.tensors:
        if isinstance(entry.chunks, GridChunks):
            yield from entry.chunks.ends()
            continue
        for chunk in entry.chunks:
            for path, offset, length in (chunk.data, *chunk.replicas):
                yield path, offset + length
    for item in index.objects:
        yield item.data.path, item.data.offset + item.data.length


def _names_in(index: CheckpointIndex, bad: Mapping[str, int | None]) -> dict[str, set[str]]:
    """The names that have bytes past the end of each bad file."""
    damaged: dict[str, set[str]] = {path: set() for path in bad}
    for fqn, (path, offset, length), sizes in _items(index):
        if path in bad and offset + length > (bad[path] or 0) and 0 not in sizes:
            damaged[path].add(fqn)
    return damaged


def _at_one_place(index: CheckpointIndex, files: Collection[str]) -> CheckpointError:
    """The error for items of these files that lie at the same bytes, as torch never writes them.

    A flipped bit in a pickle's reference gives an item the file of another, at its own offset.
    """
    names: dict[ByteRange, list[str]] = defaultdict(list)
    for fqn, data, _ in _items(index):
        if data.path in files:
            names[data].append(fqn)
    wrong = {fqn for own in names.values() if len(own) > 1 for fqn in own}
    return UnreadableError(
        f"{index.root}/.metadata is damaged: it has several items at the same bytes, of "
        f"{some(sorted(wrong))}.",
        hint="Take .metadata from another copy; which item lies there cannot be known.",
        about=wrong,
    )


def _items(index: CheckpointIndex) -> Iterator[tuple[str, ByteRange, tuple[int, ...]]]:
    """The name, place and sizes of each chunk and object."""
    for entry in index.tensors:
        for chunk in entry.chunks:
            for data in (chunk.data, *chunk.replicas):
                yield entry.fqn, data, chunk.box.sizes
    for item in index.objects:
        yield item.fqn, item.data, ()


def _damage(index: CheckpointIndex, damaged: Mapping[str, set[str]], paths: Sequence[str]) -> str:
    """How much is damaged and what is complete, as text."""
    fqns = set().union(*(damaged[path] for path in paths))
    tensors = [entry for entry in index.tensors if entry.fqn in fqns]
    total = len(index.tensors)
    ranks = {chunk.rank for entry in index.tensors for chunk in entry.chunks}
    bad_ranks = {rank_of(path) for path in damaged}
    intact = sorted(rank for rank in ranks - bad_ranks if rank is not None)
    text = f"Damaged: {len(tensors)} of {total} tensors; {total - len(tensors)} are complete."
    if intact:
        verb = "Rank {} is" if len(intact) == 1 else "Ranks {} are"
        text += f" {verb.format(some([str(rank) for rank in intact], 8))} intact."
    if len(tensors) < total:
        text += "\n`ckpt-tools verify` names them; export with -i or -x rescues what is complete."
    return text
