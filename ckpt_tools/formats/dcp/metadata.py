"""What the ``.metadata`` pickle of a DCP directory says, as slim plain values.

It knows the classes of torch.distributed.checkpoint from torch 2.1 on, and nothing of the files
that they speak of. A file can list a million chunks, so each costs a few small objects and no dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.dcp.storage import (
    Offsets,
    Storage,
    StorageInfo,
    StorageLists,
)
from ckpt_tools.formats.pickle.allowed_globals import DTYPES
from ckpt_tools.formats.pickle.containers import as_name
from ckpt_tools.formats.pickle.torch_stubs import (
    Function,
    StandIn,
    StateRecord,
    TorchDType,
    as_counts,
    opaque_class,
    shown,
)

Row = tuple[Offsets, Offsets]

# Ways to cut one shape that are looked through for one that is known.
_MAX_ALIKE = 16


class ChunkRecord(StandIn):
    """One stored box of a tensor."""

    __slots__ = ("offsets", "sizes")

    offsets: Offsets
    sizes: Offsets

    def __setstate__(self, state: object) -> None:
        """Take the box. The dict is emptied: the unpickler keeps a million of them to its end."""
        if type(state) is dict:
            self.offsets, self.sizes = state["offsets"], state["sizes"]
            state.clear()


class IndexRecord(StandIn):
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


class TensorRecord(StateRecord):
    """A TensorStorageMetadata."""

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


def _path(parts: tuple[object, ...]) -> str:
    """A pathlib path as plain text."""
    return "/".join(part for part in parts[:1000] if type(part) is str)


def _first(args: tuple[object, ...]) -> object:
    return args[0] if args else None


def _dict(_args: tuple[object, ...]) -> dict[object, object]:
    return {}


# Gives its argument back when that is a tuple and raises TypeError when not, without a Python call:
# a file can have two million sizes. `tuple` itself would turn a long string into a longer tuple.
SIZE = ().__add__

_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath")

METADATA_GLOBALS: dict[str, object] = {
    **DTYPES,
    **{f"{m}.{name}": Function(_path) for m in ("pathlib", "pathlib._local") for name in _PATHS},
    f"{_CHECKPOINT}.Metadata": _Metadata,
    f"{_CHECKPOINT}.TensorStorageMetadata": TensorRecord,
    f"{_CHECKPOINT}.BytesStorageMetadata": _BytesStorage,
    f"{_CHECKPOINT}.TensorProperties": _TensorProperties,
    f"{_CHECKPOINT}.ChunkStorageMetadata": ChunkRecord,
    f"{_CHECKPOINT}.MetadataIndex": IndexRecord,
    f"{_CHECKPOINT}.StorageMeta": _StorageMeta,
    f"{_CHECKPOINT}._MEM_FORMAT_ENCODING": Function(_first),
    f"{_CHECKPOINT}.MEM_FORMAT_ENCODING": Function(_first),
    # torch 2.2 and before took these two from its sharded tensors, whatever was saved.
    f"{_SHARDED}.TensorProperties": _TensorProperties,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": Function(_first),
    "torch.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
    "torch.serialization._get_layout": Function(_first),
    "torch.Size": SIZE,
    "torch.strided": "torch.strided",
    "torch.contiguous_format": opaque_class("torch.contiguous_format"),
    "torch.preserve_format": opaque_class("torch.preserve_format"),
    "torch.channels_last": opaque_class("torch.channels_last"),
    "collections.OrderedDict": Function(_dict),
}


def metadata_of(value: object) -> Metadata:
    """The metadata from what its pickle gave.

    Raises UnreadableError when a part is missing or is not what it should be, and AttributeError
    when an object has no state.
    """
    state = state_of(value)
    entries = state.get("state_dict_metadata")
    if type(entries) is not dict:
        raise UnreadableError("lists no tensors: it has no state_dict_metadata.")
    tensors: dict[str, TensorMeta] = {}
    objects: list[str] = []
    cuts = Cuts()
    for fqn, entry in entries.items():
        name = as_name(fqn)
        if isinstance(entry, TensorRecord):
            dtype, shape, chunks = tensor_parts(name, entry)
            tensors[name] = TensorMeta(dtype, shape, cuts.rows(name, shape, chunks))
        else:
            objects.append(object_name(name, entry))
    return metadata_with(state, tensors, objects, _storage(state.get("storage_data")))


def state_of(value: object) -> dict[object, object]:
    """All that a Metadata object holds."""
    if not isinstance(value, _Metadata):
        raise UnreadableError(f"holds no DCP metadata, but {shown(value)}.")
    return value.state


def metadata_with(
    state: Mapping[object, object],
    tensors: dict[str, TensorMeta],
    objects: Iterable[str],
    storage: Storage,
) -> Metadata:
    """The metadata with these tensors, objects and places, and the rest from its state."""
    return Metadata(
        tensors,
        objects=frozenset(objects),
        storage=storage,
        planner_data=_planner_data(state.get("planner_data")),
        version=_text(state.get("version")),
        checkpoint_id=_checkpoint_id(state.get("storage_meta")),
    )


def object_name(fqn: str, entry: object) -> str:
    """The name of an entry that is no tensor and must be an object."""
    if not isinstance(entry, _BytesStorage):
        raise UnreadableError(f"describes {fqn} as {shown(entry)}.")
    return fqn


def tensor_parts(fqn: str, entry: StateRecord) -> tuple[str, Offsets, list[object]]:
    """Element type, shape, and the list of chunks of a tensor, into which nothing looked."""
    properties, chunks = entry.state.get("properties"), entry.state.get("chunks")
    if type(chunks) is not list:
        raise UnreadableError(f"describes {fqn} without its properties or chunks.")
    dtype = dtype_of(fqn, properties)
    return dtype, as_counts(entry.state.get("size"), f"the shape of {fqn}"), chunks


def dtype_of(fqn: str, properties: object) -> str:
    """The element type that the properties of a tensor name."""
    if not isinstance(properties, _TensorProperties):
        raise UnreadableError(f"describes {fqn} without its properties or chunks.")
    if not isinstance(properties.dtype, TorchDType):
        raise UnreadableError(f"gives {fqn} the element type {shown(properties.dtype)}.")
    layout = properties.layout
    if layout is not None and (type(layout) is not str or layout != "torch.strided"):
        raise UnsupportedError(f"{fqn} is stored with layout {shown(properties.layout)}.")
    return properties.dtype.name


class Cuts:
    """The chunks of tensors: those of tensors that are cut alike become one list."""

    def __init__(self) -> None:
        self._known: dict[Offsets, list[tuple[list[Offsets], list[Offsets], list[Row]]]] = {}

    def rows(self, fqn: str, shape: Offsets, chunks: Sequence[object]) -> list[Row]:
        """The offsets and sizes of the chunks of a tensor."""
        if not set(map(type, chunks)) <= {ChunkRecord}:
            raise UnreadableError(f"describes {fqn} with chunks that are none.")
        offsets = list(map(_offsets, chunks))
        sizes = list(map(_sizes, chunks))
        alike = self._known.setdefault(shape, [])
        for known_offsets, known_sizes, rows in alike:
            if known_offsets == offsets and known_sizes == sizes:
                return rows
        rows = checked_rows(fqn, shape, offsets, sizes)
        if len(alike) < _MAX_ALIKE:
            alike.append((offsets, sizes, rows))
        return rows


_offsets: Callable[[object], Offsets] = attrgetter("offsets")
_sizes: Callable[[object], Offsets] = attrgetter("sizes")
_transforms: Callable[[object], tuple[str, ...]] = attrgetter("transforms")


def checked_rows(
    fqn: str, shape: Offsets, offsets: Sequence[Offsets], sizes: Sequence[Offsets]
) -> list[Row]:
    """The chunks with these offsets and sizes, which must be boxes in as many dimensions."""
    if not _are_counts(offsets, len(shape)) or not _are_counts(sizes, len(shape)):
        raise UnreadableError(f"describes {fqn} with a chunk that is no box in {len(shape)}-D.")
    return list(zip(offsets, sizes, strict=True))


def _are_counts(rows: Sequence[Offsets], ndim: int) -> bool:
    """Whether all are tuples of ``ndim`` counts, in passes that run without Python code."""
    good = set(map(type, rows)) <= {tuple} and set(map(len, rows)) <= {ndim}
    good = good and set(map(type, chain.from_iterable(rows))) <= {int}
    return good and min(chain.from_iterable(rows), default=0) >= 0


def _storage(value: object) -> Storage:
    if type(value) is not dict:
        raise UnreadableError("does not say where its items lie: it has no storage_data.")
    if not set(map(type, value)) <= {IndexRecord} or not set(map(type, value.values())) <= {
        StorageInfo
    }:
        raise UnreadableError("places items in a way that is not torch's.")
    set(map(_transforms, value.values()))  # an AttributeError for one without a state
    return StorageLists((index.fqn, index.offset, info) for index, info in value.items())


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
