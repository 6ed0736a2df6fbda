"""The data files of a DCP directory: which are missing or short, which entries are in them, and
what is still complete.

All by what `.metadata` says and by the sizes of files; none is opened.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Grid
from ckpt_tools.core.text import are, some
from ckpt_tools.errors import CheckpointError, IncompleteError, UnreadableError
from ckpt_tools.formats.foreign import lfs_pointer, sniff
from ckpt_tools.storage import paths

DATA_FILE = re.compile(r"__(\d+)_(\d+)\.distcp")
# What a rank writes of its own with use_collectives=False.
RANK_METADATA = re.compile(r"__(\d+)\.metadata")


def rank_of(path: str) -> int | None:
    """The rank that wrote a data file, by its name."""
    match = DATA_FILE.fullmatch(os.path.basename(path))
    return int(match[1]) if match else None


def problems_of(index: CheckpointIndex, sizes: Mapping[str, int]) -> list[CheckpointError]:
    """What keeps a DCP directory from being whole: files missing or short, holes, overlaps.

    ``sizes`` are the lengths in bytes of the files that are there, by name.
    """
    ends: dict[str, list[int]] = defaultdict(list)
    for entry in index.tensors:
        for path, end in entry.ends():
            ends[path].append(end)
    for item in index.objects:
        ends[item.data.path].append(item.data.offset + item.data.length)
    problems: list[CheckpointError] = []
    shared = {path for path, own in ends.items() if len(set(own)) < len(own)}
    if shared and index.format == "dcp":  # of safetensors, an empty chunk ends with its neighbour
        problems.append(_at_one_place(index, shared))
    problems += _file_problems(index, sizes, {path: max(own) for path, own in ends.items()})
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


def _file_problems(
    index: CheckpointIndex, sizes: Mapping[str, int], needs: Mapping[str, int]
) -> Iterator[CheckpointError]:
    """Files that are missing, or shorter than they need to be, with the names that this damages."""
    found = {path: sizes.get(os.path.relpath(path, index.root)) for path in needs}
    bad = {path: size for path, size in found.items() if size is None or size < needs[path]}
    if not bad:
        return
    damaged: dict[str, set[str]] = {path: set() for path in bad}
    for fqn, (path, offset, length), box_sizes in _items(index):
        if path in bad and offset + length > (bad[path] or 0) and 0 not in box_sizes:
            damaged[path].add(fqn)
    missing = sorted(path for path, size in bad.items() if size is None)
    if missing:
        folders = {path: " (a folder)" for path in missing if paths.is_dir(path)}
        shown = ", ".join(
            os.path.relpath(path, index.root) + folders.get(path, "") for path in missing
        )
        yield IncompleteError(
            f"{index.root}: {len(missing)} of {len(needs)} data files {are(len(missing))} not "
            f"there: {shown}.",
            hint=_damage(index, damaged, missing),
            about=sorted(set().union(*(damaged[path] for path in missing))),
        )
    for path, size in sorted(bad.items()):
        if size is not None and sniff(paths.head(path, 64)) == "lfs":
            yield lfs_pointer(path).concerning(sorted(damaged[path]))
        elif size is not None:
            yield UnreadableError(
                f"{path} is truncated: {size:,} bytes, the index needs {needs[path]:,}.",
                hint=_damage(index, damaged, [path]),
                about=sorted(damaged[path]),
            )


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
