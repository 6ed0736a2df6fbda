"""From what every rank holds to the entries of one checkpoint.

Which rank files there should be, `checks` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.core import names
from ckpt_tools.core.coverage import replicas_differ
from ckpt_tools.core.index import (
    NO_TREE,
    CheckpointIndex,
    ObjectEntry,
    Path,
    Section,
    TensorEntry,
)
from ckpt_tools.core.plain_values import are_same
from ckpt_tools.core.state_tree import Branch, merge
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, UnsupportedError
from ckpt_tools.formats.rank_files.parts import (
    RankObject,
    RankTensor,
    ReplicaComparison,
    join,
)
from ckpt_tools.formats.replicas import LEAVE_OUT, Replicas
from ckpt_tools.formats.slices import JOINED_BY_OWNER
from ckpt_tools.storage.reader import Files

_FLAT_SHARDS = (
    "FSDP1's optimizer.state_dict() has flat pieces without names or shapes: only a job with as "
    "many ranks, wrapped alike, loads them. --only model takes the model alone. An optimizer that "
    "converts is saved by FSDP.optim_state_dict(), or with FSDP2 (verl: strategy=fsdp2)."
)


@dataclass(slots=True)
class Gathered:
    """What the ranks hold, by the path of the entry, in the order of the ranks, and their trees
    in one; ``clashes`` are problems of trees that do not fit together.
    """

    tensors: dict[Path, list[RankTensor]] = field(default_factory=dict)
    objects: dict[Path, list[RankObject]] = field(default_factory=dict)
    tree: Branch[str] = NO_TREE
    clashes: list[CheckpointError] = field(default_factory=list)
    _last: Branch[str] = NO_TREE

    def add_tree(self, tree: Branch[str], where: str) -> None:
        """Take in the tree of one rank's file, or what other ranks' trees were put into."""
        if tree == self._last:
            return
        self._last = tree
        try:
            self.tree = merge(self.tree, tree) if self.tree.items else tree
        except UnsupportedError as error:
            known = set(self.tree.leaves())
            about = [fqn for fqn in tree.leaves() if fqn not in known]
            message = (
                f"{where} is nested differently from the files of lower ranks: {error.message}"
            )
            clash = UnsupportedError(message, hint=error.hint, about=about)
            self.clashes.append(clash)


def entries_of(root: str, gathered: Gathered, files: Files) -> CheckpointIndex:
    """The entries of all ranks' files, sorted by name, and what is to be said of them; ``files`` is
    read only to compare small replicas.
    """
    whole = {path for path, held in gathered.objects.items() if not held[0].is_tensor}
    sections = names.sections_of(list(gathered.tensors | gathered.objects), objects=whole)
    comparison = ReplicaComparison(files)
    replicas = Replicas()
    torn: dict[str, str] = {}
    for path, parts in gathered.tensors.items():
        first, joined = parts[0], join(parts, comparison)
        entry = TensorEntry(
            names.join(path),
            path,
            sections[path],
            first.dtype,
            first.shape,
            joined.chunks,
            layout=first.layout,
            compared=not joined.uncompared,
        )
        complaint = joined.complaint or _unread_elsewhere(first, gathered.objects.get(path))
        if complaint is not None:
            replicas.complaints[entry.fqn] = complaint
        if joined.unequal is not None:
            box, lowest, other = joined.unequal
            if first.is_plain:
                held = ((part.rank, _as_held(entry, part)) for part in parts)
                how = f"not the same on ranks {lowest} and {other}"
                replicas.add_unequal(entry, held, rank=other, how=how)
                continue
            torn[entry.fqn] = f"{box} (ranks {lowest} and {other})"
        replicas.add(entry, several=len(parts) > 1)
    for path, objects in gathered.objects.items():
        if objects[0].is_tensor and path in gathered.tensors:
            continue  # said of the tensor
        _add_object(replicas, path, objects, sections[path])
    tensors = replicas.sorted(TensorEntry)
    problems = [
        *gathered.clashes,
        *replicas.problems("plain tensors (no DTensors)", hint=_hint(replicas)),
        *([replicas_differ(torn)] if torn else []),
    ]
    notes = (*replicas.notes(), *_notes(tensors))
    index = CheckpointIndex(root, "ranks", tensors, replicas.sorted(ObjectEntry), notes=notes)
    return replace(index, problems=tuple(problems), tree=replicas.within(gathered.tree))


def _hint(replicas: Replicas) -> str:
    """What to do about plain tensors that differ."""
    wrong = [one for one, _ in replicas.differing if isinstance(one, TensorEntry)]
    if any(entry.section == "optim" and entry.shape for entry in wrong):
        return _FLAT_SHARDS
    has_layouts = any(entry.layout is not None for entry in replicas.sorted(TensorEntry))
    return LEAVE_OUT if has_layouts else JOINED_BY_OWNER


def _notes(tensors: Sequence[TensorEntry]) -> Iterator[str]:
    uncompared = [entry.fqn for entry in tensors if not entry.compared]
    if uncompared:
        yield (
            f"Replicas too large to be compared in passing: {some(uncompared)}. verify "
            "and --check compare them; a copy without --check takes those of the lowest rank."
        )


def _unread_elsewhere(first: RankTensor, others: Sequence[RankObject] | None) -> str | None:
    """The complaint of a tensor that cannot be read on some ranks."""
    other = others[0] if others else None
    if other is None or not other.is_tensor:
        return None
    return f"it is read on rank {first.rank}, and on rank {other.rank} it is a {other.type_name}"


def _as_held(entry: TensorEntry, part: RankTensor) -> TensorEntry:
    """A plain tensor as one rank holds it."""
    held = (part.chunk,)
    return replace(entry, dtype=part.dtype, shape=part.shape, chunks=held, compared=True)


def _add_object(
    replicas: Replicas, path: Path, held: Sequence[RankObject], section: Section
) -> None:
    first, other = held[0], None if held[0].is_tensor else _first_unequal(held)
    entry = _object(path, first, section)
    if other is None:
        replicas.add(entry, several=len(held) > 1)
        return
    is_opened = first.type_name is None and other.type_name is None
    values = " and ".join(f"{part.value!r} on rank {part.rank}" for part in (first, other))
    own = ((part.rank, _object(path, part, section)) for part in held)
    replicas.add_unequal(entry, own, rank=other.rank, how=values if is_opened else "")


def _object(path: Path, part: RankObject, section: Section) -> ObjectEntry:
    return ObjectEntry(
        fqn=names.join(path),
        path=path,
        section=section,
        data=part.data,
        value=part.value,
        opened=part.type_name is None,
        type_name=part.type_name,
        flaw=part.flaw,
    )


def _first_unequal(held: Sequence[RankObject]) -> RankObject | None:
    """The first rank's object that is not the lowest rank's; what is not opened never is."""
    first = held[0]
    for part in held[1:]:
        opened = first.type_name is None and part.type_name is None
        if not opened or not are_same(part.value, first.value):
            return part
    return None
