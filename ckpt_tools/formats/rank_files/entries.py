"""From what every rank's file holds to the entries of one checkpoint.

The parts of a tensor are joined here: boxes from the layouts that the ranks state, replicas where
boxes are equal, and a complaint where ranks do not agree. No file is read but to compare small
tensors that should be equal. Which rank files there should be, `checks` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import mul
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.coverage import replicas_differ
from ckpt_tools.core.dtypes import DType, dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    NO_TREE,
    ByteRange,
    CheckpointIndex,
    Chunk,
    ObjectEntry,
    Path,
    Section,
    TensorEntry,
)
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plain_values import PlainValue, are_same
from ckpt_tools.core.state_tree import Branch, merge
from ckpt_tools.core.text import some
from ckpt_tools.errors import CheckpointError, UnsupportedError
from ckpt_tools.formats.pickle.stored import Stored, StoredDTensor, StoredPieces, StoredTensor
from ckpt_tools.formats.replicas import LEAVE_OUT, Replicas
from ckpt_tools.formats.slices import JOINED_BY_OWNER
from ckpt_tools.formats.torch_file.open import SavedFile
from ckpt_tools.storage.reader import Files

_FLAT_SHARDS = (
    "FSDP1's optimizer.state_dict() has flat pieces without names or shapes: only a job with as "
    "many ranks, wrapped alike, loads them. --only model takes the model alone. An optimizer that "
    "converts is saved by FSDP.optim_state_dict(), or with FSDP2 (verl: strategy=fsdp2)."
)

# Buffers and step counters are small; what is larger is compared by the CRCs of its records.
MAX_COMPARED = 1 << 20
_MAX_COMPARED_IN_ALL = 512 << 20
_PLAIN = "plain tensor"
_KINDS = {
    StoredTensor: _PLAIN,
    StoredDTensor: "DTensor",
    StoredPieces: "CheckpointableTensor",
}


class RankTensor(NamedTuple):
    """What one rank holds of a tensor.

    ``shape`` is the whole tensor's, ``layout`` a DTensor's. ``crc`` is that of the record, which
    the part fills when ``fills_record``. ``flaw`` says why the part cannot be placed.
    """

    rank: int
    kind: str
    dtype: DType
    shape: tuple[int, ...]
    chunk: Chunk
    layout: Layout | None
    crc: int | None
    fills_record: bool
    flaw: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is no shard: every rank holds all of it."""
        return self.kind == _PLAIN


class RankObject(NamedTuple):
    """What one rank holds that is not a tensor, or one that cannot be read, as ``flaw`` says."""

    rank: int
    data: ByteRange
    value: PlainValue
    type_name: str | None
    flaw: CheckpointError | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether tensors are in it, which cannot be read."""
        return isinstance(self.flaw, UnsupportedError)

    @property
    def is_opened(self) -> bool:
        """Whether ``value`` is its value."""
        return self.type_name is None


def rank_tensors(stored: Stored, saved: SavedFile, rank: int) -> Iterator[RankTensor]:
    """The parts of a tensor that this file holds: a DTensor is one part, a CheckpointableTensor one
    for each of its pieces.
    """
    chunks, layout, flaw = saved.held(stored)
    record = saved.record_of(stored.local.storage)
    for chunk in chunks:
        yield RankTensor(
            rank=rank,
            kind=_KINDS[type(stored)],
            dtype=dtype_named(stored.dtype),
            shape=stored.shape,
            chunk=chunk._replace(rank=rank),
            layout=layout,
            crc=record.crc,
            fills_record=chunk.data.length == record.length,
            flaw=None if flaw is None else flaw.message.removesuffix("."),
        )


def _chunks_of(
    parts: Sequence[RankTensor], comparison: ReplicaComparison
) -> tuple[tuple[Chunk, ...], tuple[Box, int, int] | None, bool]:
    """The chunks of a tensor, from the parts of its ranks, which come in the order of the ranks.

    Also a box and two ranks that hold other elements of it, the lowest and another, and whether all
    that should be equal was small enough to be compared.
    """
    first = parts[0]
    groups: dict[Box, list[RankTensor]] = {}
    for part in parts:
        if first.is_plain:  # every rank has all of it
            groups.setdefault(first.chunk.box, []).append(part)
        elif part.flaw is None and part.shape == first.shape:
            groups.setdefault(part.chunk.box, []).append(part)
    chunks, unequal, compared = [], None, True
    for box, (one, *others) in groups.items():
        verdicts = [comparison.equal(one, other) for other in others]
        compared = compared and None not in verdicts
        if False in verdicts:
            unequal = unequal or (box, one.rank, others[verdicts.index(False)].rank)
        pairs = zip(others, verdicts, strict=True)
        alike = [other for other, is_equal in pairs if is_equal is not False]
        # Plain tensors that differ may even be of another shape.
        chunks.append(chunk_of([one, *(alike if first.is_plain else others)]))
    return tuple(chunks), unequal, compared


def chunk_of(group: Sequence[RankTensor]) -> Chunk:
    """One chunk of the parts that hold the same box; the lowest rank's bytes come first."""
    first = group[0].chunk
    layout = first.strides, first.codec, first.data.length
    replicas = (
        one.data
        for one in (part.chunk for part in group[1:])
        if (one.strides, one.codec, one.data.length) == layout
    )
    return first._replace(replicas=tuple(replicas))


def _disagreement(first: RankTensor, parts: Sequence[RankTensor]) -> str | None:
    """What two ranks say differently of one tensor, or None."""
    for part in parts:
        both, what = (first, part), "it is"
        layouts = [one.layout for one in both if one.layout is not None]
        if part.kind != first.kind:
            said = [f"a {one.kind}" for one in both]
        elif part.dtype != first.dtype:
            said = [one.dtype.name for one in both]
        elif not part.is_plain and part.shape != first.shape:
            said, what = [str(list(one.shape)) for one in both], "its global shape is"
        elif part.layout != first.layout:
            said = [f"({layout}) of {layout.mesh}" for layout in layouts]
        else:
            continue
        return f"{what} {said[0]} on rank {first.rank} and {said[1]} on rank {part.rank}"
    return None


@dataclass(slots=True)
class ReplicaComparison:
    """Compares parts that should be equal, by the CRCs of their records or by their bytes."""

    files: Files
    left: int = field(default=_MAX_COMPARED_IN_ALL)
    _kept: tuple[RankTensor, bytes] | None = None

    def equal(self, one: RankTensor, other: RankTensor) -> bool | None:
        """Whether two parts hold the same elements; None when they are too large to be read."""
        here, there = one.chunk, other.chunk
        if one.shape != other.shape or here.box != there.box or one.dtype != other.dtype:
            return False
        if here.box.numel == 0 or here.data == there.data:
            return True
        if here.codec != there.codec:
            return None
        whole = one.fills_record and other.fills_record and here.strides == there.strides
        if whole and one.crc is not None and other.crc is not None:
            return one.crc == other.crc
        if max(here.data.length, there.data.length) > MAX_COMPARED or self.left <= 0:
            return None
        self.left -= here.data.length
        if self._kept is None or self._kept[0] is not one:  # it is compared with all other ranks
            self._kept = (one, elements(one, self.files))
        return self._kept[1] == elements(other, self.files)


def elements(part: RankTensor, files: Files) -> bytes:
    """The elements of a small part, row-major, as they are stored."""
    data, strides, size = files.read(*part.chunk.data), part.chunk.strides, part.dtype.itemsize
    if strides is None:
        return data
    places = (sum(map(mul, index, strides)) for index in product(*map(range, part.chunk.box.sizes)))
    return b"".join(data[size * place : size * (place + 1)] for place in places)


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
    for path in gathered.tensors:
        rows = _add_tensor(replicas, path, gathered, sections[path], comparison)
        if rows is not None:
            torn[names.join(path)] = rows
    for path, objects in gathered.objects.items():
        if not objects[0].is_tensor or path not in gathered.tensors:  # else said of the tensor
            _add_object(replicas, path, objects, sections[path])
    tensors = replicas.sorted(TensorEntry)
    notes = list(replicas.notes())
    uncompared = [entry.fqn for entry in tensors if not entry.compared]
    if uncompared:
        notes.append(
            f"Replicas too large to be compared in passing: {some(uncompared)}. verify "
            "and --check compare them; a copy without --check takes those of the lowest rank."
        )
    problems = [
        *gathered.clashes,
        *replicas.problems("plain tensors (no DTensors)", hint=_hint(replicas)),
        *([replicas_differ(torn)] if torn else []),
    ]
    return CheckpointIndex(
        root,
        "ranks",
        tensors,
        replicas.sorted(ObjectEntry),
        notes=tuple(notes),
        problems=tuple(problems),
        tree=replicas.within(gathered.tree),
    )


def _add_tensor(
    replicas: Replicas,
    path: Path,
    gathered: Gathered,
    section: Section,
    comparison: ReplicaComparison,
) -> str | None:
    """Take in a tensor as the ranks hold it; gives the rows of a shard on which two ranks differ,
    and which ranks these are.
    """
    parts, others = gathered.tensors[path], gathered.objects.get(path, ())
    first, fqn = parts[0], names.join(path)
    chunks, unequal, compared = _chunks_of(parts, comparison)
    entry = TensorEntry(
        fqn, path, section, first.dtype, first.shape, chunks, first.layout, compared=compared
    )
    flaws = (part.flaw for part in parts if part.flaw is not None)
    complaint = next(flaws, None) or _disagreement(first, parts)
    if complaint is None and others and others[0].is_tensor:
        here, there = f"it is read on rank {first.rank}", f"on rank {others[0].rank}"
        complaint = f"{here}, and {there} it is a {others[0].type_name}"
    if complaint is not None:
        replicas.complaints[fqn] = complaint
    if unequal is None:
        replicas.add(entry, several=len(parts) > 1)
        return None
    box, lowest, other = unequal
    if not first.is_plain:
        replicas.add(entry, several=len(parts) > 1)
        return f"{box} (ranks {lowest} and {other})"
    alone = replace(entry, compared=True)
    held = (
        (one.rank, replace(alone, dtype=one.dtype, shape=one.shape, chunks=(one.chunk,)))
        for one in parts
    )
    how = f"not the same on ranks {lowest} and {other}"
    replicas.add_unequal(entry, held, rank=other, how=how)
    return None


def _hint(replicas: Replicas) -> str:
    """What to do about plain tensors that differ."""
    wrong = [one for one, _ in replicas.differing if isinstance(one, TensorEntry)]
    if any(entry.section == "optim" and entry.shape for entry in wrong):
        return _FLAT_SHARDS
    has_layouts = any(entry.layout is not None for entry in replicas.sorted(TensorEntry))
    return LEAVE_OUT if has_layouts else JOINED_BY_OWNER


def _add_object(
    replicas: Replicas, path: Path, held: Sequence[RankObject], section: Section
) -> None:
    """Take in an object as the ranks hold it; what is not opened is equal to no other."""
    first, entry = held[0], _object(path, held[0], section)
    for other in () if first.is_tensor else held[1:]:
        are_opened = first.is_opened and other.is_opened
        if not are_opened or not are_same(other.value, first.value):
            values = " and ".join(f"{part.value!r} on rank {part.rank}" for part in (first, other))
            own = ((part.rank, _object(path, part, section)) for part in held)
            how = values if are_opened else ""
            replicas.add_unequal(entry, own, rank=other.rank, how=how)
            return
    replicas.add(entry, several=len(held) > 1)


def _object(path: Path, part: RankObject, section: Section) -> ObjectEntry:
    return ObjectEntry(
        fqn=names.join(path),
        path=path,
        section=section,
        data=part.data,
        value=part.value,
        opened=part.is_opened,
        type_name=part.type_name,
        flaw=part.flaw,
    )
