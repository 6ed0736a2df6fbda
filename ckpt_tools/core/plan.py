"""A conversion as the join of two lists: chunks that are there, boxes that are wanted. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.geometry import Box, BoxFinder
from ckpt_tools.core.index import Chunk, ObjectEntry, Path, TensorEntry
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.state_tree import Branch, completed
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import IncompleteError, UnsupportedError, UsageError


class ReadItem(NamedTuple):
    """Take ``box`` (global coordinates of the tensor) out of ``chunk``, which contains it."""

    chunk: Chunk
    box: Box


class KnownReads:
    """Reads that were found already, of all boxes that will be asked for."""

    __slots__ = ("_boxes", "_found")

    def __init__(self, found: Sequence[ReadItem]) -> None:
        self._found = found
        self._boxes: BoxFinder | None = None

    def reads(self, box: Box) -> Sequence[ReadItem]:
        """Those that may reach into the box."""
        if len(self._found) <= 1:
            return self._found
        if self._boxes is None:
            self._boxes = BoxFinder(read.box for read in self._found)
        return [self._found[at] for at in self._boxes.near(box)]


class Mean(NamedTuple):
    """What several checkpoints hold of one tensor, as one: sums in float64, in this order.

    Weights 1, 2, 1 of (x, y, z): (1·x + 2·y + 1·z) / ``divisor`` 4. A moving average of decay 0.9:
    ``keep`` 0.9 of what there is and 0.1 of the next, 0.9·(0.9·x + 0.1·y) + 0.1·z, divided by 1.
    """

    terms: tuple[tuple[float, Finder], ...]
    keep: float
    divisor: float


class WriteItem(NamedTuple):
    """One box to write, packed row-major, at byte ``offset`` of file ``path``.

    ``finder`` knows what fills it, ``mean`` what is averaged where it is not only that. Elements
    are ``source`` in the chunks and ``target`` in the file. When all of the box is written, its
    CRC-32 goes as four little-endian bytes to each offset in ``crc_at``.
    """

    fqn: str
    path: str
    offset: int
    box: Box
    source: DType
    target: DType
    finder: Finder | KnownReads
    crc_at: tuple[int, ...] = ()
    mean: Mean | None = None

    @property
    def reads(self) -> Sequence[ReadItem]:
        """What tiles the box; computed at each access. Raises IncompleteError."""
        return self.finder.reads(self.box)


class FilePlan(NamedTuple):
    """One file to write: its length in bytes, the bytes known already, and the boxes to fill in."""

    path: str
    length: int
    literals: tuple[tuple[int, bytes], ...]
    items: tuple[WriteItem, ...]


class FileReads(NamedTuple):
    """What fills a file: a number of boxes, from so many bytes of the files at ``paths``."""

    boxes: int
    nbytes: int
    paths: set[str]


class PlannedFile(NamedTuple):
    """One file to write whose plan is made when it is its turn.

    ``digest`` differs whenever ``make()`` gives another plan. ``read()`` tells what the plan reads
    without making it, where there is a shorter way.
    """

    path: str
    length: int
    digest: bytes
    make: Callable[[], FilePlan]
    read: Callable[[], FileReads] | None = None

    def reads(self) -> FileReads:
        """What fills the file."""
        if self.read is not None:
            return self.read()
        items = self.make().items
        reads = [(read, item.source.itemsize) for item in items for read in item.reads]
        nbytes = sum(read.box.numel * itemsize for read, itemsize in reads)
        return FileReads(len(items), nbytes, {read.chunk.data.path for read, _ in reads})


class LazyPlans:
    """The plans of many files, each made whenever it is asked for, and not kept.

    4,096 rank files of a large model take gigabytes as plans, and some hundred bytes each as
    `PlannedFile`; and each of several processes makes only those of the files that it writes.
    """

    __slots__ = ("files",)

    def __init__(self, files: Iterable[PlannedFile] = ()) -> None:
        self.files = tuple(files)

    @classmethod
    def of(cls, plans: Iterable[FilePlan]) -> LazyPlans:
        """Plans that are made already, and kept: of few files."""
        from hashlib import blake2b  # late, here and below: it loads OpenSSL

        files = []
        for plan in plans:
            digest = blake2b(repr((plan.length, [item.offset for item in plan.items])).encode())
            for offset, data in plan.literals:
                digest.update(b"%d %d " % (offset, len(data)))
                digest.update(data)
            files.append(
                PlannedFile(plan.path, plan.length, digest.digest(), partial(FilePlan._make, plan))
            )
        return cls(files)

    def __len__(self) -> int:
        """Number of files."""
        return len(self.files)

    def __iter__(self) -> Iterator[FilePlan]:
        """The plan of each file."""
        return (file.make() for file in self.files)

    def __add__(self, others: LazyPlans) -> LazyPlans:
        """The files of both."""
        return LazyPlans((*self.files, *others.files))

    @property
    def length(self) -> int:
        """Bytes of all files together."""
        return sum(file.length for file in self.files)

    @property
    def digest(self) -> str:
        """A short text that differs when files, lengths, places of items or known bytes do."""
        from hashlib import blake2b

        known = [(file.path, file.length, file.digest) for file in self.files]
        return blake2b(repr(known).encode(), digest_size=16).hexdigest()

    def without(self, paths: Collection[str]) -> LazyPlans:
        """The same files but those at ``paths``."""
        return LazyPlans(file for file in self.files if file.path not in paths)

    def inside(self, folder: str) -> LazyPlans:
        """The same files in a folder of the output; an empty name is the output itself."""
        if not folder:
            return self
        return LazyPlans(
            file._replace(path=f"{folder}/{file.path}", make=partial(_made_in, folder, file.make))
            for file in self.files
        )


def _made_in(folder: str, make: Callable[[], FilePlan]) -> FilePlan:
    plan = make()
    path = f"{folder}/{plan.path}"
    return plan._replace(path=path, items=tuple(item._replace(path=path) for item in plan.items))


class Target(NamedTuple):
    """One tensor to write: its name and place in the output, its source, its type, its layout.

    ``boxes`` are what each rank writes of it where no layout says so.
    """

    fqn: str
    path: Path
    entry: TensorEntry
    dtype: DType
    layout: Layout | None = None
    boxes: tuple[tuple[int, Box], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in the output."""
        return self.entry.numel * self.dtype.itemsize


def refuse_types_not_in_torch(targets: Iterable[Target]) -> None:
    """Raise UnsupportedError for tensors whose type torch lacks: its formats name types by it."""
    wrong = [target.fqn for target in targets if not target.dtype.is_in_torch]
    if wrong:
        raise UnsupportedError(
            f"torch has no 6-bit floats, which {counted(len(wrong), 'tensor')} would be written "
            f"in: {some(wrong)}.",
            hint="Only safetensors holds them; --exclude leaves them out.",
            about=wrong,
        )


def require_mesh_size(targets: Iterable[Target], world_size: int) -> None:
    """Raise UsageError for a tensor on a mesh of another number of ranks."""
    for target in targets:
        mesh = target.layout.mesh if target.layout is not None else None
        if mesh is not None and mesh.size != world_size:
            raise UsageError(
                f"{target.fqn}: a mesh of {mesh.size} ranks ({mesh}) in a checkpoint for "
                f"{world_size}."
            )


class Finder:
    """Finds the chunks of one tensor that hold a box; equal boxes count once, the first one."""

    __slots__ = ("_boxes", "entry")

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        self._boxes = BoxFinder(entry.boxes) if entry.grid is None else entry.grid.finder

    def require_whole(self) -> Finder:
        """The same finder. Raises IncompleteError when the chunks are fewer elements than the
        tensor has.
        """
        self._require(self._boxes.numel, Box.whole(self.entry.shape))
        return self

    def reads(self, box: Box) -> tuple[ReadItem, ...]:
        """What to read from which chunk so that the box is filled; nothing for an empty box.

        Raises IncompleteError when the chunks do not cover it.
        """
        if 0 in box.sizes:
            return ()
        chunks, boxes = self.entry.chunks, self._boxes
        parts = boxes.all() if box.sizes == self.entry.shape else boxes.parts(box)
        reads = tuple(ReadItem(chunks[at], part) for at, part in parts)
        self._require(sum(read.box.numel for read in reads), box)
        return reads

    @property
    def source(self) -> Hashable:
        """The same for all tensors whose boxes, where they are equal, are in the same files."""
        if len(self.entry.chunks) == 1:
            return self.entry.chunks[0].data.path
        return self if self.entry.grid is None else self.entry.grid

    def paths(self, box: Box) -> set[str]:
        """The files that a box with elements is read from."""
        if len(self.entry.chunks) == 1:
            return {self.entry.chunks[0].data.path}
        return {read.chunk.data.path for read in self.reads(box)}

    def _require(self, covered: int, box: Box) -> None:
        if covered != box.numel:
            raise IncompleteError(
                f"{self.entry.fqn}: chunks hold {covered:,} of the {box.numel:,} elements "
                f"of {box}.",
                hint="`ckpt-tools verify --quick` names what is missing.",
            )


def reads_of(filled: Iterable[tuple[Finder, Box, int]]) -> FileReads:
    """What fills so many boxes like each of these, by what finds its chunks; empty ones need
    nothing.
    """
    boxes, nbytes, paths = 0, 0, set[str]()
    for finder, box, count in filled:
        if box.numel:
            boxes += count
            nbytes += count * box.numel * finder.entry.dtype.itemsize
            paths |= finder.paths(box)
    return FileReads(boxes, nbytes, paths)


def placed_tree(
    targets: Sequence[Target], objects: Sequence[ObjectEntry], tree: Branch[str]
) -> Branch[Target | ObjectEntry]:
    """What is to be written, in the containers that ``tree`` has for the names; see `completed`."""
    placed: list[Target | ObjectEntry] = [*targets, *objects]
    by_fqn = {one.fqn: one for one in placed}
    return completed(tree, [(one.fqn, one.path) for one in placed]).map(by_fqn.__getitem__)


def object_entry_as_tensor(entry: ObjectEntry) -> TensorEntry:
    """The bytes of an object as a one-dimensional uint8 tensor, to be copied like any other."""
    length = entry.data.length
    chunk = Chunk(Box((0,), (length,)), entry.data)
    return TensorEntry(entry.fqn, entry.path, entry.section, BY_NAME["uint8"], (length,), (chunk,))
