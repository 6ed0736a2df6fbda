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

from ckpt_tools.core import names
from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.index import NO_TREE, ByteRange, CheckpointIndex, FileEntry, ObjectEntry, Path
from ckpt_tools.core.state_tree import Branch, merge
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, UnreadableError, UnsafePickleError, UnsupportedError
from ckpt_tools.formats.pickle import shared_storage as ties
from ckpt_tools.formats.pickle.load import collector_paused
from ckpt_tools.formats.pickle.state_dict import StateDict, flatten
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.rank_files import checks, file_names, numbered
from ckpt_tools.formats.rank_files.entries import RankTensor, entries_of, rank_tensors
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
        inside = _names(path)
    except OSError:
        return False
    named = list(filter(None, map(file_names.parse, inside)))
    if named:
        return any(file.rank > 0 or file.world_size is not None for file in named)
    return numbered.are_rank_files(os.path.join(path, name) for name in inside)


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
                    f"{os.path.relpath(one.path, root)} is of rank {one.rank}" for one in family
                ]
                text = "Ranks were taken from the meshes in the files, not from names"
                headers.notes.append(f"{text}: {some(ranks)}.")
        return headers.index(root, families, files)


def _names(folder: str) -> list[str]:
    """What is in a folder, sorted, without hidden files: macOS puts ``._rank_0.pt`` beside each."""
    return sorted(name for name in paths.listdir(folder) if not name.startswith("."))


@dataclass(slots=True)
class RankHeaders:
    """What the files read so far hold, without their bytes: a value that can be sent.

    ``tensors`` and ``objects`` are what each rank holds, by path, in the order of the ranks;
    ``tree`` has the names of all, and ``clashes`` say what does not fit into it. ``held`` are the
    names in the files of each pattern.
    """

    tensors: dict[Path, list[RankTensor]] = field(default_factory=dict)
    objects: dict[Path, list[ObjectEntry]] = field(default_factory=dict)
    tree: Branch[str] = NO_TREE
    ranks: checks.Ranks = field(default_factory=checks.Ranks)
    sizes: dict[str, int] = field(default_factory=dict)
    ties: ties.Ties = ()
    broken: list[tuple[RankFile, UnreadableError]] = field(default_factory=list)
    held: dict[str, set[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    clashes: list[CheckpointError] = field(default_factory=list)
    _last_tree: Branch[str] = NO_TREE

    def read(self, family: Family, files: Files, options: ReadOptions, *, contained: bool) -> None:
        """Read files of a family, in the order of their ranks."""
        family_ties: ties.Ties | None = None
        opening = _opened(family, files, options)
        for file, opened in zip(family, opening, strict=True):
            try:
                state, pickle = self._state(file, opened, files, contained=contained)
            except (UnsupportedError, UnsafePickleError) as error:
                if not file_names.holds_other_state(file.family):
                    raise
                self._keep_closed(file, error)
                continue
            except UnreadableError as error:
                self.broken.append((file, error.losing(file.path)))
                continue
            for leaf in state.objects:
                alike = self.objects.setdefault(leaf.path, [])
                # Names are kept once; all of them together say what section they are of.
                named = leaf._replace(fqn=alike[0].fqn, path=alike[0].path) if alike else leaf
                alike.append(named.entry("other", pickle))
            self._add_tree(state.tree, file.path)
            self.ranks.see(file, [leaf.stored for leaf in state.tensors])
            own = {leaf.fqn for leaf in state.tensors} | {leaf.fqn for leaf in state.objects}
            self._hold(file.pattern, own)
            if family_ties is None:
                family_ties = ties.tied(state.tensors)
            elif family_ties:
                family_ties = ties.still_tied(family_ties, state.tensors)
        self.ties = (*self.ties, *(family_ties or ()))

    def _state(
        self, file: RankFile, opened: Callable[[], SavedFile], files: Files, *, contained: bool
    ) -> tuple[StateDict, ByteRange]:
        """The leaves of one file, in the container they belong into, and its pickle's place.

        The parts of its tensors are taken in, all of them or, where one cannot be read, none.
        """
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
            self.tensors.setdefault(leaf.path, []).extend(held)
        return state, saved.pickle

    def _hold(self, pattern: str, own: set[str]) -> None:
        """Take in the names in a file of a pattern. Raises UnsupportedError for a name in two."""
        for other, held in self.held.items():
            if other != pattern and not held.isdisjoint(own):
                raise UnsupportedError(
                    f"{min(held & own)} is in the files {other} and in {pattern}.",
                    hint="Choose one of them with a quoted glob.",
                )
        self.held.setdefault(pattern, set()).update(own)

    def _keep_closed(self, file: RankFile, error: CheckpointError) -> None:
        """Keep a file of other state that cannot be opened as one opaque object."""
        data = ByteRange(file.path, 0, self.sizes[file.path])
        path = (file.family, f"rank_{file.rank}")
        entry = ObjectEntry(names.join(path), path, "other", data, type_name="torch.save file")
        self.objects[path] = [entry]
        self.notes.append(f"Kept closed: {error.message}")

    def add(self, other: RankHeaders, whose: str) -> None:
        """Take in what another process has read; ``whose`` says of what, in an error."""
        for path, parts in other.tensors.items():
            self.tensors.setdefault(path, []).extend(parts)
        for path, objects in other.objects.items():
            self.objects.setdefault(path, []).extend(objects)
        self._add_tree(other.tree, whose)
        self.clashes += other.clashes
        self.ranks.seats += other.ranks.seats
        self.sizes |= other.sizes
        for pattern, held in other.held.items():
            self._hold(pattern, held)
        self.notes += other.notes

    def _add_tree(self, tree: Branch[str], where: str) -> None:
        """Take in the tree of one rank's file, or what other ranks' trees were put into."""
        if tree == self._last_tree:
            return
        self._last_tree = tree
        try:
            self.tree = merge(self.tree, tree) if self.tree.items else tree
        except UnsupportedError as error:
            known = set(self.tree.leaves())
            about = [fqn for fqn in tree.leaves() if fqn not in known]
            message = (
                f"{where} is nested differently from the files of lower ranks: {error.message}"
            )
            self.clashes.append(UnsupportedError(message, hint=error.hint, about=about))

    def index(self, root: str, families: Sequence[Family], files: Files) -> CheckpointIndex:
        """The index of all that was read; raises the first error when that is nothing.

        ``files`` are read only to compare small replicas.
        """
        if self.broken and len(self.broken) == sum(map(len, families)):
            raise self.broken[0][1]
        world = self.ranks.world_size(families)
        ranks = {file.path: file.rank for family in families for file in family}
        entries = entries_of(root, self.tensors, self.objects, self.tree, ranks, files)
        spared = [f for f in families if checks.are_whole_groups(f, world, entries.tensors)]
        needed = [f for f in families if f not in spared]
        missing = [f[0].path_of(rank) for f in needed for rank in checks.absent_ranks(f, world)]
        flaws = uncovered(entries.tensors) if self.broken or missing else ()
        holes = frozenset().union(*(problem.about for problem in flaws))
        # Lost files of a family damage its entries with holes, where any have, else all of it; none
        # are named when that is the whole checkpoint.
        about: dict[str, Collection[str]] = {}
        lost: list[CheckpointError] = []
        for family in families:
            pattern = family[0].pattern
            held = self.held.get(pattern, set())
            about[pattern] = held & holes or (held if len(families) > 1 else ())
            if family in needed:
                gone = checks.missing(family, world, entries.tensors, held=held)
                lost += [error.concerning(about[pattern]) for error in gone]
        problems = [
            *(error.concerning(about[file.pattern]) for file, error in self.broken),
            *self.ranks.problems(families, world),
            *lost,
            *self.clashes,
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
