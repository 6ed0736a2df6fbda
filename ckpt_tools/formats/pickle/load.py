"""A restricted unpickler: it reads the pickles of checkpoints and runs nothing foreign.

A pickle is a program that names classes and functions. Here each name gives a stand-in of our own,
an opaque value, or an error that says the name. Nothing is imported, and torch is not needed.
It knows what torch puts into a pickle, not what a checkpoint format means by it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import BinaryIO

from ckpt_tools.core.index import PlainValue
from ckpt_tools.errors import UnreadableError, UnsafePickleError, UnsupportedError
from ckpt_tools.formats.pickle.allowed_globals import (
    SHARDED_TENSOR_MODULES,
    TENSOR_GLOBALS,
    is_harmless,
    is_runner,
    is_torch_dtype,
    made_by,
)
from ckpt_tools.formats.pickle.containers import Containers, plain_value, settled
from ckpt_tools.formats.pickle.rebuild import refused_function, storage_from_id
from ckpt_tools.formats.pickle.torch_stubs import (
    Opaque,
    OpaqueObject,
    StoredStorage,
    TorchDType,
    opaque_class,
)
from ckpt_tools.formats.pickle.unpickler import (
    collector_paused,
    pickle_at,
    placed,
    unpickle,
)

_MAX_OPAQUE_CLASSES = 1000


def load_tensors(data: bytes, *, where: str, allow: Collection[str] = ()) -> object:
    """The state dict that a ``data.pkl`` of torch.save holds: nested dicts, lists and tuples.

    Leaves are plain Python values, StoredTensor, StoredDTensor, and Opaque for what is not opened.
    ``allow`` holds further globals ("module.name" or "module.*") that may become Opaque.

    Raises UnsupportedError for ShardedTensor and for tensors that cannot be read right,
    UnsafePickleError for a global that is not known, UnreadableError for damaged bytes.
    """
    with placed(where), collector_paused():
        return _tensors(data, allow, {})


def load_stream(
    file: BinaryIO,
    *,
    where: str,
    allow: Collection[str] = (),
    storages: dict[str, StoredStorage] | None = None,
) -> object:
    """As `load_tensors`, from a seekable binary file, which is left right after the pickle.

    ``storages`` is filled with every storage that the pickle names, also where no tensor is kept.
    """
    with placed(where), collector_paused():
        return _tensors(pickle_at(file), allow, {} if storages is None else storages)


def _tensors(data: bytes, allow: Collection[str], storages: dict[str, StoredStorage]) -> object:
    """The state dict of a pickle; ``storages`` is filled with all that it names."""

    def storage(pid: object) -> StoredStorage:
        found = storage_from_id(pid)
        storages[found.key] = found
        return found

    try:
        value = unpickle(data, resolve=_Tensors(allow), storage=storage)
    except UnsafePickleError:
        _refuse_sharded_tensor(data)
        raise
    return settled(value, max_nodes=_max_nodes(len(data)))


def load_plain(data: bytes, *, where: str) -> PlainValue | Opaque:
    """The value of a pickled object when it is plain, else Opaque, which names its class.

    Plain are None, bool, int, float, str, and lists, tuples and dicts of them.

    Raises UnsafePickleError when the pickle asks for what can run code, and UnsupportedError for
    a ShardedTensor.
    """
    vocabulary = _Names()
    with placed(where), collector_paused():
        try:
            value = unpickle(data, resolve=vocabulary, storage=vocabulary.storage)
        except UnsafePickleError:
            _refuse_sharded_tensor(data)
            raise
        names = frozenset(vocabulary.asked)
        return plain_value(value, asked=names, max_nodes=_max_nodes(len(data)))


def _max_nodes(length: int) -> int:
    """How many values a pickle of this length may unfold to; one per byte, were none shared."""
    return 10_000 + 16 * length


class _Tensors:
    """The globals of a pickle of tensors."""

    def __init__(self, allow: Collection[str]) -> None:
        self._allow = frozenset(allow)
        self._opaque: dict[str, type[OpaqueObject]] = {}
        self._containers = Containers()

    def __call__(self, name: str) -> object:
        """The stand-in for a global."""
        found = TENSOR_GLOBALS.get(name) or self._containers.get(name)
        if found is not None:
            return found
        if name.startswith(SHARDED_TENSOR_MODULES):
            raise _sharded_tensor_error()
        if name.startswith(("torch._utils._rebuild", "torch._tensor._rebuild")):
            return refused_function(name)
        if is_torch_dtype(name):
            return TorchDType(name)
        if is_runner(name):
            raise _runner_error(name)
        if is_harmless(name) or self._is_allowed(name):
            return _opaque(name, self._opaque)
        raise UnsafePickleError(
            f"asks for {name}, which is not on the list of what is read; it was not run.",
            hint=f"--allow-global {name} keeps it as an opaque value, which is never run.",
        )

    def _is_allowed(self, name: str) -> bool:
        parts = name.split(".")
        above = (".".join(parts[:end]) + ".*" for end in range(1, len(parts)))
        return name in self._allow or not self._allow.isdisjoint(above)


class _Names:
    """The globals of a pickle of which only plain values are wanted."""

    def __init__(self) -> None:
        self._opaque: dict[str, type[OpaqueObject]] = {}
        self._containers = Containers()

    @property
    def asked(self) -> Collection[str]:
        """The globals that became opaque."""
        return self._opaque

    def __call__(self, name: str) -> object:
        """The stand-in for a global."""
        found = self._containers.get(name)
        if found is not None:
            return found
        if name.startswith(SHARDED_TENSOR_MODULES):
            raise _sharded_tensor_error()
        if is_runner(name) and name not in TENSOR_GLOBALS:
            raise _runner_error(name)
        return _opaque(name, self._opaque)

    def storage(self, _pid: object) -> object:
        """An opaque value for every storage."""
        return _opaque("torch.Tensor", self._opaque)()


def _opaque(name: str, made: dict[str, type[OpaqueObject]]) -> type[OpaqueObject]:
    """The class for an opaque global; a pickle cannot make more than a thousand of them."""
    if name not in made:
        if len(made) >= _MAX_OPAQUE_CLASSES:
            raise UnreadableError(f"asks for more than {_MAX_OPAQUE_CLASSES:,} classes.")
        made[name] = opaque_class(made_by(name))
    return made[name]


def _runner_error(name: str) -> UnsafePickleError:
    return UnsafePickleError(
        f"asks for {name}, which can run code; it was not run, and it cannot be allowed.",
        hint="Do not open this file with torch.load(weights_only=False) or pickle.load.",
    )


def _sharded_tensor_error() -> UnsupportedError:
    return UnsupportedError(
        "holds a ShardedTensor, which opens only inside the job that saved it.",
        hint="Save it again with a device_mesh given to FSDP (then it holds DTensors), with "
        "FULL_STATE_DICT, or with torch.distributed.checkpoint.",
    )


def _refuse_sharded_tensor(data: bytes) -> None:
    """Raise that the pickle holds a ShardedTensor, if it does: it says more than what it needs."""
    if b"torch.distributed._shard.sharded_tensor" in data and b"ShardedTensor" in data:
        raise _sharded_tensor_error()
