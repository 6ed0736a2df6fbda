"""Is a checkpoint complete and undamaged? `verify` reads all of it, `verify_quick` only headers.

The report names damaged tensors, rows and ranks, and what is still good. It says what was proven
and what cannot be: only some formats have checksums, and no checksum tells a file of this save from
the same file of an older one. Fingerprints do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.origin import reads_one_save
from ckpt_tools.copying.parallel import Background, Tally, ignore_bytes
from ckpt_tools.core.coverage import uncovered
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import (
    ByteRange,
    CheckpointIndex,
    Chunk,
    LocatedIndex,
    Section,
    TensorEntry,
)
from ckpt_tools.core.records import Json, as_json
from ckpt_tools.core.text import Shown, counted, first_of, rank_spans
from ckpt_tools.errors import CheckpointError, IncompleteError, NotReadError, fault_in
from ckpt_tools.proof.canonical_names import canonical_names
from ckpt_tools.proof.consistency import compare_model_and_optimizer, compare_steps
from ckpt_tools.proof.damage import Damage, IntervalMap, ReadResult, read_everything
from ckpt_tools.proof.replicas import differing_replicas
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files


class DamagedTensor(NamedTuple):
    """A tensor that is not whole: which boxes are lost, and which ranks had saved them.

    ``lost`` is empty when all rows are there and something else is wrong, ``lost_elements`` says
    how many these are.
    """

    fqn: str
    section: Section
    shape: tuple[int, ...]
    lost_elements: int
    lost: tuple[Box, ...]
    ranks: tuple[int, ...]


class Rescue(NamedTuple):
    """A box whose own bytes are not good, and the path of a replica that is."""

    fqn: str
    box: Box
    lost: str
    held_by: str


class _RankState(NamedTuple):
    """A rank that saved something, its files, and whether all of them are whole."""

    rank: int
    whole: bool
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """What `verify` found. ``reading`` is None when only headers were read.

    ``unread`` are no faults: it is whole, and torch reads what this program does not.
    ``lost`` are names without an entry: what went with a file that said how large they are.
    ``file_bytes`` is the length of all files together, headers and padding included.
    """

    root: str
    format: str
    problems: tuple[CheckpointError, ...]
    unread: tuple[NotReadError, ...]
    notes: tuple[str, ...]
    tensors: int
    damaged: tuple[DamagedTensor, ...]
    objects: int
    damaged_objects: tuple[str, ...]
    lost: tuple[str, ...]
    rescued: tuple[Rescue, ...]
    ranks: tuple[_RankState, ...]
    reading: ReadResult | None
    file_bytes: int

    @property
    def whole(self) -> bool:
        """Whether no problem was found."""
        return not self.problems

    @property
    def verdict(self) -> str:
        """``complete``, or the gravest fault: ``NOT COMPLETE``, ``DAMAGED``."""
        return fault_in(self.problems) or "complete"

    def __str__(self) -> str:
        """The verdict, and the first problems."""
        entries = f"{counted(self.tensors, 'tensor')}, {counted(self.objects, 'object')}"
        by = "by its headers" if self.reading is None else "every byte was read"
        problems = [f"  {one.first_line}" for one in self.problems]
        return "\n".join([f"{self.root}: {self.verdict}, {by}; {entries}", *first_of(problems, 12)])

    def to_dict(self) -> dict[str, Json]:
        """The object of schema ckpt-tools/verify/1, which `verify --json` prints.

        ``against`` is None: what --against adds.
        """
        reading = self.reading
        return {
            "schema": "ckpt-tools/verify/1",
            "path": self.root,
            "format": self.format,
            "mode": "quick" if reading is None else "full",
            "whole": self.whole,
            "problems": as_json(self.problems),
            "unread": as_json(self.unread),
            "tensors": {
                "total": self.tensors,
                "whole": self.tensors - len(self.damaged),
                "hurt": as_json(self.damaged),
            },
            "lost": [*self.lost],
            "objects": {"total": self.objects, "hurt": [*self.damaged_objects]},
            "replicas": as_json(self.rescued),
            "ranks": as_json(self.ranks),
            "crcs": None if reading is None else reading.crcs,
            "checked_bytes": None if reading is None else reading.checked_bytes,
            "unchecked_bytes": None if reading is None else reading.plain_bytes,
            "file_bytes": self.file_bytes,
            "notes": [*self.notes],
            "against": None,
        }


@reads_one_save
def verify_quick(index: CheckpointIndex, files: Files) -> VerifyReport:
    """Check a checkpoint by its headers: files, lengths, coverage, shapes, optimizer names."""
    located = formats.locate(index, files)
    return _report(index, located, files)


@reads_one_save
def verify(
    index: CheckpointIndex,
    files: Files,
    *,
    threads: int | None = None,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> VerifyReport:
    """Check a checkpoint by reading every byte range of it once, and replicas against one another.

    Several ranges are read at a time, with about 4 MiB of memory for each of ``threads``.
    ``on_bytes`` gets the number of bytes read since its last call; `bytes_to_read` estimates their
    sum.
    """
    # Of a store, who has read an item knows what it is like.
    locate = partial(formats.locate, index, files)
    locating = None if is_address(index.root) else Background(locate)
    reading = read_everything(index, files, seen=KnownCrcs(), threads=threads, on_bytes=on_bytes)
    located = locate() if locating is None else locating.result()
    condition = _DamageMap(located, [damage.data for damage in reading.damages])
    known = frozenset(fqn for problem in located.problems for fqn in problem.about)
    differing = differing_replicas(
        [entry for entry in located.tensors if entry.fqn not in known],
        files,
        is_good=condition.is_good,
        threads=threads,
        tally=Tally(on_bytes),
    )
    report = _report(index, located, files, reading=reading, differing=differing)
    if is_address(index.root):  # it would be requests beyond each byte once
        return report
    steps = compare_steps(located, files, is_good=condition.is_good)
    return replace(report, notes=(*report.notes, *steps))


def bytes_to_read(index: CheckpointIndex) -> int:
    """About how many bytes `verify` will read: every file once, and replicas again to compare."""
    replicas = sum(
        data.length for entry in index.tensors for chunk in entry.chunks for data in chunk.replicas
    )
    return index.file_bytes + replicas


def _report(
    index: CheckpointIndex,
    located: LocatedIndex,
    files: Files,
    *,
    reading: ReadResult | None = None,
    differing: Sequence[CheckpointError] = (),
) -> VerifyReport:
    """What was found in the index, by reading everything, and by comparing replicas."""
    damages = reading.damages if reading is not None else []
    found = {id(problem) for problem in index.problems}
    unread = [problem for problem in located.problems if isinstance(problem, NotReadError)]
    new = [p for p in located.problems if id(p) not in found and p not in unread]
    bad_items = _bad_items(index, new, files)
    condition = _DamageMap(located, [damage.data for damage in (*bad_items, *damages)])
    try:
        inside = canonical_names(located, located.tensors)
        unfit, unfit_notes = compare_model_and_optimizer(located, inside)
    except CheckpointError as error:
        unfit, unfit_notes = [], [error.message]
    lost_files = {problem.file for problem in index.problems if problem.file is not None}
    known = {fqn for problem in located.problems for fqn in problem.about}
    problems = [
        *index.problems,
        *_not_in_damages(index, new, bad_items, damages),
        # The problem of files that are missing or lost says why rows are.
        *([] if located.missing or lost_files else uncovered(located.tensors, known=known)),
        *_about([one for one in damages if one.data.path not in lost_files], located),
        *differing,
        *unfit,
    ]
    named = {fqn for problem in problems for fqn in problem.about}
    damaged, count = condition.damaged_tensors(named), index.count
    lost = replace(index, problems=tuple(problems)).lost
    return VerifyReport(
        root=index.root,
        format=index.format,
        problems=tuple(problems),
        unread=tuple(unread),
        notes=(*index.notes, *unfit_notes, *([] if damaged or lost else _held_by_replicas(index))),
        tensors=count.tensors,
        damaged=damaged,
        objects=count.objects,
        damaged_objects=condition.damaged_objects(named),
        lost=lost,
        rescued=condition.rescued(),
        ranks=_ranks(index, lambda path: path in lost_files or condition.is_damaged_file(path)),
        reading=reading,
        file_bytes=index.file_bytes,
    )


class _DamageMap:
    """What of a checkpoint is good; ``damaged`` are ranges beyond missing and short files."""

    def __init__(self, index: LocatedIndex, damaged: Sequence[ByteRange]) -> None:
        self._index = index
        self._lengths = {file.path: file.length for file in index.files}
        self._damaged = IntervalMap(damaged)
        self._damaged_files = self._damaged.files()
        self._needed: dict[str, int] = defaultdict(int)
        for entry in index.tensors:
            for chunk in entry.chunks:
                end = chunk.data.offset + chunk.data.length
                self._needed[chunk.data.path] = max(self._needed[chunk.data.path], end)

    def is_good(self, data: ByteRange) -> bool:
        """Whether a byte range is there and undamaged."""
        length = self._lengths.get(data.path, data.offset + data.length)
        if length is None or data.offset + data.length > length:
            return False
        return not self._damaged.meeting(data)

    def is_damaged_file(self, path: str) -> bool:
        """Whether a file is missing, too short, or damaged anywhere."""
        length = self._lengths.get(path, self._needed[path])
        return length is None or length < self._needed[path] or path in self._damaged_files

    def damaged_tensors(self, named: Collection[str]) -> tuple[DamagedTensor, ...]:
        """The tensors that have lost rows, and those that are ``named`` by a problem."""
        tensors = (self._damage(entry) for entry in self._index.tensors)
        return tuple(one for one in tensors if one.lost or one.fqn in named)

    def _damage(self, entry: TensorEntry) -> DamagedTensor:
        good = {chunk.box for chunk in entry.chunks if self._good_place(chunk) is not None}
        bad = [chunk for chunk in entry.chunks if chunk.box.numel and chunk.box not in good]
        lost: list[Box] = []
        if bad or sum(box.numel for box in good) != entry.numel:
            lost = holes(entry.shape, good)
        ranks = {chunk.rank for chunk in bad if chunk.rank is not None}
        if lost and not bad and entry.layout is not None:
            # No file has them: the layout states who had.
            for rank, box in enumerate(entry.layout.boxes(entry.shape)):
                if any(box.intersect(hole) is not None for hole in lost):
                    ranks.add(rank)
        numel, savers = sum(box.numel for box in lost), tuple(sorted(ranks))
        return DamagedTensor(entry.fqn, entry.section, entry.shape, numel, tuple(lost), savers)

    def _good_place(self, chunk: Chunk) -> ByteRange | None:
        """The first place of a chunk that is good, or None."""
        return next(filter(self.is_good, (chunk.data, *chunk.replicas)), None)

    def damaged_objects(self, named: Collection[str]) -> tuple[str, ...]:
        """The objects whose bytes are not good, or that are ``named`` by a problem."""
        return tuple(
            entry.fqn
            for entry in self._index.objects
            if entry.fqn in named or not self.is_good(entry.data)
        )

    def rescued(self) -> tuple[Rescue, ...]:
        """The boxes that only a replica still holds."""
        rescues: list[Rescue] = []
        for entry in self._index.tensors:
            for chunk in entry.chunks:
                place = self._good_place(chunk) if chunk.replicas else None
                if place is not None and place != chunk.data:
                    rescues.append(Rescue(entry.fqn, chunk.box, chunk.data.path, place.path))
        return tuple(rescues)


def _bad_items(
    index: CheckpointIndex, new: Sequence[CheckpointError], files: Files
) -> list[Damage]:
    """Which items of the tensors that could not be located are at fault: each is tried alone.

    ``new`` are the problems that locating found.
    """
    damages: list[Damage] = []
    named = sorted({fqn for problem in new for fqn in problem.about})
    for entry in filter(None, map(index.tensor, named)):
        for chunk in entry.chunks:
            same_box = tuple(other for other in entry.chunks if other.box == chunk.box)
            alone = replace(entry, chunks=same_box)
            one = replace(index, tensors=(alone,), objects=(), problems=())
            damages += [Damage(chunk.data, fault) for fault in formats.locate(one, files).problems]
    return damages


def _not_in_damages(
    index: CheckpointIndex,
    new: Sequence[CheckpointError],
    bad_items: Sequence[Damage],
    damages: Sequence[Damage],
) -> list[CheckpointError]:
    """The ``new`` problems that locating found, without those that a damage describes better."""
    spans = IntervalMap([damage.data for damage in damages])
    names = {
        fqn for damage in bad_items for fqn in damage.error.about if not spans.meeting(damage.data)
    }
    names |= {entry.fqn for entry in index.objects if entry.flaw is not None}
    return [problem for problem in new if not problem.about or problem.about & names]


def _about(damages: Sequence[Damage], located: LocatedIndex) -> list[CheckpointError]:
    """The errors of damages, with the names of the entries that they are in."""
    if not damages:
        return []
    spans = IntervalMap([damage.data for damage in damages])
    about: list[set[str]] = [set() for _ in damages]
    for fqn, data in _held(located):
        for place in spans.meeting(data):
            about[place].add(fqn)
    return [error.concerning(fqns) for (_, error), fqns in zip(damages, about, strict=True)]


def _held(index: CheckpointIndex) -> Iterator[tuple[str, ByteRange]]:
    """Every byte range of every entry, replicas included."""
    for entry in index.tensors:
        for chunk in entry.chunks:
            yield entry.fqn, chunk.data
            yield from ((entry.fqn, data) for data in chunk.replicas)
    yield from ((item.fqn, item.data) for item in index.objects)


def _held_by_replicas(index: CheckpointIndex) -> list[str]:
    """A note when files are missing and yet no row is.

    What a missing file held is known where an item is placed in it, and where layouts on the mesh
    of all ranks state it; else it may have held names and rows of which nothing is left.
    """
    if not index.missing:
        return []
    placed = {data.path for _, data in _held(index)}
    meshes = {entry.layout.mesh.size for entry in index.tensors if entry.layout is not None}
    if index.world_size not in meshes and not placed.issuperset(index.missing):
        return []
    held = f"replicas in other files hold what the {len(index.missing)} missing files held"
    return [f"Every row of every tensor is still present: {held}."]


def _ranks(index: CheckpointIndex, is_damaged: Callable[[str], bool]) -> tuple[_RankState, ...]:
    """The ranks that saved something, and whether their files are good."""
    saved = {(chunk.rank, chunk.data.path) for entry in index.tensors for chunk in entry.chunks}
    saved |= {(formats.rank_of(file.path), file.path) for file in index.files}
    paths: dict[int, list[str]] = {}
    for rank, path in saved:
        if rank is not None:
            paths.setdefault(rank, []).append(path)
    return tuple(
        _RankState(rank, not any(map(is_damaged, held)), tuple(sorted(held)))
        for rank, held in sorted(paths.items())
    )


def expecting_ranks(report: VerifyReport, index: CheckpointIndex, ranks: int) -> VerifyReport:
    """The same report, with a problem unless exactly the ranks 0 to N - 1 have files.

    In some formats a rank with nothing to save has a file, too: there `world_size` counts.
    """
    actual = {state.rank for state in report.ranks}
    if formats.named(index.format).counts_ranks and index.world_size is not None:
        actual = set(range(index.world_size))
    expected = set(range(ranks))
    if actual == expected:
        return report
    absent, more = sorted(expected - actual), sorted(actual - expected)
    faults = [f"ranks {rank_spans(absent)} have no file"] if absent else []
    faults += [f"there are files of ranks {rank_spans(more)}"] if more else []
    problem = IncompleteError(
        f"{index.root} should be of {counted(ranks, 'rank')}, but {' and '.join(faults)}."
    )
    return replace(report, problems=(problem, *report.problems))


def holes(shape: Sequence[int], boxes: Collection[Box]) -> list[Box]:
    """The elements of ``shape`` that none of ``boxes`` holds, as disjoint boxes in row-major order.

    Neighbouring holes along the first dimension are one.
    """
    if 0 in shape:
        return []
    solid = [box for box in boxes if 0 not in box.sizes]
    if not solid:
        return [Box.whole(shape)]
    if not shape:
        return []
    found: list[Box] = []
    last: dict[Box, int] = {}  # by what a hole is in the other dimensions, where it is in these
    waiting = sorted(solid, key=lambda box: box.offsets[0], reverse=True)
    here: list[Box] = []
    edges = {0, shape[0]} | {edge for box in solid for edge in (box.offsets[0], box.ends[0])}
    # Between two edges all rows are held by the same boxes.
    for start, end in pairwise(sorted(edge for edge in edges if 0 <= edge <= shape[0])):
        here = [box for box in here if box.ends[0] > start]
        while waiting and waiting[-1].offsets[0] <= start:
            here.append(waiting.pop())
        if any(box.sizes[1:] == tuple(shape[1:]) for box in here):
            continue
        for hole in holes(shape[1:], {Box(box.offsets[1:], box.sizes[1:]) for box in here}):
            place = last.get(hole)
            if place is not None and found[place].ends[0] == start:
                first = found[place].offsets[0]
                found[place] = Box((first, *hole.offsets), (end - first, *hole.sizes))
            else:
                last[hole] = len(found)
                found.append(Box((start, *hole.offsets), (end - start, *hole.sizes)))
    return found


def describe(box: Box, shape: Sequence[int]) -> str:
    """A box as text: ``rows 3:6 of 11``, or its slices."""
    if not shape:
        return "its one value"
    if box == Box.whole(shape):
        return f"all of {list(shape)}"
    if box.sizes[1:] == tuple(shape[1:]):
        return f"rows {box.offsets[0]}:{box.ends[0]} of {shape[0]:,}"
    return f"{box} of {list(shape)}"
