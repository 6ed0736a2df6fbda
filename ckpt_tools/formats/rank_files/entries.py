"""From what every rank holds to the entries of one checkpoint.

What must be the same on all ranks and is not becomes a problem or a note here; which rank files
there should be, `checks` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.index import (
    NO_TREE,
    Chunk,
    ObjectEntry,
    Path,
    Section,
    TensorEntry,
    replicas_differ,
)
from ckpt_tools.core.plain_values import are_same
from ckpt_tools.core.state_tree import Branch, dict_of, merge
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, UnsupportedError
from ckpt_tools.formats.one_save import StepCounts
from ckpt_tools.formats.rank_files.parts import (
    JoinedTensor,
    RankObject,
    RankTensor,
    ReplicaComparison,
    join,
)
from ckpt_tools.formats.slices import JOINED_BY_OWNER
from ckpt_tools.storage.reader import Files

_LEAVE_OUT = "Leave them out with -x, or save again from a job in which all ranks agree."
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


class RankEntries(NamedTuple):
    """Entries sorted by name, and what is to be said of them."""

    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...]
    problems: tuple[CheckpointError, ...]
    notes: tuple[str, ...]
    tree: Branch[str]


def entries_of(gathered: Gathered, files: Files) -> RankEntries:
    """The entries of all ranks' files; ``files`` is read only to compare small replicas.

    What each rank has its own value of becomes a dict of them, ``rank_0``, ``rank_1``…
    """
    apart: dict[str, Branch[str]] = {}
    whole = {path for path, held in gathered.objects.items() if not held[0].is_tensor}
    sections = names.sections_of(list(gathered.tensors | gathered.objects), objects=whole)
    comparison = ReplicaComparison(files)
    report = _JoinFindings()
    tensors: list[TensorEntry] = []
    for path, parts in gathered.tensors.items():
        joined = _beside_unread(join(parts, comparison), parts, gathered.objects.get(path))
        section = sections[path]
        is_step = report.sees_step(path, section, parts, joined)
        if joined.differing and joined.complaint is None and section == "other" and not is_step:
            own = [_own_tensor(path, part, section) for part in parts]
            apart[names.join(path)] = _of_ranks(own, parts)
            tensors += own
            continue
        entry = _tensor(path, parts[0], joined, section)
        tensors.append(entry)
        report.see(entry, joined)
    objects: list[ObjectEntry] = []
    for path, held in gathered.objects.items():
        if held[0].is_tensor and path in gathered.tensors:
            continue  # said of the tensor
        section = sections[path]
        other = None if held[0].is_tensor else _first_unequal(held)
        if report.is_shared(path, section, held, other):
            objects.append(_object(path, held[0], section))
            continue
        own_objects = [_object((*path, f"rank_{p.rank}"), p, section) for p in held]
        apart[names.join(path)] = _of_ranks(own_objects, held)
        objects += own_objects
    report.per_rank.extend(apart)
    return RankEntries(
        tuple(sorted(tensors, key=lambda entry: entry.fqn)),
        tuple(sorted(objects, key=lambda entry: entry.fqn)),
        (*gathered.clashes, *report.problems()),
        tuple(report.notes()),
        gathered.tree.map(lambda fqn: apart.get(fqn, fqn)),
    )


def _beside_unread(
    joined: JoinedTensor, parts: Sequence[RankTensor], others: Sequence[RankObject] | None
) -> JoinedTensor:
    """The tensor, with a complaint when it cannot be read on some ranks."""
    other = others[0] if others else None
    if other is None or not other.is_tensor or joined.complaint is not None:
        return joined
    first = parts[0].rank
    complaint = f"it is read on rank {first}, and on rank {other.rank} it is a {other.type_name}"
    return replace(joined, complaint=complaint)


def _of_ranks(
    entries: Sequence[TensorEntry | ObjectEntry], parts: Sequence[RankTensor | RankObject]
) -> Branch[str]:
    """The values of one place, as a dict with a key for each rank."""
    pairs = zip(parts, entries, strict=True)
    return dict_of({f"rank_{part.rank}": entry.fqn for part, entry in pairs})


def _tensor(path: Path, first: RankTensor, joined: JoinedTensor, section: Section) -> TensorEntry:
    return TensorEntry(
        fqn=names.join(path),
        path=path,
        section=section,
        dtype=first.dtype,
        shape=joined.shape,
        chunks=joined.chunks,
        layout=joined.layout,
        compared=not joined.uncompared,
    )


def _own_tensor(path: Path, part: RankTensor, section: Section) -> TensorEntry:
    """The entry of one rank's own tensor, such as the state of its random numbers."""
    own = (*path, f"rank_{part.rank}")
    chunk = Chunk(part.box, part.data, strides=part.strides, codec=part.codec, rank=part.rank)
    return TensorEntry(names.join(own), own, section, part.dtype, part.shape, (chunk,))


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


@dataclass(slots=True)
class _JoinFindings:
    """What was seen of all tensors, said once for many of them."""

    complaints: dict[str, list[str]] = field(default_factory=dict)
    differing_tensors: dict[str, int] = field(default_factory=dict)
    differing_objects: dict[str, int] = field(default_factory=dict)
    differing_replicas: dict[str, str] = field(default_factory=dict)
    uncompared: list[str] = field(default_factory=list)
    per_rank: list[str] = field(default_factory=list)
    has_flat_pieces: bool = False
    has_layouts: bool = False
    steps: StepCounts = field(default_factory=StepCounts)

    def sees_step(
        self, path: Path, section: Section, parts: Sequence[RankTensor], joined: JoinedTensor
    ) -> bool:
        """Take in a tensor if it counts steps; gives whether it does."""
        differing = None
        if joined.differing:
            differing = f"not the same on ranks {parts[0].rank} and {joined.differing[0]}"
        return len(parts) > 1 and self.steps.see(path, section, differing)

    def is_shared(
        self, path: Path, section: Section, held: Sequence[RankObject], other: RankObject | None
    ) -> bool:
        """Whether objects of several ranks are one entry; ``other`` is the first unequal one.

        An optimizer and a count of steps have no values of their own for each rank.
        """
        if other is None:
            if len(held) > 1:
                self.steps.see(path, section, None)
            return True
        if held[0].type_name is not None or other.type_name is not None:
            return False
        values = " and ".join(f"{part.value!r} on rank {part.rank}" for part in (held[0], other))
        is_step = self.steps.see(path, section, values)
        if section == "optim":
            self.differing_objects[names.join(path)] = other.rank
        return is_step or section == "optim"

    def see(self, entry: TensorEntry, joined: JoinedTensor) -> None:
        """Take in what was found when a tensor was joined."""
        self.has_layouts |= entry.layout is not None
        if joined.complaint is not None:
            self.complaints.setdefault(joined.complaint, []).append(entry.fqn)
        elif joined.differing:
            self.differing_tensors[entry.fqn] = joined.differing[0]
            self.has_flat_pieces |= entry.section == "optim" and bool(entry.shape)
        if joined.differing_replicas:
            self.differing_replicas[entry.fqn] = joined.differing_replicas[0]
        if joined.uncompared:
            self.uncompared.append(entry.fqn)

    def problems(self) -> Iterator[CheckpointError]:
        """What keeps entries from being used."""
        yield from self.steps.problems()
        for complaint, fqns in self.complaints.items():
            yield UnsupportedError(
                f"{some(fqns)}: {complaint}.",
                hint="The files are of different saves, or torch saved them so; save again.",
                about=fqns,
            )
        if self.differing_tensors:
            fqns = list(self.differing_tensors)
            hint = _LEAVE_OUT if self.has_layouts else JOINED_BY_OWNER
            yield UnsupportedError(
                f"{some(fqns)}: plain tensors (no DTensors) that differ between ranks, so that "
                "none is known to be right; "
                f"rank {self.differing_tensors[fqns[0]]} is the first that differs.",
                hint=_FLAT_SHARDS if self.has_flat_pieces else hint,
                about=fqns,
            )
        if self.differing_objects:
            fqns = list(self.differing_objects)
            yield UnsupportedError(
                f"{some(fqns)}: values that differ between ranks, so that none is known to be "
                f"right; rank {self.differing_objects[fqns[0]]} is the first that differs.",
                hint=_LEAVE_OUT,
                about=fqns,
            )
        if self.differing_replicas:
            yield replicas_differ(self.differing_replicas)

    def notes(self) -> Iterator[str]:
        """Notes for people."""
        if self.per_rank:
            yield f"Kept once per rank, as ….rank_N: {some(sorted(self.per_rank))}."
        if self.uncompared:
            yield (
                f"Replicas too large to be compared in passing: {some(self.uncompared)}. verify "
                "and --check compare them; a copy without --check takes those of the lowest rank."
            )
