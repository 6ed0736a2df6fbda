"""Many safetensors files as one checkpoint: whose boxes they are, and whether any file is missing.

torch's HuggingFaceStorageWriter lets every rank write its own files and says in ``__metadata__``
where each box begins, but not how large the tensor is. So shapes are the largest corner seen, and
everything that the file names and the boxes can prove is held against them. This room opens no
file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import compress
from pathlib import Path
from typing import TypeAlias

from ckpt_tools.core import names
from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import Chunk, TensorEntry
from ckpt_tools.core.text import rank_spans
from ckpt_tools.errors import CheckpointError, IncompleteError
from ckpt_tools.formats.numbered import Reading, absent, owners, two_saves
from ckpt_tools.formats.safetensors.header import (
    SECTIONS_KEY,
    SHARDING_INFO,
    Home,
    PlacedHeader,
    Stored,
)
from ckpt_tools.formats.slices import both_hold

SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors")
# What this reader and every loader knows, and a writer says anew.
_KNOWN = frozenset({"format", SECTIONS_KEY, SHARDING_INFO, "DCP_VERSION"})
_MOST_RANKS = 100_000

# What one file holds of a tensor.
_Held: TypeAlias = "tuple[PlacedHeader, Stored]"


def join(
    parts: Sequence[PlacedHeader], *, weight_map: Mapping[str, str]
) -> tuple[list[TensorEntry], list[CheckpointError]]:
    """The tensors of all files, sorted by name, and what keeps them from being whole; a name in two
    files is a problem unless boxes differ.

    ``weight_map`` gives the full path of the file that counts for a name.
    """
    held: dict[str, list[_Held]] = defaultdict(list)
    for part in parts:
        for fqn, stored in part.tensors.items():
            held[fqn].append((part, stored))
    # As its file states, else as its name alone tells.
    homes = {f: one.homes[f] for f, ((one, _), *_) in held.items() if one.homes is not None}
    bare = [fqn for fqn in held if fqn not in homes]
    sections = names.classify([(fqn,) for fqn in bare])
    homes |= {fqn: Home((), section) for fqn, (section, _) in zip(bare, sections, strict=True)}
    several = {
        fqn: [part.path for part, _ in group]
        for fqn, group in held.items()
        if len(group) > 1 and any(part.offsets is None for part, _ in group)
    }
    counting, doubles = owners(several, weight_map)
    tensors: list[TensorEntry] = []
    problems: list[CheckpointError] = []
    for fqn in sorted(held):
        path = counting.get(fqn)
        group = [(part, stored) for part, stored in held[fqn] if path in (None, part.path)]
        group = _agreeing(group, fqn, problems=problems)
        tensors.append(_entry(group, fqn, home=homes[fqn], problems=problems))
    problems += (both_hold(*files, fqns) for files, fqns in doubles.items())
    return tensors, problems


def strings_of(parts: Sequence[PlacedHeader]) -> dict[str, str | None]:
    """What the headers of all files say beside their tensors, by name: after all else, as None,
    what is not the same in each.
    """
    said = [
        {name: text for name, text in part.metadata.items() if name not in _KNOWN} for part in parts
    ]
    names = sorted(set[str]().union(*said))
    same = {name: said[0][name] for name in names if len({s.get(name) for s in said}) == 1}
    return {**same, **{name: None for name in names if name not in same}}


def _agreeing(group: list[_Held], fqn: str, *, problems: list[CheckpointError]) -> list[_Held]:
    """The boxes that have the type and the number of dimensions of the first one."""
    part, first = group[0]
    is_same = [
        stored.dtype == first.dtype and len(stored.shape) == len(first.shape) for _, stored in group
    ]
    if not all(is_same):
        other, stored = group[is_same.index(False)]
        problems.append(
            CheckpointError(
                f"{fqn}: {part.path} has {first.dtype.name} {list(first.shape)}, "
                f"{Path(other.path).name} has {stored.dtype.name} {list(stored.shape)}.",
                about=(fqn,),
            )
        )
    return [*compress(group, is_same)]


def _entry(
    group: Sequence[_Held], fqn: str, *, home: Home, problems: list[CheckpointError]
) -> TensorEntry:
    """One tensor: the largest corner of its boxes is its shape, and they must cover it.

    Its chunks are in the order of their offsets; equal boxes are replicas of the first.
    """
    by_box: dict[Box, Chunk] = {}
    for part, stored in group:
        offsets = part.offsets[fqn] if part.offsets is not None else (0,) * len(stored.shape)
        box = Box(offsets, stored.shape)
        first = by_box.get(box)
        if first is None:
            by_box[box] = Chunk(box, stored.data, rank=_rank_of(part.path))
        else:
            by_box[box] = first._replace(replicas=(*first.replicas, stored.data))
    chunks = tuple(by_box[box] for box in sorted(by_box))
    dtype, section = group[0][1].dtype, home.section
    prefix = names.join((*home.container, ""))
    path = (*home.container, fqn[len(prefix) :]) if fqn.startswith(prefix) else (fqn,)
    if len(chunks) == 1 and not any(chunks[0].box.offsets):
        return TensorEntry(fqn, path, section, dtype, chunks[0].box.sizes, chunks)
    shape = tuple(map(max, zip(*(chunk.box.ends for chunk in chunks), strict=True)))
    entry = TensorEntry(fqn, path, section, dtype, shape, chunks)
    problems += uncovered([entry])
    return entry


@lru_cache(maxsize=1 << 16)  # files: each has thousands of tensors
def _rank_of(path: str) -> int | None:
    match = SHARD.fullmatch(Path(path).name)
    return int(match[1]) - 1 if match else None


def find_gaps_in_ranks(
    reading: Reading, folder: str, present: Iterable[str], tensors: Sequence[TensorEntry]
) -> None:
    """Take in what numbers in ``shard-R-model-i-of-N`` names, and the boxes, prove to be missing.

    A last rank whose files are all missing leaves no trace: nothing here can see it.
    """
    matches = [match for name in present if (match := SHARD.fullmatch(name))]
    have = {(int(match[1]), int(match[2])) for match in matches}
    counts = sorted({int(match[3]) for match in matches})
    if not have:
        return
    if len(counts) > 1:
        reading.missing.append(two_saves(folder, counts))
        return
    ranks, count = {rank for rank, _ in have}, counts[0]
    without = absent(ranks, max(ranks))
    covered = not any(uncovered(tensors))
    if without and covered:  # a rank with nothing to save writes no file
        shown = rank_spans([rank - 1 for rank in without])
        reading.notes.append(
            f"No file of {'ranks' if len(without) > 1 else 'rank'} {shown}: every row of every "
            "tensor is in the other files: it had nothing to save, or tensors that no other file "
            "names. `verify --expect-ranks N` checks that all N ranks have a file."
        )
    for rank in () if covered else without:
        path = f"{folder}/{_shard_name(rank, 1, count)}"
        problem = IncompleteError(
            f"{path} does not exist: rank {rank - 1} has no file, ranks up to {max(ranks) - 1} "
            "have.",
            hint="Copy the files of every rank into one folder.",
        )
        reading.lacks(path, problem)
    for number in absent({number for _, number in have}, count):
        problem = IncompleteError(f"{folder}: no rank has its file {number} of {count}.")
        reading.lacks(f"{folder}/{_shard_name(1, number, count)}", problem)
    _find_shortened(reading, folder, have, tensors, count=count)


def _shard_name(rank: int, number: int, count: int) -> str:
    return f"shard-{rank:05}-model-{number:05}-of-{count:05}.safetensors"


def _find_shortened(
    reading: Reading,
    folder: str,
    have: set[tuple[int, int]],
    tensors: Sequence[TensorEntry],
    *,
    count: int,
) -> None:
    """Take in files of the last rank that must have been there, by the sizes of the others' pieces.

    Holes show where any other rank's file is missing. Without the last one a tensor only ends
    early, and then its pieces are larger than an even split of what is there.
    """
    top = max(rank for rank, _ in have)
    widths = [width for width in range(1, min(top, _MOST_RANKS) + 1) if top % width == 0]
    for number in sorted({number for _, number in have if (top, number) not in have}):
        tail = f"-model-{number:05}-of-{count:05}.safetensors"
        ended = (t for t in tensors if any(c.data.path.endswith(tail) for c in t.chunks))
        cut = next((tensor for tensor in ended if not _even(tensor, widths)), None)
        if cut is not None:
            path = f"{folder}/{_shard_name(top, number, count)}"
            problem = IncompleteError(
                f"{path} does not exist, and {cut.fqn} ends early without it: "
                f"{list(cut.chunks[0].box.sizes)} is not an even piece of {list(cut.shape)}."
            )
            reading.lacks(path, problem)


def _even(entry: TensorEntry, widths: Sequence[int]) -> bool:
    """Whether the pieces are ceil(n / w) long for some of these numbers of pieces."""
    return all(
        max(chunk.box.sizes[dim] for chunk in entry.chunks) in {-(-size // w) for w in widths}
        for dim, size in enumerate(entry.shape)
    )
