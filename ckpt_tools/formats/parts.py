"""Folders in which a framework keeps one checkpoint in parts: they are joined into one index.

A part is a checkpoint of some format by itself; its entries get the container that the others of
its kind have. A chunk's codec says what its bytes are, so a joined index needs no format of its
own: it has that of the model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import reduce

from ckpt_tools.core import names
from ckpt_tools.core.index import ByteRange, CheckpointIndex, FileEntry, ObjectEntry, Path
from ckpt_tools.core.state_tree import Branch, dict_of, merge, of_paths
from ckpt_tools.core.text import rank_spans, some
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    UnreadableError,
    paths_instead,
    unreadable,
)
from ckpt_tools.formats.dcp.items import TORCH_SAVE
from ckpt_tools.formats.dcp.objects import open_containers
from ckpt_tools.formats.foreign import HEAD, not_a, sniff
from ckpt_tools.formats.frameworks import RANDOM_STATES, FolderParts
from ckpt_tools.formats.pickle.nodes import Opaque
from ckpt_tools.formats.pickle.settle import settled
from ckpt_tools.formats.pickle.state_dict import flatten
from ckpt_tools.formats.protocol import ReadOptions
from ckpt_tools.formats.torch_file import read as torch_file
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files

_MAX_JSON = 64 << 20
_MAX_DIGITS = 308  # what 128 bytes can hold: more are not read of a pickle, either


def joined(
    parts: FolderParts, read: Callable[[str], CheckpointIndex], options: ReadOptions
) -> CheckpointIndex:
    """One index of all parts; ``read`` reads the index of one that is a checkpoint by itself.

    A part that cannot be read is a problem of the index; when none can be, the first is raised.
    """
    joining = _Joining(parts, options)
    for path, container in parts.main:
        joining.read(path, container, read)
    if not joining.indexes:
        raise joining.problems[0]
    for path, container in parts.flat:
        joining.flat(path, container)
    for path, place in parts.closed:
        joining.closed(path, place)
    return joining.index()


@dataclass(slots=True)
class _Joining:
    """What the parts read so far hold."""

    parts: FolderParts
    options: ReadOptions
    indexes: list[CheckpointIndex] = field(default_factory=list)
    others: list[CheckpointIndex] = field(default_factory=list)
    problems: list[CheckpointError] = field(default_factory=list)

    def read(
        self, path: str, container: str | None, read: Callable[[str], CheckpointIndex]
    ) -> None:
        """Read a checkpoint; one that cannot be read is lost, with all names in its container."""
        try:
            self.indexes.append(_under(container, read(path)))
        except CheckpointError as error:
            about = error.about if container is None else (f"{container}.*",)
            self.problems.append(error.concerning(about))

    def flat(self, path: str, container: str | None) -> None:
        """Take in the entries of a file of other state, or all of it closed."""
        try:
            index = torch_file.read_file(path, options=self.options)
        except CheckpointError:
            name = container or os.path.basename(path).partition(".")[0]
            self.closed(path, (name,))
            return
        entries = (replace(entry, section="other") for entry in index.entries)
        self.others.append(_under(container, index.holding(entries)))

    def closed(self, path: str, place: Path) -> None:
        """Take in a file as one object, or the values of a JSON file."""
        try:
            length = paths.size(path)
            from_json = _values(path, place, length) if path.endswith(".json") else None
            entries, tree = from_json or _archive(path, place, length)
        except OSError as error:
            self.problems.append(unreadable(path, error).concerning((names.join(place),)))
            return
        except CheckpointError as error:
            self.problems.append(error.concerning((f"{names.join(place)}.*",)))
            return
        allowed, file = self.options.allow_globals, FileEntry(path, length)
        bare = CheckpointIndex(path, "torch", (), files=(file,), tree=tree, allowed=allowed)
        with Files() as files:  # tensors in it are tensors of the checkpoint, for every command
            self.others.append(open_containers(bare.holding(entries), files))

    def index(self) -> CheckpointIndex:
        """All of it as one index."""
        first, every = self.indexes[0], [*self.indexes, *self.others]
        entries = [entry for part in every for entry in part.entries]
        whole = replace(
            first,
            root=self.parts.root,
            framework=self.parts.framework,
            files=tuple(dict.fromkeys(file for part in every for file in part.files)),
            world_size=next((p.world_size for p in self.indexes if p.world_size is not None), None),
            mesh=next((part.mesh for part in self.indexes if part.mesh is not None), None),
            ties=tuple(tie for part in every for tie in part.ties),
            notes=(*self._notes(), *dict.fromkeys(note for part in every for note in part.notes)),
            problems=(
                *self.problems,
                *(problem for part in every for problem in part.problems),
                *self._without_groups(),
            ),
            packed=tuple(one for part in every for one in part.packed),
            tree=reduce(merge, (part.tree for part in every)),
            allowed=self.options.allow_globals,
        )
        return whole.holding(entries)

    def _without_groups(self) -> Iterator[CheckpointError]:
        """What keeps the loader of every framework from an optimizer: that it has no groups.

        Each saves them, and torch's `set_optimizer_state_dict` and `FSDP.optim_state_dict_to_load`
        ask for the key. By itself, a part is no more than its tensors, and is read.
        """
        optim = [e for part in self.indexes for e in part.entries if e.section == "optim"]
        if not optim or any(names.is_in_param_groups(entry.path) for entry in optim):
            return
        read = [path for path, _ in self.parts.main]
        yield IncompleteError(
            f"{self.parts.root}: the optimizer has states of parameters and no param_groups, so "
            f"{self.parts.framework} did not save this, and could not resume from it.",
            hint="Give one part alone.",
            instead=paths_instead(self.parts.root, read),
            about=[entry.fqn for entry in optim],
        )

    def _notes(self) -> Iterator[str]:
        """What was joined, and what of it may not be of one save."""
        read = [os.path.relpath(path, self.parts.root) for path in self.parts.paths]
        read = [".metadata" if name == "." else name for name in read]
        if len(read) > 1:
            yield f"Reading as one checkpoint: {some(read)}."
        sizes = {part.root: part.world_size for part in self.indexes if part.world_size is not None}
        if len(set(sizes.values())) > 1:
            said = [f"{os.path.basename(root)} by {size} ranks" for root, size in sizes.items()]
            yield f"Saved by different numbers of ranks: {', '.join(said)}. Are they of one save?"
        states = map(RANDOM_STATES.fullmatch, map(os.path.basename, self.parts.paths))
        own = {int(match[2]) for match in states if match}
        absent = sorted(set(range(max(sizes.values(), default=0))) - own)
        if own and absent:
            whose = "ranks" if len(absent) > 1 else "rank"
            yield f"There are no random states of {whose} {rank_spans(absent)}."


def _under(container: str | None, index: CheckpointIndex) -> CheckpointIndex:
    """The same checkpoint in a container, unless all of it is in one of that name."""
    if container is None or all(entry.path[0] == container for entry in index.entries):
        return replace(index, tree=index.nesting)
    moved = index.arranged(dict_of({container: index.entry_tree()}))
    return replace(
        moved,
        ties=tuple(tuple(f"{container}.{name}" for name in tie) for tie in index.ties),
        problems=tuple(
            problem.concerning(f"{container}.{name}" for name in problem.about)
            for problem in index.problems
        ),
    )


def _archive(path: str, place: Path, length: int) -> tuple[list[ObjectEntry], Branch[str]]:
    """A torch.save file as one object, as DCP has them; one of the old format stays closed.

    Raises UnreadableError for anything else.
    """
    kind = sniff(paths.head(path, HEAD))
    if kind not in ("zip", "pickle"):
        raise not_a("file of torch.save", path, kind)
    is_archive = kind == "zip"
    entry = ObjectEntry(
        *(names.join(place), place, "other", ByteRange(path, 0, length)),
        type_name=None if is_archive else "torch.save file",
        codec=TORCH_SAVE if is_archive else None,
    )
    return [entry], of_paths([(place, entry.fqn)])


def _number(digits: str) -> int | Opaque:
    """A number of JSON; one of hundreds of digits is not opened, as one of a pickle."""
    return int(digits) if len(digits) <= _MAX_DIGITS else Opaque("builtins.int")


def _values(path: str, place: Path, length: int) -> tuple[list[ObjectEntry], Branch[str]]:
    """The values in a JSON file. Raises UnreadableError for what is none."""
    try:
        text = paths.head(path, min(length, _MAX_JSON))
        value: object = json.loads(text, parse_int=_number)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"{path} is not valid JSON: {error}.") from error
    try:
        value = settled(value, length=length, is_allowed=lambda _: False)
    except UnreadableError as error:
        raise error.at(path, " ") from error
    state = flatten(value, where=path, under=[str(part) for part in place])
    data = ByteRange(path, 0, length)
    return [leaf.entry("other", data) for leaf in state.objects], state.tree
