"""Reads the pickles of checkpoints, and runs nothing foreign.

A pickle is a program that names classes and functions. Here each name gives a stub of ours, an
opaque value, or an error with the name. Nothing is imported, and torch is not needed.
It knows what torch puts into a pickle, not what a checkpoint format means by it.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ckpt_tools.core.plain_values import PlainValue, TorchValue
from ckpt_tools.errors import CheckpointError, UnreadableError, UnsafePickleError, UnsupportedError
from ckpt_tools.formats.pickle.allowed_globals import (
    SHARDED_TENSOR_MODULES,
    is_harmless,
    is_runner,
    runner_error,
)
from ckpt_tools.formats.pickle.containers import CONTAINER_FUNCTIONS
from ckpt_tools.formats.pickle.limits import MAX_PICKLE
from ckpt_tools.formats.pickle.machine import CutPickleError, Machine
from ckpt_tools.formats.pickle.nodes import Global, Opaque, shown
from ckpt_tools.formats.pickle.rebuild import (
    NAMING_FUNCTIONS,
    TENSOR_FUNCTIONS,
    refused_function,
    storage_from_id,
)
from ckpt_tools.formats.pickle.settle import settled
from ckpt_tools.formats.pickle.stored import StoredStorage, is_dtype

_REBUILD = ("torch._utils._rebuild", "torch._tensor._rebuild")
_FIRST_READ = 64 * 1024


@contextmanager
def placed(where: str) -> Iterator[None]:
    """Begin the message of every error with the name of the file."""
    try:
        yield
    except CheckpointError as error:
        link = " " if _VERB.match(error.message) else ": "
        raise error.at(where, link) from error


_VERB = re.compile("(asks|describes|does|gives|has|holds|is|lists|names|places|unfolds) ")


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the collector from looking through millions of new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_tensors(data: bytes, *, where: str, allow: Collection[str] = ()) -> object:
    """The state dict that a ``data.pkl`` of torch.save holds: nested dicts, lists and tuples.

    Leaves are plain Python values, those of `Stored`, and Opaque for what is not opened.
    A tensor that cannot be read right and a value of a class that nobody knows are Opaque with a
    flaw. ``allow`` holds further globals ("module.name" or "module.*") that have none.

    Raises UnsupportedError for ShardedTensor, UnsafePickleError for a global that can run code,
    UnreadableError for damaged bytes, and the flaw when nothing but one such value was saved.
    """
    with placed(where), collector_paused():
        return _tensors(data, allow, {})[0]


def load_stream(
    file: BinaryIO,
    *,
    where: str,
    allow: Collection[str] = (),
    storages: dict[str, StoredStorage] | None = None,
) -> object:
    """As `load_tensors`, from a seekable binary file, which is left right after the pickle.

    ``storages`` is filled with every storage that the pickle names, also where no tensor is kept.
    A pickle of more than 1 GiB is refused.
    """
    start, wanted = file.tell(), _FIRST_READ
    with placed(where), collector_paused():
        while True:
            file.seek(start)
            data = file.read(wanted)
            try:
                made, end = _tensors(data, allow, {} if storages is None else storages)
            except CutPickleError:
                if len(data) < wanted or wanted >= MAX_PICKLE:
                    raise
                wanted *= 8
                continue
            file.seek(start + end)
            return made


def load_plain(data: bytes, *, where: str, allow: Collection[str] = ()) -> PlainValue | Opaque:
    """The value of a pickled object when it is plain, else Opaque, which names its class.

    Plain are None, bool, int, float, str, and lists, tuples and dicts of them; a PickledValue, too,
    whose globals beside the known ones may be written if ``allow`` has them.

    Raises UnsafePickleError when the pickle asks for what can run code, and UnsupportedError for
    a ShardedTensor.
    """
    from ckpt_tools.formats.pickle.facts import facts_of  # late: state dicts are not asked

    tensor = Opaque("torch.Tensor")
    with placed(where), collector_paused():
        made, _ = _value(data, _Names(allow, reads_tensors=False), lambda _: tensor)
    found = facts_of(made, {})
    if found.odd is None:
        return made  # type: ignore[return-value]  # looked through
    return Opaque(found.odd if "." in found.odd else f"builtins.{found.odd}")


def _tensors(
    data: bytes, allow: Collection[str], storages: dict[str, StoredStorage]
) -> tuple[object, int]:
    """The state dict of a pickle, and its length; ``storages`` is filled with all that it names."""

    def storage(pid: object) -> StoredStorage | Global:
        stored = storage_from_id(pid)
        if isinstance(stored, StoredStorage):
            first = storages.setdefault(stored.key, stored)
            # Torch saves views of other types where there are no bytes, or both are bytes to it.
            types = {stored.dtype or "uint8", first.dtype or "uint8"}
            if stored.numel != first.numel or (stored.numel and len(types) > 1):
                raise UnreadableError(f"names storage {shown(stored.key)} with two types or sizes.")
        return stored

    made, end = _value(data, _Names(allow, reads_tensors=True), storage)
    if isinstance(made, Opaque) and made.flaw is not None:
        raise made.flaw
    return made, end


def _value(data: bytes, names: _Names, storage: Callable[[object], object]) -> tuple[object, int]:
    """The settled value of a pickle, and where that ends."""
    try:
        value, end = Machine(data, resolve=names, storage=storage).run()
    except UnsafePickleError as error:
        if b"torch.distributed._shard.sharded_tensor" in data and b"ShardedTensor" in data:
            raise _sharded_tensor_error() from error  # it says more than what it needs
        is_module = b"torch.nn.modules." in data and b"_parameters" in data
        if names.reads_tensors and is_module:  # more than is read
            error.advice = (
                "It looks like a whole model, pickled with its code (torch.save(model)). If you "
                "trust it, load it where its code is, and save model.state_dict() instead."
            )
        raise
    return settled(value, length=end, is_allowed=names.is_allowed, unknown=names.unknown), end


class _Names:
    """What stands for the names that one pickle asks for.

    Where no tensor is read, a value of a class that nobody knows stays closed. Where tensors are,
    ``unknown`` takes the names of such classes, but for those in ``allow``.
    """

    def __init__(self, allow: Collection[str], *, reads_tensors: bool) -> None:
        self.unknown: set[str] = set()
        self.reads_tensors = reads_tensors
        self._allow = frozenset(allow)

    def __call__(self, asked: Global) -> object:
        """A function of ours, an element type, or the name itself. Raises UnsafePickleError for one
        that can run code.
        """
        name = asked.name
        others = TENSOR_FUNCTIONS if self.reads_tensors else NAMING_FUNCTIONS
        function = CONTAINER_FUNCTIONS.get(name) or others.get(name)
        if function is not None:
            return function
        if name.startswith(SHARDED_TENSOR_MODULES):
            raise _sharded_tensor_error()
        if is_dtype(name):
            return TorchValue(name)
        if is_runner(name):
            raise runner_error(name)
        if self.reads_tensors and name.startswith(_REBUILD):
            return refused_function(name)
        if self.reads_tensors and not is_harmless(name) and not self.is_allowed(name):
            self.unknown.add(name)
        return asked

    def is_allowed(self, name: str) -> bool:
        """Whether the user allows a global."""
        parts = name.split(".")
        above = (".".join(parts[:end]) + ".*" for end in range(1, len(parts)))
        return name in self._allow or not self._allow.isdisjoint(above)


def _sharded_tensor_error() -> UnsupportedError:
    return UnsupportedError(
        "holds a ShardedTensor, which can be loaded only inside the job that saved it.",
        hint="Save it again with a device_mesh given to FSDP (then it holds DTensors), with "
        "FULL_STATE_DICT, or with torch.distributed.checkpoint.",
    )
