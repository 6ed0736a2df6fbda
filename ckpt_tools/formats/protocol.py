"""The format protocol: all that other rooms know of a format is one `Format` object of its package.

Only a `Reader` must be written. The defaults of all else: chunks are raw bytes
already, objects have no bytes of their own, nothing has a checksum, and nothing is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeVar

from ckpt_tools.core.index import NO_TREE, ByteRange, CheckpointIndex, ObjectEntry
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.options import repeated
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.storage.reader import Files, Window

Index = TypeVar("Index", bound=CheckpointIndex)
Writes = Literal["whole", "shards"]

PART_BYTES = 64 << 20
_ALONE = Mesh((1,))


class Cut(NamedTuple):
    """How tensor-parallel parts have the tensors whose names match the regular expression ``name``.

    They are cut along one of ``dims``; none: each part has the whole. ``length`` names a tensor,
    whole in each part, that is as long as the whole along the cut; of two ``dims``, as the whole's
    last dimension, which tells the two apart.
    """

    name: str
    dims: tuple[int, ...] = ()
    length: str | None = None


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """``allow_globals`` names pickled globals to read as opaque values, which are never run.

    ``cuts`` say how tensor-parallel parts are to be joined, the first that matches a name.
    """

    allow_globals: tuple[str, ...] = repeated(
        "--allow-global",
        "Accept this class name in pickles; it is never imported or run.",
        metavar="NAME",
        heading="Other",
        parse=str,
    )
    cuts: tuple[Cut, ...] = ()


class Checksummed(NamedTuple):
    """Bytes to read, and the CRC-32 that the checkpoint keeps of them, None where it keeps none.

    ``name`` is what the format calls them. ``stored`` is where the checkpoint has them, when
    ``data`` is a copy in a temporary file. ``record`` is all that ``crc`` is of, when ``data`` is
    only a part of it. ``alike`` are the lengths of what stands around it, has CRCs of its own, and
    equals what was checked before.
    """

    data: ByteRange
    crc: int | None = None
    name: str = ""
    stored: ByteRange | None = None
    record: ByteRange | None = None
    alike: tuple[int, ...] = ()


class ChecksumPart(NamedTuple):
    """A part of a checkpoint that one thread checks, of about ``nbytes``.

    ``open`` finds the bytes and their CRCs, and may read for it through the window that the bytes
    are then taken from; if it raises, ``data`` is damaged.
    """

    data: ByteRange
    nbytes: int
    open: Callable[[Window], Iterable[Checksummed]]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a writer gets beside tensors and objects; each format uses what it needs.

    ``tree`` has the containers of the names. ``single_file`` names the one file that is all of the
    output; else ``basename`` begins the names of files of at most ``max_shard_size`` bytes of
    tensors. ``metadata`` says where the tensors come from. ``mesh`` is that of the job for which
    shards are written, ``device_type`` what it is made of, ``torch_version`` the torch that it
    runs, None for the newest that is known; ``rank_name`` is the name of the file of each rank with
    ``{rank}`` in it, None for the format's own names.
    """

    tree: Branch[str] = NO_TREE
    single_file: str | None = None
    basename: str = "model"
    max_shard_size: int = 5_000_000_000
    metadata: Mapping[str, str] = field(default_factory=dict)
    mesh: Mesh = _ALONE
    device_type: str = "cuda"
    torch_version: str | None = None
    rank_name: str | None = None


class Reader(Protocol):
    """What reads a format: a module of its package."""

    def matches(self, path: str) -> bool: ...

    def read_index(self, path: str, *, options: ReadOptions = ...) -> CheckpointIndex: ...


class Format(ABC):
    """A format of checkpoints. Its package has one, and imports its other modules when asked.

    ``name`` is what commands and `CheckpointIndex.format` call it, ``label`` what people read.
    ``files`` are globs of the names that its files have: what --force may replace in a folder.
    ``writes`` says what it is a target of: of `export` ("whole" tensors), of `reshard` ("shards"),
    or None; an output with one of ``suffixes`` is one file. ``nested`` says that it keeps a state
    dict's containers and objects as they are; ``object_codec`` is that of objects whose bytes its
    writer copies unopened, ``codecs`` are those of chunks and objects that only it can locate.
    ``strings`` says that its headers have room for text; ``guarded`` that it has checksums or
    replicas, which a comparison of tensors does not read.
    ``index_files`` are suffixes of files without which the others cannot be read: they are sent to
    a store last. ``counts_ranks``: every rank writes a file, also one with nothing to save, so that
    `CheckpointIndex.world_size` is the number of ranks that saved.
    """

    name: ClassVar[str]
    label: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[Writes | None] = None
    nested: ClassVar[bool] = False
    object_codec: ClassVar[str | None] = None
    codecs: ClassVar[frozenset[str]] = frozenset()
    strings: ClassVar[bool] = False
    guarded: ClassVar[bool] = True
    index_files: ClassVar[tuple[str, ...]] = ()
    counts_ranks: ClassVar[bool] = False

    @abstractmethod
    def reader(self) -> Reader:
        """What reads it, imported when it is asked."""

    def matches(self, path: str) -> bool:
        """Whether this file or directory is of the format; never raises."""
        return self.reader().matches(path)

    def read_index(self, path: str, *, options: ReadOptions = ReadOptions()) -> CheckpointIndex:
        """The index of a checkpoint, from headers alone. Raises CheckpointError."""
        return self.reader().read_index(path, options=options)

    def locate(self, index: CheckpointIndex, files: Files) -> CheckpointIndex:
        """The same index with every chunk as raw little-endian elements.

        What cannot be used becomes a problem of the index, named with the tensor.
        """
        return index

    def open_objects(self, index: Index, files: Files, *, largest: int | None = None) -> Index:
        """The same index with the values of its plain objects of up to ``largest`` bytes.

        Raises UnsafePickleError.
        """
        return index

    def copyable_objects(self, index: Index, files: Files) -> Index:
        """The same index with unopened objects as bytes that a writer can copy."""
        return index

    def object_digests(self, entry: ObjectEntry, files: Files) -> Mapping[str, bytes] | None:
        """SHA-256 of the bytes that make up an unopened object, by part; None when unknown.

        Equal bytes are equal values. Any object may come, also one of another format.
        """
        return None

    def rank_of(self, path: str) -> int | None:
        """The rank that wrote a file, as its name says."""
        return None

    def checksummed(self, index: CheckpointIndex, files: Files) -> Iterable[ChecksumPart]:
        """All byte ranges of a checkpoint that `verify` reads, with their checksums.

        ``index`` is as its reader gave it. Files that are not there are left out.
        """
        for path, length in lengths_of(index).items():
            yield from plain_parts(path, length)

    def containers(
        self, tree: Branch[str], *, is_tensor: Callable[[str], bool]
    ) -> Branch[str] | None:
        """The containers of a state dict as they are read back; None when none are kept."""
        return tree if self.nested else None

    def loader(self, index: CheckpointIndex, *, asked: str | None) -> tuple[str, str] | None:
        """The version of the torch that is to load what is written of this source, and a note on
        why it is this one; None when every torch can.

        Raises UsageError when one is ``asked`` for that it cannot be written for.
        """
        if asked is not None:
            raise UsageError(
                f"--torch-version is for rank files; every torch loads the format {self.name}."
            )
        return None

    def plan_files(
        self, targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
    ) -> LazyPlans:
        """The files that hold these tensors and objects, with paths relative to the output.

        Pure: it opens nothing. Raises UnsupportedError and UsageError for what it cannot hold.
        """
        raise UnsupportedError(f"{self.label}: this format is read, and never written.")


def lengths_of(index: CheckpointIndex) -> dict[str, int]:
    """The length in bytes of each file of a checkpoint that is there."""
    return {file.path: file.length for file in index.files if file.length is not None}


def is_there(data: ByteRange, lengths: Mapping[str, int]) -> bool:
    """Whether all of a byte range is in a file that is there, by `lengths_of`."""
    return data.offset + data.length <= lengths.get(data.path, -1)


def plain_parts(path: str, length: int) -> Iterator[ChecksumPart]:
    """A file without checksums, in parts of 64 MiB."""
    for data in cut(ByteRange(path, 0, length), PART_BYTES):
        yield ChecksumPart(data, data.length, partial(ready, Checksummed(data)))


def ready(one: Checksummed, _window: Window) -> Iterable[Checksummed]:
    """What a part opens to when it is known before."""
    return (one,)


def cut(data: ByteRange, most: int) -> Iterator[ByteRange]:
    """A byte range in ranges of at most ``most`` bytes."""
    for start in range(0, data.length, most):
        length = min(most, data.length - start)
        yield ByteRange(data.path, data.offset + start, length)
