"""The common index: every tensor of a checkpoint as boxes, every box as a byte range.

Readers make it, everything else uses it. It knows nothing of formats, and it opens no file.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from operator import add, attrgetter
from typing import Literal, NamedTuple, NewType, TypeAlias, TypeVar, overload

from ckpt_tools.core import text
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box, BoxFinder, row_major_strides
from ckpt_tools.core.layout import Layout, Mesh
from ckpt_tools.core.plain_values import PlainValue, closed_in
from ckpt_tools.core.state_tree import Branch, completed
from ckpt_tools.core.state_tree import Path as Path  # noqa: PLC0414 (entries have one)
from ckpt_tools.errors import CheckpointError, NotReadError, UnsupportedError

Section = Literal["model", "optim", "other"]
SECTIONS: tuple[Section, ...] = ("model", "optim", "other")

_Slice: TypeAlias = "slice[int | None, int | None, int | None]"
# The constructors that NamedTuple generates would take two seconds of a million chunks.
_make = tuple.__new__


class ByteRange(NamedTuple):
    """``length`` bytes of a file, from byte ``offset`` on."""

    path: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """One stored box of a tensor, and where its bytes are.

    ``strides`` are in elements, None for packed row-major data. ``codec`` names what the bytes are:
    None for the raw little-endian elements; anything else must go through `formats.locate` first.
    ``replicas`` are other byte ranges that hold the same box, ``rank`` who saved it, if known.

    ``of`` is the chunk that this one is a view of, while that is not located: ``data`` and
    ``strides`` are then places among its elements, as if these were packed, from byte 0 on.
    """

    box: Box
    data: ByteRange
    strides: tuple[int, ...] | None = None
    codec: str | None = None
    replicas: tuple[ByteRange, ...] = ()
    rank: int | None = None
    of: Chunk | None = None

    @property
    def stored(self) -> Chunk:
        """The chunk in the file: that which this is a view of, or itself."""
        return self if self.of is None else self.of

    def to_view(self) -> Chunk:
        """The same chunk as a view of which others can be made, located or not."""
        if self.codec is None or self.of is not None:
            return self
        data = self.data._replace(offset=0)
        return self._replace(data=data, strides=None, replicas=(), of=self)

    def placed(self, box: Box, start: int, strides: tuple[int, ...], *, itemsize: int) -> Chunk:
        """A view of the same file as ``box``: from byte ``start`` on, with these strides."""
        last = sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
        data = ByteRange(self.data.path, start, (last + 1) * itemsize if box.numel else 0)
        packed = row_major_strides(box.sizes)
        steps = zip(strides, packed, box.sizes, strict=True)
        is_packed = not box.numel or all(a == b or size == 1 for a, b, size in steps)
        held = None if is_packed else strides
        return self._replace(box=box, data=data, strides=held, replicas=())

    def seen_in(self, located: Chunk, *, itemsize: int) -> Chunk:
        """This view of a chunk, now that the chunk is located."""
        view = located._replace(rank=self.rank)
        if not self.box.numel:
            return view.placed(self.box, located.data.offset, self.box.sizes, itemsize=itemsize)
        steps = row_major_strides(located.box.sizes)
        real = steps if located.strides is None else located.strides

        def place(packed: int) -> int:
            """Where the element is that is at this place when they are packed."""
            at = 0
            for step, stride in zip(steps, real, strict=True):
                count, packed = divmod(packed, step)
                at += count * stride
            return at

        start = located.data.offset + itemsize * place(self.data.offset // itemsize)
        strides = self.strides or row_major_strides(self.box.sizes)
        return view.placed(self.box, start, tuple(map(place, strides)), itemsize=itemsize)


@dataclass(eq=False)
class Grid:
    """The boxes of a tensor with the file and the rank of each, shared by all tensors with the same
    boxes; compared by identity, so that a fact about one need not be computed for the others.
    """

    boxes: tuple[Box, ...]
    paths: tuple[str, ...]
    ranks: tuple[int | None, ...]

    @cached_property
    def finder(self) -> BoxFinder:
        """What finds boxes in this grid."""
        return BoxFinder(self.boxes)

    def chunks(
        self, starts: Sequence[int], lengths: Sequence[int], codec: str | None
    ) -> Sequence[Chunk]:
        """Chunks with these boxes, each made when it is asked for; ``starts`` and ``lengths`` in
        bytes. Without a codec these are the elements, packed row-major.
        """
        return _GridChunks(self, starts, lengths, codec)


@dataclass(slots=True, eq=False, repr=False)
class _GridChunks(Sequence[Chunk]):
    """What `Grid.chunks` gives."""

    grid: Grid
    starts: Sequence[int]
    lengths: Sequence[int]
    codec: str | None

    def __len__(self) -> int:
        return len(self.grid.boxes)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: _Slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | _Slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        grid = self.grid
        data = ByteRange(grid.paths[index], self.starts[index], self.lengths[index])
        return Chunk(grid.boxes[index], data, codec=self.codec, rank=grid.ranks[index])

    def __iter__(self) -> Iterator[Chunk]:
        codec, grid = self.codec, self.grid
        ranges = zip(grid.paths, self.starts, self.lengths, strict=True)
        for box, rank, data in zip(grid.boxes, grid.ranks, ranges, strict=True):
            yield _make(Chunk, (box, _make(ByteRange, data), None, codec, (), rank, None))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One logical tensor: its name, type and global shape, and the chunks that hold it.

    ``path`` is where it sits in the tree of the state dict: a str is the text of a dict's key, an
    int a place in a list or tuple. ``fqn`` is the same joined by dots. ``layout`` is what the
    format states, None when it states none. ``compared`` says whether the replicas of its chunks
    are known to be equal, where the format keeps any; the reader leaves large ones to proofs.
    """

    fqn: str
    path: Path
    section: Section
    dtype: DType
    shape: tuple[int, ...]
    chunks: Sequence[Chunk]
    layout: Layout | None = None
    compared: bool = True

    @property
    def grid(self) -> Grid | None:
        """What the chunks have in common with those of other tensors, where that is known."""
        return self.chunks.grid if isinstance(self.chunks, _GridChunks) else None

    @property
    def boxes(self) -> Sequence[Box]:
        """The box of each chunk."""
        grid = self.grid
        return [chunk.box for chunk in self.chunks] if grid is None else grid.boxes

    def ends(self) -> Iterator[tuple[str, int]]:
        """The file of each range that holds a chunk, and the byte after its last."""
        chunks = self.chunks
        if isinstance(chunks, _GridChunks):
            return zip(chunks.grid.paths, map(add, chunks.starts, chunks.lengths), strict=True)
        ranges = (data for chunk in chunks for data in (chunk.data, *chunk.replicas))
        return ((data.path, data.offset + data.length) for data in ranges)

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, without replicas or padding."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """Something that is not a tensor: where its bytes are, and its value when it is plain.

    ``value`` holds numbers, text, bytes, bools and small containers of them, each of its own kind
    (an OrderedDict, a `Size`); ``opened`` says if it was read at all, since None is a value too.
    ``type_name`` names what is not opened, ``codec`` what the bytes are: None when they have no
    meaning of their own and ``value`` is all there is. A config that is not opened may have a
    ``value`` to be shown. ``flaw`` says why the entry cannot be used, without its name:
    `formats.locate` makes a problem of it.
    """

    fqn: str
    path: Path
    section: Section
    data: ByteRange
    value: PlainValue = None
    opened: bool = False
    type_name: str | None = None
    codec: str | None = None
    flaw: CheckpointError | None = None

    @property
    def nbytes(self) -> int | None:
        """Bytes that are its own; None for a value in a pickle or JSON file with others."""
        return None if self.codec is None else self.data.length

    @property
    def is_writable(self) -> bool:
        """Whether its value can be written into another pickle; else its bytes can be copied."""
        return self.opened and all(one.is_allowed for one in closed_in(self.value))


Entry: TypeAlias = TensorEntry | ObjectEntry
_Entry = TypeVar("_Entry", TensorEntry, ObjectEntry)


class PackedObject(NamedTuple):
    """An object of the format that was opened as a container: the names ``held`` came of ``item``.

    ``held`` is empty when they have other names now.
    """

    item: ObjectEntry
    held: frozenset[str]


class FileState(NamedTuple):
    """What tells a file from another one in its place, without a look into it.

    ``changed`` is the time of the last change in nanoseconds, ``version`` the inode on a disk, what
    else changes with the contents in a store. Both are 0 or empty where nothing tells them.
    """

    size: int
    changed: int = 0
    version: str = ""

    def __str__(self) -> str:
        """As text that people can compare."""
        words = f"{self.size:,} bytes"
        if self.changed:
            seconds, nanoseconds = divmod(self.changed, 10**9)
            date = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
            words += f" of {date}.{nanoseconds:09d} UTC"
        return f"{words}, {self.version}" if self.version else words


class FileEntry(NamedTuple):
    """A file that the checkpoint needs; ``length`` in bytes, None when it does not exist.

    ``state`` is that before its first byte was read, None if it was not looked up.
    """

    path: str
    length: int | None
    state: FileState | None = None


class Count(NamedTuple):
    """How many tensors and objects there are, and elements and bytes of the tensors, each once.

    ``dtypes`` are the elements of each type, the most frequent first. Every command counts with
    `count_of`, so that no two of them say different numbers.
    """

    tensors: int
    objects: int
    numel: int
    nbytes: int
    dtypes: Mapping[str, int]

    def __str__(self) -> str:
        """``49 tensors of 25.1 KB, 32 objects``."""
        tensors = f"{text.counted(self.tensors, 'tensor')} of {text.format_size(self.nbytes)}"
        return f"{tensors}, {text.counted(self.objects, 'object')}"


def count_of(entries: Collection[Entry]) -> Count:
    """How many of each kind these are."""
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    dtypes: Counter[str] = Counter()
    for entry in tensors:
        dtypes[entry.dtype.name] += entry.numel
    nbytes = sum(entry.nbytes for entry in tensors)
    known = dict(dtypes.most_common())
    return Count(len(tensors), len(entries) - len(tensors), sum(known.values()), nbytes, known)


_Index = TypeVar("_Index", bound="CheckpointIndex")
_fqn = attrgetter("fqn")
# Nothing is known of the containers: paths say it.
NO_TREE: Branch[str] = Branch("dict", (), ())


@dataclass(frozen=True)
class CheckpointIndex:
    """Everything that is known of a checkpoint without reading its values.

    ``tensors`` and ``objects`` are sorted by name. ``tree`` has the names of entries for leaves, in
    the order and in the containers of the state dict; entries that it lacks stand behind, at their
    paths, and names without an entry are not there: `nesting` is the tree of the entries.
    ``problems`` are what keeps it from being whole, ``ties`` groups of names that share a storage.
    ``packed`` are objects in whose place there are entries for what they hold.
    ``beside`` are small files that say what the others mean: an index JSON, a config.
    ``strings`` are what headers say beside tensors (safetensors' ``__metadata__``), by name, None
    where that is not the same in each file. They are of the types and shapes in ``strings_for``.
    ``allowed`` are classes that the user lets into other pickles, where objects are opened later.
    """

    root: str
    format: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[ObjectEntry, ...] = ()
    files: tuple[FileEntry, ...] = ()
    world_size: int | None = None
    mesh: Mesh | None = None
    torch_version: str | None = None
    framework: str | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[CheckpointError, ...] = ()
    tree: Branch[str] = NO_TREE
    packed: tuple[PackedObject, ...] = ()
    beside: tuple[FileEntry, ...] = ()
    strings: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    strings_for: Mapping[str, tuple[DType, tuple[int, ...]]] = field(
        default_factory=dict, hash=False
    )
    allowed: tuple[str, ...] = ()

    @cached_property
    def nesting(self) -> Branch[str]:
        """The tree of the state dict: each leaf is the name of an entry, each entry one leaf."""
        return completed(self.tree, [(one.fqn, one.path) for one in self.entries])

    def entry_tree(self) -> Branch[Entry]:
        """`nesting` with the entries for leaves."""
        entries: dict[str, Entry] = {entry.fqn: entry for entry in self.entries}
        return self.nesting.map(entries.__getitem__)

    def holding(self: _Index, entries: Iterable[Entry]) -> _Index:
        """The same checkpoint with these entries, sorted by name."""
        ordered = sorted(entries, key=_fqn)
        return replace(
            self,
            tensors=tuple(entry for entry in ordered if isinstance(entry, TensorEntry)),
            objects=tuple(entry for entry in ordered if isinstance(entry, ObjectEntry)),
        )

    def arranged(self: _Index, tree: Branch[Entry]) -> _Index:
        """The same checkpoint with the entries of a tree, each renamed after its place in it.

        An entry may be there more than once. Raises UnsupportedError for two places of one name.
        """
        placed = [
            entry if entry.path == path else replace(entry, fqn=".".join(map(str, path)), path=path)
            for path, entry in tree.walk()
        ]
        placed.sort(key=_fqn)
        for one, other in pairwise(placed):
            if one.fqn == other.fqn:
                raise UnsupportedError(
                    f"{self.root}: {list(one.path)} and {list(other.path)} would both be called "
                    f"{one.fqn}.",
                    hint="Leave one of them out with --exclude.",
                )
        return replace(
            self.holding(placed),
            tree=tree.map_places(lambda path, _: ".".join(map(str, path))),
            packed=tuple(one._replace(held=frozenset()) for one in self.packed),
        )

    def closed(self: _Index) -> _Index:
        """The same checkpoint; packed objects whose entries are all there are one object again."""
        there = {entry.fqn for entry in self.entries}
        whole = [one for one in self.packed if one.held and one.held <= there]
        if not whole:
            return self
        items = [one.item for one in whole]
        gone = frozenset().union(*(one.held for one in whole))
        return replace(
            self.holding([*(entry for entry in self.entries if entry.fqn not in gone), *items]),
            tree=self.nesting.with_leaves({item.path: item.fqn for item in items}),
            packed=tuple(one for one in self.packed if one not in whole),
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """Paths of the files that are needed and not there."""
        return tuple(file.path for file in self.files if file.length is None)

    @property
    def entries(self) -> list[Entry]:
        """Every tensor, then every object."""
        return [*self.tensors, *self.objects]

    @property
    def unread(self) -> list[ObjectEntry]:
        """What torch or its library reads as tensors, and this program does not."""
        return [entry for entry in self.objects if isinstance(entry.flaw, NotReadError)]

    @property
    def count(self) -> Count:
        """How many tensors and objects there are."""
        return count_of(self.entries)

    @property
    def file_bytes(self) -> int:
        """The length of all files that are there, together."""
        return sum(file.length or 0 for file in self.files)

    @cached_property
    def damaged(self) -> frozenset[str]:
        """Names that a problem is about."""
        return frozenset[str]().union(*(problem.about for problem in self.problems))

    @property
    def lost(self) -> tuple[str, ...]:
        """The damaged names that have no entry, sorted: lost with a file."""
        named = self.damaged
        return tuple(sorted(named.difference(entry.fqn for entry in self.entries))) if named else ()

    def tensor(self, fqn: str) -> TensorEntry | None:
        """The tensor of this name, or None."""
        return _found(self.tensors, fqn)

    def object(self, fqn: str) -> ObjectEntry | None:
        """The object of this name, or None."""
        return _found(self.objects, fqn)

    def select(self: _Index, fqns: Collection[str]) -> _Index:
        """The same checkpoint with only these tensors and objects, and the problems they have.

        A problem that names nothing belongs to every choice. A name that was lost with its file may
        be among ``fqns``, too: it has no entry, and its problem comes along.
        """
        problems = [p for p in self.problems if not p.about or not p.about.isdisjoint(fqns)]
        chosen = self.holding(entry for entry in self.entries if entry.fqn in fqns)
        return replace(chosen, problems=tuple(problems))

    def require_whole(self) -> None:
        """Raise what keeps the checkpoint from being whole; do nothing when it is."""
        if not self.problems:
            return
        first = self.problems[0]
        if len(self.problems) == 1:
            raise first
        message, *more = text.first_of([problem.message for problem in self.problems])
        raise first.reworded(message, *(f"  {line}" for line in more)).concerning(())


# An index whose chunks are all raw elements, but for those of tensors that its problems name. Only
# `formats.locate` makes one: plans and proofs take no other, and what comes of one stays one.
LocatedIndex = NewType("LocatedIndex", CheckpointIndex)


def _found(entries: Sequence[_Entry], fqn: str) -> _Entry | None:
    """The entry of this name among those sorted by name, or None."""
    place = bisect_left(entries, fqn, key=_fqn)
    return entries[place] if place < len(entries) and entries[place].fqn == fqn else None
