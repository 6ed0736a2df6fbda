"""What the ``.metadata`` pickle of a DCP directory says, as slim plain values.

It knows the classes of torch.distributed.checkpoint from torch 2.1 on, and nothing of the files
that they speak of. A file can list a million chunks, so each costs a few small objects and no dict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.containers import as_name
from ckpt_tools.formats.stand_ins import (
    Function,
    StandIn,
    StateRecord,
    TorchDType,
    as_counts,
    opaque_class,
    shown,
)
from ckpt_tools.formats.vocabulary import DTYPES

Offsets = tuple[int, ...]
Row = tuple[Offsets, Offsets]
StorageKey = tuple[str, Offsets | None]

# Ways to cut one shape that are looked through for one that is known.
_MAX_ALIKE = 16


class _Chunk(StandIn):
    """One stored box of a tensor."""

    __slots__ = ("offsets", "sizes")

    offsets: Offsets
    sizes: Offsets

    def __setstate__(self, state: object) -> None:
        """Take the box. The dict is emptied: the unpickler keeps a million of them to its end."""
        if type(state) is dict:
            self.offsets, self.sizes = state["offsets"], state["sizes"]
            state.clear()


class StorageInfo(StandIn):
    """Where an item lies: ``length`` bytes at ``offset`` of the file ``relative_path``.

    ``transforms`` name what was done to the bytes, such as ``stream.zstd/1``; empty for nothing.
    """

    __slots__ = ("length", "offset", "relative_path", "transforms")

    relative_path: str
    offset: int
    length: int
    transforms: tuple[str, ...]

    def __setstate__(self, state: object) -> None:
        """Take the place, and check it here, where no second pass over a million is needed."""
        if type(state) is not dict:
            raise TypeError("a storage info without a state")
        path, offset, length = state["relative_path"], state["offset"], state["length"]
        if type(path) is not str or type(offset) is not int or type(length) is not int:
            raise TypeError("a storage info without path, offset or length")
        if offset < 0 or length < 0:
            raise ValueError("a storage info with a negative offset or length")
        self.relative_path = path
        self.offset = offset
        self.length = length
        transforms = state.get("transform_descriptors") if len(state) > 3 else None
        self.transforms = _transforms(transforms) if transforms else ()
        state.clear()


class _Index(StandIn):
    """The key of an item, compared by identity while the pickle is read: that costs nothing."""

    __slots__ = ("fqn", "offset")

    fqn: str
    offset: Offsets | None

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict:
            raise TypeError("a metadata index without a state")
        fqn, offset = state["fqn"], state.get("offset")
        if type(fqn) is not str or (offset is not None and type(offset) is not tuple):
            raise TypeError("a metadata index without a name")
        self.fqn = fqn
        self.offset = offset
        state.clear()


class _TensorProperties(StandIn):
    """A tuple (dtype, layout, requires grad, memory format, pinned, …), of which two matter."""

    __slots__ = ("dtype", "layout")

    dtype: object
    layout: object

    def __setstate__(self, state: object) -> None:
        if type(state) is dict:
            self.dtype, self.layout = state["dtype"], state.get("layout")
        elif type(state) is tuple and len(state) >= 2:
            self.dtype, self.layout = state[:2]
        else:
            raise TypeError("tensor properties without an element type")


class _TensorStorage(StateRecord):
    __slots__ = ()


class _BytesStorage(StateRecord):
    __slots__ = ()


class _StorageMeta(StateRecord):
    __slots__ = ()


class _Metadata(StateRecord):
    __slots__ = ()


class TensorMeta(NamedTuple):
    """One tensor: element type, global shape, and its chunks in the order of the ranks.

    A chunk is its offsets and its sizes, in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: Sequence[Row]


class Storage(Mapping[StorageKey, StorageInfo]):
    """Where every item lies, kept by name: two columns each, no key for each of a million."""

    __slots__ = ("_by_name",)

    def __init__(self, items: Iterable[tuple[str, Offsets | None, StorageInfo]]) -> None:
        self._by_name: dict[str, tuple[list[Offsets | None], list[StorageInfo]]] = {}
        by_name = self._by_name
        for fqn, offset, info in items:
            columns = by_name.get(fqn)
            if columns is None:
                columns = by_name[fqn] = [], []
            columns[0].append(offset)
            columns[1].append(info)

    @property
    def infos(self) -> Iterator[StorageInfo]:
        """The place of every item."""
        return chain.from_iterable(infos for _, infos in self._by_name.values())

    @property
    def offsets(self) -> Iterator[list[Offsets | None]]:
        """The offsets of all items of each name."""
        return (offsets for offsets, _ in self._by_name.values())

    def places(self, fqn: str, offsets: Sequence[Offsets]) -> list[StorageInfo | None]:
        """The place of each of these items, None for one that has none."""
        known, infos = self._by_name.get(fqn, ([], []))
        if known == offsets:
            return [*infos]
        return list(map(dict(zip(known, infos, strict=True)).get, offsets))

    def __getitem__(self, key: StorageKey) -> StorageInfo:
        """The place of one item."""
        offsets, infos = self._by_name[key[0]]
        if key[1] not in offsets:
            raise KeyError(key)
        return infos[offsets.index(key[1])]

    def __iter__(self) -> Iterator[StorageKey]:
        """Name and offsets of every item, name by name."""
        return ((fqn, at) for fqn, (offsets, _) in self._by_name.items() for at in offsets)

    def __len__(self) -> int:
        """Number of items."""
        return sum(map(len, self.offsets))


class Metadata(NamedTuple):
    """All that a ``.metadata`` file says.

    ``objects`` are the names of what is no tensor. ``storage`` places every item by its name and
    offsets; those of an object are None. ``planner_data`` is the place of each name in the nested
    state dict, None when it was not flattened. ``checkpoint_id`` is where it was saved to.
    """

    tensors: dict[str, TensorMeta]
    objects: frozenset[str]
    storage: Storage
    planner_data: dict[str, tuple[str | int, ...]] | None
    version: str | None
    checkpoint_id: str | None


def _transforms(value: object) -> tuple[str, ...]:
    if not isinstance(value, tuple | list) or not 0 < len(value) <= 16:
        raise TypeError("transform descriptors that are no short list")
    return tuple(str(item) if type(item) is str else shown(item) for item in value)


def _path(parts: tuple[object, ...]) -> str:
    """A pathlib path as plain text."""
    return "/".join(part for part in parts[:1000] if type(part) is str)


def _first(args: tuple[object, ...]) -> object:
    return args[0] if args else None


def _dict(_args: tuple[object, ...]) -> dict[object, object]:
    return {}


# Gives its argument back when that is a tuple and raises TypeError when not, without a Python call:
# a file can have two million sizes. `tuple` itself would turn a long string into a longer tuple.
_SIZE = ().__add__

_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath")

METADATA_GLOBALS: dict[str, object] = {
    **DTYPES,
    **{f"{m}.{name}": Function(_path) for m in ("pathlib", "pathlib._local") for name in _PATHS},
    f"{_CHECKPOINT}.Metadata": _Metadata,
    f"{_CHECKPOINT}.TensorStorageMetadata": _TensorStorage,
    f"{_CHECKPOINT}.BytesStorageMetadata": _BytesStorage,
    f"{_CHECKPOINT}.TensorProperties": _TensorProperties,
    f"{_CHECKPOINT}.ChunkStorageMetadata": _Chunk,
    f"{_CHECKPOINT}.MetadataIndex": _Index,
    f"{_CHECKPOINT}.StorageMeta": _StorageMeta,
    f"{_CHECKPOINT}._MEM_FORMAT_ENCODING": Function(_first),
    f"{_CHECKPOINT}.MEM_FORMAT_ENCODING": Function(_first),
    # torch 2.2 and before took these two from its sharded tensors, whatever was saved.
    f"{_SHARDED}.TensorProperties": _TensorProperties,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": Function(_first),
    "torch.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
    "torch.serialization._get_layout": Function(_first),
    "torch.Size": _SIZE,
    "torch.strided": "torch.strided",
    "torch.contiguous_format": opaque_class("torch.contiguous_format"),
    "torch.preserve_format": opaque_class("torch.preserve_format"),
    "torch.channels_last": opaque_class("torch.channels_last"),
    "collections.OrderedDict": Function(_dict),
}


def metadata_of(value: object) -> Metadata:
    """The metadata from what its pickle gave.

    Raises UnreadableError when a part is missing or is not what it should be.
    """
    if not isinstance(value, _Metadata):
        raise UnreadableError(f"holds no DCP metadata, but {shown(value)}.")
    state = value.state
    entries = state.get("state_dict_metadata")
    if type(entries) is not dict:
        raise UnreadableError("lists no tensors: it has no state_dict_metadata.")
    tensors: dict[str, TensorMeta] = {}
    objects: list[str] = []
    cuts = _Cuts()
    for fqn, entry in entries.items():
        name = as_name(fqn)
        if isinstance(entry, _TensorStorage):
            tensors[name] = _tensor(name, entry.state, cuts)
        elif isinstance(entry, _BytesStorage):
            objects.append(name)
        else:
            raise UnreadableError(f"describes {name} as {shown(entry)}.")
    return Metadata(
        tensors,
        objects=frozenset(objects),
        storage=_storage(state.get("storage_data")),
        planner_data=_planner_data(state.get("planner_data")),
        version=_text(state.get("version")),
        checkpoint_id=_checkpoint_id(state.get("storage_meta")),
    )


def _tensor(fqn: str, state: dict[object, object], cuts: _Cuts) -> TensorMeta:
    properties, chunks = state.get("properties"), state.get("chunks")
    if not isinstance(properties, _TensorProperties) or type(chunks) is not list:
        raise UnreadableError(f"describes {fqn} without its properties or chunks.")
    if not isinstance(properties.dtype, TorchDType):
        raise UnreadableError(f"gives {fqn} the element type {shown(properties.dtype)}.")
    if properties.layout not in {"torch.strided", None}:
        raise UnsupportedError(f"{fqn} is stored with layout {shown(properties.layout)}.")
    shape = as_counts(state.get("size"), f"the shape of {fqn}")
    if not set(map(type, chunks)) <= {_Chunk}:
        raise UnreadableError(f"describes {fqn} with chunks that are none.")
    rows = cuts.rows(shape, chunks)
    if rows is None:
        raise UnreadableError(f"describes {fqn} with a chunk that is no box in {len(shape)}-D.")
    return TensorMeta(properties.dtype.name, shape, rows)


class _Cuts:
    """The chunks of tensors: those of tensors that are cut alike become one list."""

    def __init__(self) -> None:
        self._known: dict[Offsets, list[tuple[list[Offsets], list[Offsets], list[Row]]]] = {}

    def rows(self, shape: Offsets, chunks: list[_Chunk]) -> list[Row] | None:
        """The offsets and sizes of these chunks; None when they are no boxes of this shape."""
        offsets = list(map(_offsets, chunks))
        sizes = list(map(_sizes, chunks))
        alike = self._known.setdefault(shape, [])
        for known_offsets, known_sizes, rows in alike:
            if known_offsets == offsets and known_sizes == sizes:
                return rows
        if not _are_counts(offsets, len(shape)) or not _are_counts(sizes, len(shape)):
            return None
        rows = list(zip(offsets, sizes, strict=True))
        if len(alike) < _MAX_ALIKE:
            alike.append((offsets, sizes, rows))
        return rows


_offsets = attrgetter("offsets")
_sizes = attrgetter("sizes")


def _are_counts(rows: Sequence[Offsets], ndim: int) -> bool:
    """Whether all are tuples of ``ndim`` counts, in passes that run without Python code."""
    good = set(map(type, rows)) <= {tuple} and set(map(len, rows)) <= {ndim}
    good = good and set(map(type, chain.from_iterable(rows))) <= {int}
    return good and min(chain.from_iterable(rows), default=0) >= 0


def _storage(value: object) -> Storage:
    if type(value) is not dict:
        raise UnreadableError("does not say where its items lie: it has no storage_data.")
    if not set(map(type, value)) <= {_Index} or not set(map(type, value.values())) <= {StorageInfo}:
        raise UnreadableError("places items in a way that is not torch's.")
    storage = Storage((index.fqn, index.offset, info) for index, info in value.items())
    last: list[Offsets | None] = []
    for offsets in storage.offsets:
        if offsets != last:
            _check_offsets(offsets)
            last = offsets
    return storage


def _check_offsets(offsets: Sequence[Offsets | None]) -> None:
    """Check the offsets of the items of one name: counts, and none twice."""
    if not set(map(type, chain.from_iterable(at for at in offsets if at))) <= {int}:
        raise UnreadableError("places items in a way that is not torch's.")
    if len(set(offsets)) < len(offsets):
        raise UnreadableError("places one item twice.")


def _planner_data(value: object) -> dict[str, tuple[str | int, ...]] | None:
    if type(value) is not dict:
        return None
    return {as_name(fqn): _flat_path(path) for fqn, path in value.items()}


def _flat_path(value: object) -> tuple[str | int, ...]:
    if type(value) is not tuple or len(value) > 1000:
        raise UnreadableError(f"has {shown(value)} where a path should be.")
    return tuple(part if type(part) is int else as_name(part) for part in value)


def _checkpoint_id(value: object) -> str | None:
    return _text(value.state.get("checkpoint_id")) if isinstance(value, _StorageMeta) else None


def _text(value: object) -> str | None:
    return as_name(value) if type(value) is str and value else None
