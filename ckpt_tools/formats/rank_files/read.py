"""A folder of per-rank torch.save files of DTensors, as `torch.save(model.state_dict())` on every
rank leaves it.

Each file states its own mesh, placements and coordinate; they are checked against the other files,
the file names and their number. Families of one save (``model_…``, ``optim_…``, ``extra_state_…``)
are one checkpoint, and the name of a family is the container of its entries unless the files
themselves have it. Files are opened one after the other, those of a store some at a time.

An object has no bytes of its own: its byte range is that of its file's pickle, and only its
value is compared.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.index import ByteRange, CheckpointIndex, FileEntry
from ckpt_tools.core.text import some
from ckpt_tools.errors import (
    CheckpointError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
)
from ckpt_tools.formats.pickle import shared_storage as ties
from ckpt_tools.formats.pickle.load import collector_paused
from ckpt_tools.formats.pickle.state_dict import StateDict, flatten
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.rank_files import checks, file_names, numbered
from ckpt_tools.formats.rank_files.entries import Gathered, RankObject, entries_of, rank_tensors
from ckpt_tools.formats.rank_files.file_names import Family, RankFile
from ckpt_tools.formats.torch_file.open import SavedFile, open_saved
from ckpt_tools.storage import paths
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:
    from concurrent.futures import Future

# Opened one after the other, so that a thousand of them need few descriptors.
_MAX_OPEN = 16


def matches(path: str) -> bool:
    """Whether a folder holds files of more than one rank, or of one that says it is the only one.

    A lone ``rank0.pt`` without a world size is a file like any other.
    """
    if not paths.is_dir(path):
        return False
    try:
        names = _names(path)
    except OSError:
        return False
    named = list(filter(None, map(file_names.parse, names)))
    if named:
        return any(file.rank > 0 or file.world_size is not None for file in named)
    return numbered.are_rank_files(os.path.join(path, name) for name in names)


def read_index(
    path: str | Sequence[str], *, options: ReadOptions = ReadOptions()
) -> CheckpointIndex:
    """The index of a folder of rank files, or of those of them that a list names.

    Raises UnsupportedError for ShardedTensors, flat parameters and files of two world sizes,
    UsageError for several families that are not one checkpoint, and UnreadableError when no file
    can be read. Missing or damaged ranks, and ranks that disagree, become problems of the index.
    """
    if isinstance(path, str):
        inside = [os.path.join(path, name) for name in _names(path)]
        file_paths = [one for one in inside if paths.is_file(one) or paths.special(one)]
    else:
        file_paths = list(path)
    folders = {os.path.dirname(file) for file in file_paths}
    around = next(iter(folders)) if len(folders) == 1 else os.path.commonpath(folders)
    root = path if isinstance(path, str) else around or "."
    try:
        named = file_names.families(file_paths)
    except UnsupportedError:
        if len(folders) == 1:
            raise
        named = []  # nodes that each count their own ranks: the meshes tell
    candidates = named or numbered.families(file_paths, options)
    families = file_names.joined(candidates, where=root)
    with Files(max_open=_MAX_OPEN) as files, collector_paused():
        headers = RankHeaders()
        for family in families:
            headers.read(family, files, options, contained=len(families) > 1)
        if not named:
            for family in families:
                ranks = [
                    f"{os.path.relpath(one.path, root)} is of rank {one.rank}"
                    for one in family.files
                ]
                text = "Ranks were taken from the meshes in the files, not from names"
                headers.notes.append(f"{text}: {some(ranks)}.")
        return headers.index(root, families, files)


def _names(folder: str) -> list[str]:
    """What is in a folder, sorted, without hidden files: macOS puts ``._rank_0.pt`` beside each."""
    return sorted(name for name in paths.listdir(folder) if not name.startswith("."))


@dataclass(slots=True)
class RankHeaders:
    """What the files read so far hold, without their bytes: a value that can be sent."""

    gathered: Gathered = field(default_factory=Gathered)
    ranks: checks.Ranks = field(default_factory=checks.Ranks)
    sizes: dict[str, int] = field(default_factory=dict)
    ties: ties.Ties = ()
    broken: list[tuple[Family, UnreadableError]] = field(default_factory=list)
    held: dict[str, set[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def read(self, family: Family, files: Files, options: ReadOptions, *, contained: bool) -> None:
        """Read the files of a family, in the order of their ranks."""
        family_ties: ties.Ties | None = None
        opening = _opened(family.files, files, options)
        for file, opened in zip(family.files, opening, strict=True):
            try:
                state, pickle = self._state(file, opened, files, contained=contained)
            except (UnsupportedError, UnsafePickleError) as error:
                if not file_names.holds_other_state(family.name):
                    raise
                self._keep_closed(file, error)
                continue
            except UnreadableError as error:
                self.broken.append((family, error.losing(file.path)))
                continue
            self._gather(file, state, pickle)
            if family_ties is None:
                family_ties = ties.tied(state.tensors)
            elif family_ties:
                family_ties = ties.still_tied(family_ties, state.tensors)
        self.ties = (*self.ties, *(family_ties or ()))

    def _state(
        self, file: RankFile, opened: Callable[[], SavedFile], files: Files, *, contained: bool
    ) -> tuple[StateDict, ByteRange]:
        """The leaves of one file, in the container they belong into, and its pickle's place."""
        self.sizes[file.path] = files.size(file.path)
        saved = opened()
        container: tuple[str, ...] = ()
        tops = saved.value.keys() if isinstance(saved.value, dict) else ()
        if contained and not file_names.has_container(tops, file.family):
            container = (file.family or "model",)
        state = flatten(saved.value, where=file.path, under=container)
        if file_names.holds_other_state(file.family):
            for other in state.objects:
                if other.flaw is not None:
                    raise other.flaw.at(f"{file.path}: {other.fqn}")
        parts = [[*rank_tensors(leaf.stored, saved, file.rank)] for leaf in state.tensors]
        for leaf, held in zip(state.tensors, parts, strict=True):
            self.gathered.tensors.setdefault(leaf.path, []).extend(held)
        return state, saved.pickle

    def _gather(self, file: RankFile, state: StateDict, pickle: ByteRange) -> None:
        self.gathered.add_tree(state.tree, file.path)
        for leaf in state.objects:
            part = RankObject(file.rank, pickle, leaf.value, leaf.type_name, leaf.flaw)
            self.gathered.objects.setdefault(leaf.path, []).append(part)
        self.ranks.see(file, [leaf.stored for leaf in state.tensors])
        held = self.held.setdefault(file.pattern, set())
        names = {leaf.fqn for leaf in state.tensors} | {leaf.fqn for leaf in state.objects}
        for pattern, others in self.held.items():
            twins = names & others if pattern != file.pattern else ()
            if twins:
                raise UnsupportedError(
                    f"{min(twins)} is in the files {pattern} and in {file.pattern}.",
                    hint="Choose one of them with a quoted glob.",
                )
        held |= names

    def _keep_closed(self, file: RankFile, error: CheckpointError) -> None:
        """Keep a file of other state that cannot be opened as one opaque object."""
        data = ByteRange(file.path, 0, self.sizes[file.path])
        part = RankObject(file.rank, data, None, "torch.save file")
        path = (file.family, f"rank_{file.rank}")
        self.gathered.objects[path] = [part]
        self.notes.append(f"Kept closed: {error.message}")

    def add(self, other: RankHeaders, whose: str) -> None:
        """Take in what another process has read; ``whose`` says of what, in an error."""
        for path, parts in other.gathered.tensors.items():
            self.gathered.tensors.setdefault(path, []).extend(parts)
        for path, objects in other.gathered.objects.items():
            self.gathered.objects.setdefault(path, []).extend(objects)
        self.gathered.add_tree(other.gathered.tree, whose)
        self.gathered.clashes += other.gathered.clashes
        self.ranks.seats += other.ranks.seats
        self.sizes |= other.sizes
        for pattern, held in other.held.items():
            self.held.setdefault(pattern, set()).update(held)
        self.notes += other.notes

    def index(self, root: str, families: Sequence[Family], files: Files) -> CheckpointIndex:
        """The index of all that was read; raises the first error when that is nothing.

        ``files`` are read only to compare small replicas.
        """
        if self.broken and len(self.broken) == sum(len(family.files) for family in families):
            raise self.broken[0][1]
        world = self.ranks.world_size(families)
        entries = entries_of(root, self.gathered, files)
        spared = [f for f in families if checks.are_whole_groups(f, world, entries.tensors)]
        needed = [family for family in families if family not in spared]
        absent = {f: set(range(world)) - {file.rank for file in f.files} for f in needed}
        missing = [family.path_of(rank) for family in needed for rank in sorted(absent[family])]
        flaws = uncovered(entries.tensors) if self.broken or missing else ()
        holes = frozenset().union(*(problem.about for problem in flaws))
        # Lost files of a family damage its entries with holes, where any have, else all of it; none
        # are named when that is the whole checkpoint.
        about: dict[Family, Collection[str]] = {}
        for family in families:
            held = self.held.get(family.pattern, set())
            about[family] = held & holes or (held if len(families) > 1 else ())
        problems = [
            *(error.concerning(about[family]) for family, error in self.broken),
            *self.ranks.problems(families, world),
            *(
                error.concerning(about[family])
                for family in needed
                for error in checks.missing(
                    family, world, entries.tensors, held=self.held.get(family.pattern, set())
                )
            ),
            *entries.problems,
        ]
        known = {fqn for problem in problems for fqn in problem.about}
        if all(problem.about for problem in problems):
            problems += uncovered(entries.tensors, known=known)
        return replace(
            entries,
            files=(
                *(FileEntry(path, length) for path, length in self.sizes.items()),
                *(FileEntry(path, None) for path in missing),
            ),
            world_size=world,
            mesh=self.ranks.mesh,
            torch_version=self.ranks.torch,
            ties=tuple(sorted(self.ties)),
            notes=(*self.notes, *entries.notes, *checks.absent_replicas(spared, world)),
            problems=tuple(problems),
        )


def _opened(
    several: Sequence[RankFile], files: Files, options: ReadOptions
) -> Iterator[Callable[[], SavedFile]]:
    """What gives each file; some files of a store are opened before their turn."""
    opening = [partial(open_saved, one.path, files, options=options) for one in several]
    if not any(is_address(one.path) for one in several[:1]):
        yield from opening
        return
    from concurrent.futures import ThreadPoolExecutor  # late, as all that addresses need

    with ThreadPoolExecutor(_MAX_OPEN) as pool:
        ahead: deque[Future[SavedFile]] = deque()
        for one in opening:
            ahead.append(pool.submit(one))
            if len(ahead) == _MAX_OPEN:
                yield ahead.popleft().result
        yield from (one.result for one in ahead)
