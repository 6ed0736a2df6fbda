"""What a pickle gets instead of torch's classes: records of tensors, meshes and placements.

Nothing here holds a value of a tensor, imports what a pickle names, or does work that grows faster
than the pickle itself. It knows torch's own layouts, none of the checkpoint formats around them.

A pickle may call, fill or misuse each of these in any order. So classes and functions that it can
reach refuse to be changed (`__setstate__`), and everything is checked when a tensor is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, TypeGuard

from ckpt_tools.core.state_tree import Key
from ckpt_tools.errors import CheckpointError, UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.limits import (
    MAX_KEY_BITS,
    MAX_NDIM,
    is_word,
)

if TYPE_CHECKING:
    from typing_extensions import Self


Run = Callable[[tuple[object, ...]], object]


class StandIn:
    """The root of all that a pickle can reach: nothing sets its attributes from a pickled state."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Refuse: without this, pickle would write into the object or its class."""
        raise TypeError(f"{type(self).__name__} takes no state")


_KEYS = frozenset({str, float, bool, type(None)})
# The layouts of torch's tensors, which are no classes.
LAYOUTS = frozenset(
    {"torch.strided", "torch.jagged", "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc"}
    | {"torch.sparse_bsr", "torch.sparse_bsc", "torch._mkldnn"}
)
# Types that torch had before 2.1 have a storage class each, later ones go by _rebuild_tensor_v3.
STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
_VERSION = re.compile(r"[0-9A-Za-z.+-]{1,80}")


class Function(StandIn):
    """A function that a pickle may call; what it runs takes all arguments as one tuple."""

    __slots__ = ("_run", "qualname")

    def __init__(self, run: Run, qualname: str = "function") -> None:
        self._run = run
        self.qualname = qualname

    def __call__(self, *args: object) -> object:
        """What the function makes of these arguments."""
        return self._run(args)


class PickledDict(dict[object, object]):
    """A defaultdict or a Counter; its attributes are dropped, such as the ``_metadata`` of a
    module's state dict.
    """

    __slots__ = ()


class PickledOrderedDict(PickledDict):
    """An OrderedDict, while it is unpickled."""

    __slots__ = ()


def is_key(key: object) -> TypeGuard[Key]:
    """Whether a settled key of a dict can be a part of a path, by its text."""
    if type(key) is tuple:
        return all(map(is_key, key))
    if type(key) is int:
        return key.bit_length() <= MAX_KEY_BITS  # Python refuses to print thousands of digits
    return type(key) in _KEYS


class Marker(StandIn):
    """A class or a constant that only its name matters of, such as ``torch.Tensor``."""

    __slots__ = ("qualname",)

    def __init__(self, qualname: str) -> None:
        self.qualname = qualname


class TorchDType(Marker):
    """An element type: ``qualname`` is ``torch.float32``, ``name`` is ``float32``."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The name without ``torch.``."""
        return self.qualname.removeprefix("torch.")


class StorageClass(Marker):
    """The class of a storage: ``dtype`` is None when it is untyped bytes."""

    __slots__ = ("dtype",)

    def __init__(self, qualname: str, dtype: str | None) -> None:
        super().__init__(qualname)
        self.dtype = dtype


class Opaque(StandIn):
    """A value that is not opened: ``qualname`` names its class or what would have made it.

    ``flaw`` says why the value cannot be used: an UnsupportedError when tensors are in it, else an
    UnsafePickleError.
    """

    __slots__ = ("flaw", "qualname")

    def __init__(self, qualname: str, *, flaw: CheckpointError | None = None) -> None:
        self.qualname = qualname
        self.flaw = flaw

    @property
    def is_tensor(self) -> bool:
        """Whether this stands for tensors that cannot be read."""
        return isinstance(self.flaw, UnsupportedError)

    def __repr__(self) -> str:
        return f"Opaque({self.qualname!r})"


class OpaqueObject(StandIn):
    """The base of the classes made for opaque globals: keeps arguments, items and state as given.

    ``name`` is the global, ``qualname`` what is made by it. ``unknown`` are all unknown globals of
    the pickle, where this is one of them. ``called`` says that it was made by a call of the global,
    and not by ``__new__``; ``pairs`` are items with keys. ``is_nested``: a class in
    a class, which protocol 2 has no opcode for.
    """

    __slots__ = ("args", "called", "items", "kwargs", "pairs", "state")
    name = ""
    qualname = ""
    unknown: Collection[str] | None = None
    is_nested = False

    args: tuple[object, ...]
    kwargs: dict[str, object]
    called: bool
    items: list[object]
    pairs: list[tuple[object, object]]
    state: object

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """An object without items or a state."""
        made = super().__new__(cls)
        made.args, made.kwargs, made.called = args, kwargs, False
        made.items, made.pairs, made.state = [], [], None
        return made

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        """Take note that the class itself was called."""
        self.called = True

    def __setstate__(self, state: object) -> None:
        """Keep the state."""
        self.state = state

    @property
    def is_module(self) -> bool:
        """Whether it is a torch.nn.Module, whose state has tensors in it."""
        return type(self.state) is dict and {"_parameters", "_modules"} <= self.state.keys()


class VersionObject(OpaqueObject):
    """A TorchVersion, which is a str."""

    __slots__ = ()
    name = qualname = "torch.torch_version.TorchVersion"

    @property
    def text(self) -> str:
        """The version, of letters, digits, dots, plus and minus signs; "" for anything else."""
        text = self.args[0] if len(self.args) == 1 else None
        return text if type(text) is str and _VERSION.fullmatch(text) else ""


_LITTLE_ENDIAN: tuple[object, ...] = (
    (3, "<", None, None, None, -1, -1, 0),
    (3, "|", None, None, None, -1, -1, 0),
)


class NumpyDType(OpaqueObject):
    """A numpy.dtype."""

    __slots__ = ()
    name = qualname = "numpy.dtype"

    @property
    def code(self) -> str:
        """``f8`` or the like, of ``("<f8", False, True)`` or of ``("f8", …)`` and a byte order.

        "" for all but the simple types: their states have fields.
        """
        text = self.args[0] if self.args else None
        if not is_word(text) or (self.state is not None and self.state not in _LITTLE_ENDIAN):
            return ""
        if text[:1] in ("<", "|"):
            return text[1:]
        return "" if self.state is None else text


def opaque_class(
    name: str, qualname: str = "", unknown: Collection[str] | None = None
) -> type[OpaqueObject]:
    """A new class that stands for one opaque global, which makes objects of class ``qualname``."""
    facts = {"__slots__": (), "name": name, "qualname": qualname or name, "unknown": unknown}
    return type("OpaqueObject", (OpaqueObject,), facts)


_BYTEARRAY = opaque_class("builtins.bytearray")


def of_bytearray(value: bytearray) -> OpaqueObject:
    """How protocol 2 says a bytearray, which has an opcode in protocol 5."""
    return _BYTEARRAY(value.decode("latin-1"), "latin-1")


Sign = Literal["negated", "conjugated"]


class StoredStorage(NamedTuple):
    """A storage: ``numel`` elements of ``dtype`` (bytes when it is None) in record ``key``."""

    key: str
    dtype: str | None
    location: str
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A strided view of a storage: ``storage_offset`` and ``strides`` are in elements.

    ``sign`` says that the values are the negated or conjugated elements.
    """

    storage: StoredStorage
    dtype: str
    storage_offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    is_parameter: bool = False
    sign: Sign | None = None

    @property
    def local(self) -> StoredTensor:
        """What is in this file of it: all, unlike of a `StoredDTensor`."""
        return self

    @property
    def end(self) -> int:
        """One past the last element of the storage that the view touches; its start when empty."""
        if 0 in self.shape:
            return self.storage_offset
        steps = zip(self.shape, self.strides, strict=True)
        return self.storage_offset + sum((size - 1) * stride for size, stride in steps) + 1


class StoredPlacement(NamedTuple):
    """How one mesh dimension treats a tensor.

    ``kind`` is S (cut along ``dim``), SS (the same, after ``split_factor`` pieces made by mesh
    dimensions to its right), R (replicated) or P (partial sums, by ``op``).
    """

    kind: Literal["S", "R", "SS", "P"]
    dim: int | None = None
    split_factor: int | None = None
    op: str | None = None


@dataclass(frozen=True, slots=True)
class StoredMesh:
    """The grid of ranks of a tensor, as the rank that saved it saw it.

    ``coordinate`` and ``rank`` are that rank's own. ``rank_map`` lists the ranks of the root mesh,
    ``strides`` step through it, one per dimension (None when a dimension has no single stride).
    ``attributes`` are the names of all that was pickled: each torch has its own.
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...] | None
    coordinate: tuple[int, ...] | None
    rank: int | None
    device_type: str
    # Equal meshes share it, and it can be long: a hash without it tells meshes apart as well.
    rank_map: tuple[object, ...] | None = field(hash=False)
    strides: tuple[int, ...] | None
    attributes: frozenset[str] = frozenset()

    def ranks(self) -> tuple[int, ...] | None:
        """The ranks of this mesh, row-major, or None when the file does not tell them."""
        if self.rank_map is None or self.strides is None or self.coordinate is None:
            return None
        ranks = tuple(rank for rank in self.rank_map if type(rank) is int)
        here = sum(a * b for a, b in zip(self.coordinate, self.strides, strict=True))
        own = ranks.index(self.rank) if self.rank in ranks else here
        places = [own - here]
        for size, stride in zip(self.shape, self.strides, strict=True):
            if len(places) * size > len(ranks):
                return None
            places = [place + index * stride for place in places for index in range(size)]
        if min(places) < 0 or max(places) >= len(ranks):
            return None
        return tuple(ranks[place] for place in places)


@dataclass(frozen=True, slots=True)
class StoredDTensor:
    """One rank's shard of a distributed tensor; ``shape`` and ``strides`` are the whole tensor's.

    ``shard_order`` lists, per cut tensor dimension, the mesh dimensions from the first cut to the
    last, where the file says so.
    """

    local: StoredTensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    mesh: StoredMesh
    placements: tuple[StoredPlacement, ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """One rank's pieces of a tensor of this whole ``shape``: a CheckpointableTensor of torch 2.15.

    Piece i is ``sizes[i]`` elements from ``local_offsets[i]`` of ``local`` on, and belongs at
    ``global_offsets[i]`` of the whole. They are as the pickle has them, checked when they are used.
    """

    local: StoredTensor
    shape: tuple[int, ...]
    global_offsets: Sequence[object]
    local_offsets: Sequence[object]
    sizes: Sequence[object]

    @property
    def dtype(self) -> str:
        """The element type."""
        return self.local.dtype


Stored: TypeAlias = StoredTensor | StoredDTensor | StoredPieces


class StateRecord(StandIn):
    """An object that a pickle makes empty and then fills with a state: both are kept as given."""

    __slots__ = ("args", "state")

    args: tuple[object, ...]
    state: dict[object, object]

    def __new__(cls, *args: object) -> StateRecord:
        """Keep the arguments. A pickle calls this alone, never ``__init__``."""
        record = object.__new__(cls)
        record.args = args
        record.state = {}
        return record

    def __setstate__(self, state: object) -> None:
        """Keep the state: a dict, or a pair of dicts of which the first may be None."""
        if type(state) is tuple and len(state) == 2 and state[0] is None:
            state = state[1]
        if type(state) is not dict:
            raise TypeError("a state that is not a dict")
        self.state = state


class DeviceMeshRecord(StateRecord):
    """A DeviceMesh of any version; ``mesh`` is what it says, once it was read."""

    __slots__ = ("mesh",)

    mesh: StoredMesh


def record_class(name: str) -> type[StateRecord]:
    """A new class of records, which only its name tells from others."""
    return type(name, (StateRecord,), {"__slots__": ()})


MeshLayoutRecord = record_class("MeshLayoutRecord")  # a _MeshLayout or a _FlatLayout
SpecRecord = record_class("SpecRecord")  # a DTensorSpec
TensorMetaRecord = record_class("TensorMetaRecord")  # or torch 2.1's TensorMetadata
ShardOrderRecord = record_class("ShardOrderRecord")
ShardRecord = record_class("ShardRecord")
StridedShardRecord = record_class("StridedShardRecord")
ReplicateRecord = record_class("ReplicateRecord")
PartialRecord = record_class("PartialRecord")


def as_count(value: object, what: str) -> int:
    """An integer from 0 to 2**63 - 1, else UnreadableError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise UnreadableError(f"{what} is not a count: {shown(value)}.")
    return value


def as_counts(value: object, what: str) -> tuple[int, ...]:
    """A tuple of up to 64 counts, from a tuple, a list or one integer, else UnreadableError."""
    if type(value) is int:
        value = (value,)
    if not isinstance(value, tuple | list) or len(value) > MAX_NDIM:
        raise UnreadableError(f"{what} is not a list of counts: {shown(value)}.")
    for item in value:
        if type(item) is not int or not 0 <= item < 1 << 63:  # inline: shapes are most of the work
            as_count(item, what)
    return tuple(value)


def shown(value: object) -> str:
    """A short text for an error, whatever the value is."""
    if type(value) is int and value.bit_length() <= 128:
        return str(value)
    if type(value) is str:
        return ascii(value[:80])
    return f"a {getattr(value, 'qualname', type(value).__name__)}"
