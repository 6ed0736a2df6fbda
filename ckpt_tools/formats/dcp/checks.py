"""Checks a DCP directory by `.metadata` and file sizes: which files are missing or short, which
entries are in them, and what is still complete.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.index import CheckpointIndex, Grid, GridChunks
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
    """Missing and short files, each with the names that it damages."""
    needs: dict[str, int] = defaultdict(int)
    for path, end in _ends(index):
        if end > needs[path]:  # noqa: PLR1730 - max would take twice as long, a million times
            needs[path] = end
    bad = {}
    for path, need in needs.items():
        size = sizes.get(os.path.relpath(path, index.root))
        if size is None or size < need:
            bad[path] = size
    if not bad:
        return []
    damaged = _names_in(index, bad)
    missing = sorted(path for path, size in bad.items() if size is None)
    problems: list[CheckpointError] = []
    if missing:
        shown = ", ".join(os.path.basename(path) for path in missing)
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
    for entry in index.tensors:
        for chunk in entry.chunks:
            for path, offset, length in (chunk.data, *chunk.replicas):
                is_lost = path in bad and offset + length > (bad[path] or 0)
                if is_lost and 0 not in chunk.box.sizes:
                    damaged[path].add(entry.fqn)
    for item in index.objects:
        path, offset, length = item.data
        if path in bad and offset + length > (bad[path] or 0):
            damaged[path].add(item.fqn)
    return damaged


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
    return text
