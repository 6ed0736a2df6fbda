"""Rank files whose names tell no rank: ``ckpt_0.pth … ckpt_3.pth``, ``shard-00000.pt …``.

They are known by what they hold: DTensors of a mesh of exactly as many ranks as there are files
with a number. Which rank saved a file stands in the file.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache, partial

from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, IncompleteError, UnsupportedError
from ckpt_tools.formats.pickle.state_dict import flatten
from ckpt_tools.formats.pickle.stored import StoredDTensor
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.rank_files.checks import own_rank
from ckpt_tools.formats.rank_files.file_names import SUFFIXES, Family, RankFile
from ckpt_tools.formats.torch_file.dtensor_read import mesh_of
from ckpt_tools.formats.torch_file.open import open_saved
from ckpt_tools.storage.reader import Files

_NUMBER = re.compile(r"\d+")
_SEVERAL_SAVES = "They are of several saves; choose the files of one with a quoted glob."
_LAST_STAR = re.compile(r"\*\D*\Z")


def are_rank_files(paths: Iterable[str]) -> bool:
    """Whether files with a number hold the shards of ranks; one of each kind is opened."""
    for _, group in _groups(paths):
        try:
            size, _ = _mesh(group[0], ReadOptions())
        except (CheckpointError, OSError):
            continue
        if size > 1:
            return True
    return False


def families(paths: Iterable[str], options: ReadOptions) -> list[Family]:
    """The families of numbered files that hold DTensors, each file with the rank that it states.

    Of several numbers in a name, that of the rank is the one that as many files differ in as the
    mesh has ranks; where none is, the last.

    Raises IncompleteError when there are fewer files than ranks, and UnsupportedError when there
    are more, or when two files are of one rank.
    """
    mesh_in = cache(partial(_mesh, options=options))  # each file is unpickled once
    sized: dict[frozenset[str], tuple[str, list[str]]] = {}
    last: list[tuple[str, list[str]]] = []
    for pattern, group in _groups(paths):
        size, _ = mesh_in(group[0])
        if size < 2:
            continue
        if _LAST_STAR.search(pattern):
            last.append((pattern, group))
        if len(group) == size:
            stated = (mesh_in(path)[1] for path in group)
            known = [rank for rank in stated if rank is not None]
            if len(set(known)) == len(known):
                sized[frozenset(group)] = pattern, group
    chosen = list(sized.values()) or last
    return [_family(pattern, [(p, *mesh_in(p)) for p in group]) for pattern, group in chosen]


def _groups(paths: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Files whose names, or those of their folders, differ in one number alone, in its order; two
    or more of each pattern. Names that are in several folders are grouped over all of them, too:
    the nodes of a job may number their files alike.
    """
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    paths = list(paths)
    times = Counter(map(os.path.basename, paths))
    for path in paths:
        stem, suffix = os.path.splitext(path)
        if suffix.lower() not in SUFFIXES:
            continue
        folder, name = os.path.split(stem)
        if times[name + suffix] > 1 and _NUMBER.search(name):
            groups.setdefault(("", _NUMBER.sub("*", name) + suffix), []).append((0, path))
        above, inner = os.path.split(folder)
        for parent, text in ((folder, name), (above, os.path.join(inner, name))):
            for number in _NUMBER.finditer(text, 0, len(text) if parent == folder else len(inner)):
                pattern = f"{text[: number.start()]}*{text[number.end() :]}{suffix}"
                groups.setdefault((parent, pattern), []).append((int(number[0]), path))
    return [
        (pattern, [path for _, path in sorted(held)])
        for (_, pattern), held in sorted(groups.items())
        if len(held) > 1
    ]


def _mesh(path: str, options: ReadOptions) -> tuple[int, int | None]:
    """The size of the largest mesh of the DTensors in a file, 1 where there is none, and the rank
    that it says has saved the file, None where it does not say.
    """
    with Files() as files:
        state = flatten(open_saved(path, files, options=options).value, where=path)
    meshes = [leaf.stored.mesh for leaf in state.tensors if isinstance(leaf.stored, StoredDTensor)]
    mesh = max(meshes, key=lambda one: mesh_of(one).size, default=None)
    if mesh is None or mesh_of(mesh).size < 2:
        return 1, None
    return mesh_of(mesh).size, own_rank(mesh)


def _family(pattern: str, group: Sequence[tuple[str, int, int | None]]) -> Family:
    """The files of a pattern, each with the size of its mesh and the rank that it states."""
    name = re.sub(r"[-_.]+\Z", "", pattern.partition("*")[0])
    size = max(size for _, size, _ in group)
    ranks: dict[int, RankFile] = {}
    for number, (path, _, stated) in enumerate(group):
        rank = number if stated is None else stated
        other = ranks.setdefault(rank, RankFile(path, rank, size, name, pattern))
        if other.path != path:
            raise UnsupportedError(
                f"{other.path} and {os.path.basename(path)} were both saved by rank {rank}.",
                hint=_SEVERAL_SAVES,
            )
    held = f"{len(group)} files {pattern} hold the shards of a mesh of {size} ranks"
    if len(group) < size:
        raise IncompleteError(
            f"{held}: {some([os.path.basename(path) for path, _, _ in group])}.",
            hint="Bring the files of the other ranks into the same folder.",
        )
    if len(group) > size:
        raise UnsupportedError(f"{held}.", hint=_SEVERAL_SAVES)
    return tuple(ranks[rank] for rank in sorted(ranks))
