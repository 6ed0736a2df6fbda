"""From what every rank's file holds to the entries of one checkpoint.

The parts of a tensor are joined here: boxes from the layouts that the ranks state, replicas where
boxes are equal, and a complaint where ranks do not agree. No file is read but to compare small
tensors that should be equal. Which rank files there should be, `checks` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import itemgetter, mul
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.coverage import replicas_differ
from ckpt_tools.core.dtypes import DType, dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    CheckpointIndex,
    Chunk,
    Entry,
    ObjectEntry,
    Path,
    Section,
    TensorEntry,
)
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plain_values import are_same
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.core.text import some
from ckpt_tools.errors import UnsupportedError
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
_KINDS = {StoredTensor: _PLAIN, StoredDTensor: "DTensor", StoredPieces: "CheckpointableTensor"}


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


def rank_tensors(stored: Stored, saved: SavedFile, rank: int) -> Iterator[RankTensor]:
    """The parts of a tensor that this file holds: a DTensor is one part, a CheckpointableTensor one
    for each of its pieces.
    """
    held, record = saved.held(stored), saved.record_of(stored.local.storage)
    for chunk in held.chunks:
        yield RankTensor(
            rank=rank,
            kind=_KINDS[type(stored)],
            dtype=dtype_named(stored.dtype),
            shape=stored.shape,
            chunk=chunk._replace(rank=rank),
            layout=held.layout,
            crc=record.crc,
            fills_record=chunk.data.length == record.length,
            flaw=None if held.flaw is None else held.flaw.message.removesuffix("."),
        )


def _joined(
    path: Path, section: Section, parts: Sequence[RankTensor], comparison: _Comparison
) -> tuple[TensorEntry, tuple[RankTensor, RankTensor] | None]:
    """The tensor of the parts that its ranks hold, which come in the order of the ranks.

    With it the first two parts that should hold the same elements and do not, if there are any.
    """
    first = parts[0]
    groups: dict[Box, list[RankTensor]] = {}
    for part in parts:
        if first.is_plain:  # every rank has all of it
            groups.setdefault(first.chunk.box, []).append(part)
        elif part.flaw is None and part.shape == first.shape:
            groups.setdefault(part.chunk.box, []).append(part)
    chunks: list[Chunk] = []
    unequal, compared = None, True
    for one, *others in groups.values():
        own = one.chunk
        verdicts = [comparison.equal(one, other) for other in others]
        compared = compared and None not in verdicts
        if False in verdicts:
            unequal = unequal or (one, others[verdicts.index(False)])
        replicas = [
            held.data
            for held, is_equal in zip((other.chunk for other in others), verdicts, strict=True)
            # Plain tensors that differ may even be of another shape.
            if (is_equal is not False or not first.is_plain)
            and (held.strides, held.codec) == (own.strides, own.codec)
            and held.data.length == own.data.length
        ]
        chunks.append(own._replace(replicas=tuple(replicas)))
    fqn = names.join(path)
    entry = TensorEntry(fqn, path, section, first.dtype, first.shape, tuple(chunks), first.layout)
    return replace(entry, compared=compared), unequal


def _disagreement(parts: Sequence[RankTensor]) -> str | None:
    """What two ranks say differently of one tensor, or None."""
    first = parts[0]
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
class _Comparison:
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


def entries_of(
    root: str,
    tensors: Mapping[Path, Sequence[RankTensor]],
    objects: Mapping[Path, Sequence[ObjectEntry]],
    tree: Branch[str],
    ranks: Mapping[str, int],
    files: Files,
) -> CheckpointIndex:
    """The entries of all ranks' files, sorted by name, and what is to be said of them.

    ``tensors`` and ``objects`` are what the ranks hold, by path, in the order of the ranks; the
    sections of objects are found here. ``ranks`` are those of the files, by their paths. ``files``
    are read only to compare small replicas.
    """
    both = [path for path in objects if path in tensors]
    whole = {path for path, held in objects.items() if not _holds_tensors(held[0])}.difference(both)
    sections = names.sections_of(list(dict.fromkeys([*tensors, *objects])), objects=whole)
    replicas, comparison, apart = Replicas(_of_two_places(sections)), _Comparison(files), set()
    for path in both:
        own = [replace(one, section=sections[path]) for one in objects[path]]
        if _kept_apart(replicas, tensors[path], own, ranks, comparison):
            apart.add(path)
    torn = _add_tensors(
        replicas, {p: t for p, t in tensors.items() if p not in apart}, sections, comparison
    )
    for path, held in objects.items():
        if path not in tensors:  # else said of the tensor
            _add_object(replicas, held, sections[path], ranks)
    found = replicas.sorted(TensorEntry)
    notes = list(replicas.notes())
    uncompared = [entry.fqn for entry in found if not entry.compared]
    if uncompared:
        notes.append(
            f"Replicas too large to be compared in passing: {some(uncompared)}. verify "
            "and --check compare them; a copy without --check takes those of the lowest rank."
        )
    hint = LEAVE_OUT if any(entry.layout is not None for entry in found) else JOINED_BY_OWNER
    wrong = [one for one, _ in replicas.differing if isinstance(one, TensorEntry)]
    if any(entry.section == "optim" and entry.shape for entry in wrong):
        hint = _FLAT_SHARDS
    torn_problem = [replicas_differ(torn)] if torn else []
    return CheckpointIndex(
        root,
        "ranks",
        found,
        replicas.sorted(ObjectEntry),
        notes=tuple(notes),
        problems=(*replicas.problems("plain tensors (no DTensors)", hint=hint), *torn_problem),
        tree=replicas.within(tree),
    )


def _of_two_places(paths: Iterable[Path]) -> dict[str, str]:
    """Complaints of names that stand at different places in the files of two ranks."""
    found: dict[str, Path] = {}
    complaints = {}
    for path in paths:
        fqn = names.join(path)
        first = found.setdefault(fqn, path)
        if first != path:
            complaints[fqn] = f"it is {list(first)} on some ranks, and {list(path)} on others"
    return complaints


def _holds_tensors(entry: ObjectEntry) -> bool:
    """Whether tensors are in it, which cannot be read."""
    return isinstance(entry.flaw, UnsupportedError)


def _kept_apart(
    replicas: Replicas,
    parts: Sequence[RankTensor],
    objects: Sequence[ObjectEntry],
    ranks: Mapping[str, int],
    comparison: _Comparison,
) -> bool:
    """Take in what is a tensor on some ranks and none on others (a random state, or None), where
    each rank may have its own; else a complaint. Gives whether it was taken in.
    """
    one = objects[0]
    is_own = one.section == "other" and all(part.is_plain and not part.flaw for part in parts)
    if not is_own or one.fqn in replicas.complaints:
        how = "read" if _holds_tensors(one) else "a tensor"
        there = f"on rank {ranks[one.data.path]} it is a {one.type_name or 'plain value'}"
        replicas.complaints[one.fqn] = f"it is {how} on rank {parts[0].rank}, and {there}"
        return False
    held: list[tuple[int, Entry]] = [(ranks[other.data.path], other) for other in objects]
    held += [(p.rank, _joined(one.path, one.section, [p], comparison)[0]) for p in parts]
    held.sort(key=itemgetter(0))
    replicas.add_unequal(held[0][1], held, rank=None, how="")
    return True


def _add_tensors(
    replicas: Replicas,
    tensors: Mapping[Path, Sequence[RankTensor]],
    sections: Mapping[Path, Section],
    comparison: _Comparison,
) -> dict[str, str]:
    """Take in the tensors as the ranks hold them; gives the rows of shards on which two ranks
    differ, and which ranks these are, by the names of the tensors.
    """
    torn: dict[str, str] = {}
    for path, parts in tensors.items():
        entry, unequal = _joined(path, sections[path], parts, comparison)
        flaws = (part.flaw for part in parts if part.flaw is not None)
        complaint = next(flaws, None) or _disagreement(parts)
        if complaint is not None:
            replicas.complaints[entry.fqn] = complaint
        if unequal is None:
            replicas.add(entry, several=len(parts) > 1)
            continue
        one, other = unequal
        two = f"ranks {one.rank} and {other.rank}"
        if not parts[0].is_plain:
            replicas.add(entry, several=True)
            torn[entry.fqn] = f"{one.chunk.box} ({two})"
            continue
        alone = replace(entry, compared=True)
        held = [
            (part.rank, replace(alone, dtype=part.dtype, shape=part.shape, chunks=(part.chunk,)))
            for part in parts
        ]
        replicas.add_unequal(entry, held, rank=other.rank, how=f"not the same on {two}")
    return torn


def _add_object(
    replicas: Replicas, held: Sequence[ObjectEntry], section: Section, ranks: Mapping[str, int]
) -> None:
    """Take in an object as the ranks hold it; what is not opened is equal to no other."""
    first = replace(held[0], section=section)
    for other in () if _holds_tensors(first) else held[1:]:
        are_opened = first.opened and other.opened
        if not are_opened or not are_same(other.value, first.value):
            own = [(ranks[one.data.path], replace(one, section=section)) for one in held]
            rank = ranks[other.data.path]
            values = f"{first.value!r} on rank {own[0][0]} and {other.value!r} on rank {rank}"
            replicas.add_unequal(first, own, rank=rank, how=values if are_opened else "")
            return
    replicas.add(first, several=len(held) > 1)
