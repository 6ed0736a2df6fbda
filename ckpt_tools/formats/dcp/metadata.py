"""What the ``.metadata`` pickle of a DCP directory says, as slim plain values.

It knows the classes of torch.distributed.checkpoint from torch 2.1 on, and nothing of the files
that they speak of. A file can list a million chunks: each is a few small objects without a dict,
tensors with the same cut share their boxes, and checks run over many values at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

from ckpt_tools.core.geometry import Box
from ckpt_tools.core.plain_values import TorchValue
from ckpt_tools.errors import UnreadableError, UnsafePickleError, UnsupportedError
from ckpt_tools.formats.pickle.limits import MAX_NDIM, Bound, is_word, text_bound
from ckpt_tools.formats.pickle.load import collector_paused, placed
from ckpt_tools.formats.pickle.machine import Machine
from ckpt_tools.formats.pickle.nodes import Columns, Function, Global, Instance, Repeated, shown
from ckpt_tools.formats.pickle.settle import as_name
from ckpt_tools.formats.pickle.stored import as_counts, dtype_name, is_dtype
from ckpt_tools.storage.paths import inside

Offsets = tuple[int, ...]

# Ways to cut one shape that are looked through for one that is known.
_MAX_ALIKE = 16
# Bytes of a chunk in a pickle, at least; torch shares none between tensors.
_LEAST_OF_CHUNK = 16
# What a part of a path counts for beside its text, as much as an object of Python takes.
_BYTES_OF_PART = 32
# To compile a shape takes as long as interpreting some hundred entries.
_REPLAY_FROM = 256 << 10


class _ChunkStorage(Repeated):
    """One stored box of a tensor."""

    __slots__ = ("offsets", "sizes")

    offsets: Offsets
    sizes: Offsets

    def __setstate__(self, state: object) -> None:
        """Take the box. The dict is emptied: the memo keeps a million of them to its end."""
        if type(state) is dict:
            self.offsets, self.sizes = state["offsets"], state["sizes"]
            state.clear()

    @classmethod
    def columns(cls, fields: Columns) -> Columns | None:
        """Take many boxes."""
        return fields if fields.keys() == {"offsets", "sizes"} else None


class _MetadataIndex(Repeated):
    """The key of an item, compared by identity while the pickle is read: that costs nothing."""

    __slots__ = ("fqn", "offset")

    fqn: str
    offset: Offsets | None

    def __setstate__(self, state: object) -> None:
        if type(state) is not dict:
            raise TypeError("a metadata index without a state")
        fqn, offset = state["fqn"], state.get("offset")
        if type(fqn) is not str:
            raise TypeError("a metadata index without a name")
        if offset is not None and (type(offset) is not tuple or len(offset) > MAX_NDIM):
            raise TypeError("a metadata index whose offset is not a size")
        self.fqn = fqn
        self.offset = offset
        state.clear()

    @classmethod
    def columns(cls, fields: Columns) -> Columns | None:
        """Take many keys; the number of a chunk is not used."""
        if not {"fqn", "offset"} <= fields.keys() <= {"fqn", "offset", "index"}:
            return None
        good = set(map(type, fields["fqn"])) == {str} and all(
            at is None or (type(at) is tuple and len(at) <= MAX_NDIM) for at in fields["offset"]
        )
        return {"fqn": fields["fqn"], "offset": fields["offset"]} if good else None


class StorageInfo(Repeated):
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
        self.relative_path = _inside(path)
        self.offset = offset
        self.length = length
        transforms = state.get("transform_descriptors") or ()
        if not isinstance(transforms, tuple | list) or len(transforms) > 16:
            raise TypeError("transform descriptors that are no short list")
        self.transforms = tuple(one if is_word(one) else shown(one) for one in transforms)
        state.clear()

    @classmethod
    def columns(cls, fields: Columns) -> Columns | None:
        """Take many places; one with transforms is taken alone."""
        if fields.keys() != {"relative_path", "offset", "length"}:
            return None
        numbers = [*fields["offset"], *fields["length"]]
        if not all(type(number) is int and number >= 0 for number in numbers):
            return None
        paths = [path for path in fields["relative_path"] if type(path) is str]
        if len(paths) < len(fields["relative_path"]):
            return None
        checked = list(map(_inside, paths))
        return {**fields, "relative_path": checked, "transforms": [()] * len(paths)}


_inside = lru_cache(maxsize=4096)(inside)  # one file has thousands of items


_CHECKPOINT = "torch.distributed.checkpoint.metadata"
_METADATA = Global(f"{_CHECKPOINT}.Metadata")
_TENSOR = Global(f"{_CHECKPOINT}.TensorStorageMetadata")
_PROPERTIES = Global(f"{_CHECKPOINT}.TensorProperties")
_BYTES = Global(f"{_CHECKPOINT}.BytesStorageMetadata")


class TensorMeta(NamedTuple):
    """One tensor: element type, global shape, and its different boxes in the order of the ranks.

    Most tensors with the same cut have the same tuple of boxes, known by its identity.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


Storage = Mapping[str, Mapping[Offsets | None, StorageInfo]]
# Places of items that several ranks wrote, by name and offsets of the box, None for an object.
Copies = Mapping[tuple[str, Offsets | None], Sequence[StorageInfo]]


class Metadata(NamedTuple):
    """All that a ``.metadata`` file says, or those of all ranks.

    ``objects`` are the names of what is no tensor. ``storage`` places every item by its name, then
    by the offsets of its box; those of an object are None. ``planner_data`` is the place of each
    name in the nested state dict, None when it was not flattened. ``reshaped`` are tensors that
    Megatron-core has stored in another shape, None where it is not Megatron-core's. ``copies`` are
    all places of items that several ranks wrote, first that of the lowest, which is also the one
    in ``storage``; ``complaints`` say of tensors how two ranks describe them.
    """

    tensors: dict[str, TensorMeta]
    objects: frozenset[str]
    storage: Storage
    planner_data: dict[str, tuple[str | int, ...]] | None
    reshaped: frozenset[str] | None
    copies: Copies = MappingProxyType({})
    complaints: Mapping[str, str] = MappingProxyType({})

    @property
    def files(self) -> set[str]:
        """The files that items are in, relative to the directory."""
        found = {info.relative_path for infos in self.storage.values() for info in infos.values()}
        return found.union(info.relative_path for infos in self.copies.values() for info in infos)


def _first(args: tuple[object, ...]) -> object:
    return args[0] if args else None


def _size(args: tuple[object, ...]) -> object:
    """A tuple as it is: `tuple` would turn a long string into a longer tuple."""
    if len(args) != 1 or type(args[0]) is not tuple:
        raise TypeError("a torch.Size that is not made of a tuple")
    return args[0]


_SIZE = Function(_size)

_FIELDS = frozenset(
    {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
)
_OF_MEGATRON = frozenset({"all_local_plans", "mcore_data"})
# Plans of the save, which Megatron-core's dist_checkpointing (torch_dist) keeps in `.metadata`.
_PLANNER = "torch.distributed.checkpoint.planner"
_OTHER_LIBRARY = (
    "Another library wrote the directory. Load it with that, and save it again with "
    "torch.distributed.checkpoint."
)
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath")

METADATA_GLOBALS: dict[str, object] = {
    **{f"pathlib.{name}": Function(lambda parts: parts) for name in _PATHS},  # is no text
    **{one.name: one for one in (_METADATA, _TENSOR, _PROPERTIES, _BYTES)},
    f"{_CHECKPOINT}.StorageMeta": Global(f"{_CHECKPOINT}.StorageMeta"),
    f"{_CHECKPOINT}.ChunkStorageMetadata": _ChunkStorage,
    f"{_CHECKPOINT}.MetadataIndex": _MetadataIndex,
    **{
        f"{_PLANNER}.{name}": Global(f"{_PLANNER}.{name}")
        for name in ("SavePlan", "WriteItem", "TensorWriteData", "BytesIOWriteData")
    },
    f"{_PLANNER}.WriteItemType": Function(_first),
    f"{_CHECKPOINT}._MEM_FORMAT_ENCODING": Function(_first),
    f"{_CHECKPOINT}.MEM_FORMAT_ENCODING": Function(_first),
    # torch 2.2 and before took these two from its sharded tensors, whatever was saved.
    f"{_SHARDED}.TensorProperties": _PROPERTIES,
    f"{_SHARDED}.MEM_FORMAT_ENCODING": Function(_first),
    "torch.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
    # OLMo-core writes by a copy of torch's writer, with the same fields.
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": StorageInfo,
    "torch.serialization._get_layout": Function(_first),
    "torch.Size": _SIZE,
    "torch.strided": "torch.strided",
    **{
        f"torch.{name}": Global(f"torch.{name}")
        for name in ("contiguous_format", "preserve_format", "channels_last")
    },
    "collections.OrderedDict": Function(lambda _: {}),
}


def load_metadata(data: bytes, *, where: str, replay_from: int = _REPLAY_FROM) -> Metadata:
    """What the ``.metadata`` file of a DCP directory says; ``where`` names it in errors.

    Entries that repeat are made many at a time where there are ``replay_from`` bytes or more.
    Raises UnsafePickleError for a class that is not torch's, naming it, and UnreadableError for
    bytes that are damaged.
    """
    with placed(where), collector_paused():
        replay = None
        if len(data) >= replay_from:
            from ckpt_tools.formats.pickle.replay import Repetition  # late: most files are small

            replay = Repetition(_SIZE).entries_after
        value, _ = Machine(data, resolve=_resolved, storage=_no_storage, replay=replay).run()
        try:
            return _metadata(value, len(data))
        except AttributeError as error:
            raise UnreadableError("is damaged: an object in it has no state.") from error


def _is(value: object, kind: Global) -> TypeGuard[Instance]:
    return isinstance(value, Instance) and value.cls is kind


def _resolved(asked: Global) -> object:
    name = asked.name
    if name in METADATA_GLOBALS:
        return METADATA_GLOBALS[name]
    if is_dtype(name):
        return TorchValue(name)
    raise UnsafePickleError(
        f"asks for {name}, which DCP metadata of torch 2.1 to 2.15 does not have; it was not run.",
        hint=_OTHER_LIBRARY,
    )


def _no_storage(_pid: object) -> object:
    raise UnreadableError("is not DCP metadata: it holds a tensor.")


def _metadata(value: object, length: int) -> Metadata:
    """What it says in a pickle of so many bytes."""
    if not _is(value, _METADATA):
        raise UnreadableError(f"holds no DCP metadata, but {shown(value)}.")
    fields = value.fields
    entries = fields.get("state_dict_metadata")
    if type(entries) is not dict:
        raise UnreadableError("lists no tensors: it has no state_dict_metadata.")
    tensors: dict[str, TensorMeta] = {}
    objects: set[str] = set()
    cuts = _Cuts(length)
    for key, entry in entries.items():
        fqn = as_name(key)
        if _is(entry, _TENSOR):
            tensors[fqn] = _tensor(fqn, entry.fields, cuts)
        elif _is(entry, _BYTES):
            objects.add(fqn)
        else:
            raise UnreadableError(f"describes {fqn} as {shown(entry)}.")
    strangers = fields.keys() - _FIELDS
    if strangers and "planner_data" not in fields:  # a flipped bit in the field's name
        raise UnreadableError(f"has no planner_data, but {shown(min(strangers, key=str))}.")
    # Tensors of which pieces of ranks are stored, as if those were another dimension.
    noted = fields.get("mcore_data")
    kept = noted.items() if type(noted) is dict else ()
    reshaped = frozenset(as_name(fqn) for fqn, one in kept if type(one) is dict and one)
    return Metadata(
        tensors,
        objects=frozenset(objects),
        storage=_storage(fields.get("storage_data")),
        planner_data=_planner_data(fields.get("planner_data"), text_bound(length)),
        reshaped=reshaped if strangers & _OF_MEGATRON else None,
    )


def _tensor(fqn: str, entry: dict[object, object], cuts: _Cuts) -> TensorMeta:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    if not _is(properties, _PROPERTIES) or type(chunks) is not list:
        raise UnreadableError(f"describes {fqn} without its properties or chunks.")
    state = properties.state
    if type(state) is tuple and len(state) >= 2:
        found, layout = state[:2]  # requires grad, memory format, pinned and more follow
    elif properties.fields:
        found, layout = properties.fields.get("dtype"), properties.fields.get("layout")
    else:
        raise AttributeError("state")
    dtype = dtype_name(found)
    if dtype is None:
        raise UnreadableError(f"gives {fqn} the element type {shown(found)}.")
    if layout is not None and (type(layout) is not str or layout != "torch.strided"):
        raise UnsupportedError(f"{fqn} is stored with layout {shown(layout)}.")
    shape = as_counts(entry.get("size"), f"the shape of {fqn}")
    return TensorMeta(dtype, shape, cuts.boxes(fqn, shape, chunks))


class _Cuts:
    """The boxes of tensors: those of tensors with the same cut become one tuple."""

    def __init__(self, length: int) -> None:
        self._left = length // _LEAST_OF_CHUNK
        self._known: dict[Offsets, list[tuple[list[Offsets], list[Offsets], tuple[Box, ...]]]] = {}
        self._same: dict[tuple[int, Offsets], tuple[Box, ...]] = {}

    def boxes(self, fqn: str, shape: Offsets, chunks: Sequence[object]) -> tuple[Box, ...]:
        """The boxes of the chunks of a tensor; of chunks with one box there is one."""
        self._left -= len(chunks)
        if self._left < 0:
            raise UnreadableError("is hostile: its tensors share lists of very many chunks.")
        same = id(chunks), shape  # replayed tensors share it
        if same not in self._same:
            self._same[same] = self._boxes(fqn, shape, chunks)
        return self._same[same]

    def _boxes(self, fqn: str, shape: Offsets, chunks: Sequence[object]) -> tuple[Box, ...]:
        if not set(map(type, chunks)) <= {_ChunkStorage}:
            raise UnreadableError(f"describes {fqn} with chunks that are not chunks.")
        offsets = list(map(_offsets, chunks))
        sizes = list(map(_sizes, chunks))
        same_shape = self._known.setdefault(shape, [])
        for known_offsets, known_sizes, boxes in same_shape:
            if known_offsets == offsets and known_sizes == sizes:
                return boxes
        if not _are_counts(offsets, len(shape)) or not _are_counts(sizes, len(shape)):
            raise UnreadableError(
                f"describes {fqn} with a chunk that is not a box in {len(shape)}-D."
            )
        boxes = tuple(dict.fromkeys(map(Box, offsets, sizes)))
        if len(same_shape) < _MAX_ALIKE:
            same_shape.append((offsets, sizes, boxes))
        return boxes


_offsets: Callable[[object], Offsets] = attrgetter("offsets")
_sizes: Callable[[object], Offsets] = attrgetter("sizes")
_offset: Callable[[object], Offsets | None] = attrgetter("offset")
_path_of: Callable[[object], str] = attrgetter("relative_path")


def _are_counts(rows: Sequence[Offsets], ndim: int) -> bool:
    """Whether all are tuples of ``ndim`` counts, in passes that run without Python code."""
    good = set(map(type, rows)) <= {tuple} and set(map(len, rows)) <= {ndim}
    good = good and set(map(type, chain.from_iterable(rows))) <= {int}
    return good and min(chain.from_iterable(rows), default=0) >= 0


def _storage(value: object) -> Storage:
    if type(value) is not dict:
        raise UnreadableError("does not say where its items lie: it has no storage_data.")
    keys, infos = set(map(type, value)), set(map(type, value.values()))
    is_known = keys <= {_MetadataIndex} and infos <= {StorageInfo}
    offsets = filter(None, map(_offset, value)) if is_known else ()
    if not is_known or not set(map(type, chain.from_iterable(offsets))) <= {int}:
        raise UnreadableError("gives places of items in a way that torch does not.")
    set(map(_path_of, value.values()))  # an AttributeError for one without a state
    storage: dict[str, dict[Offsets | None, StorageInfo]] = defaultdict(dict)
    for index, info in value.items():
        storage[index.fqn][index.offset] = info
    if sum(map(len, storage.values())) < len(value):
        raise UnreadableError("places one item twice.")
    return storage


def _planner_data(value: object, text: Bound) -> dict[str, tuple[str | int, ...]] | None:
    if type(value) is not dict:
        return None
    known: set[str] = set()
    paths = {}
    for fqn, path in value.items():
        paths[as_name(fqn)] = path
        if type(path) is not tuple or not 0 < len(path) <= 1000:
            raise UnreadableError(f"has {shown(path)} where a path should be.")
        text.take(_BYTES_OF_PART * len(path) + sum(len(p) for p in path if type(p) is str))
        for part in path:
            if type(part) is not int and (type(part) is not str or part not in known):
                known.add(as_name(part))
    return paths
