"""A nested state dict, once unpickled, as flat lists of tensors and other values with their paths.

It walks as torch's own distributed checkpoint flattens, so that one state dict has the same names
in both formats: a dict always gives its items, a list gives them when a tensor or a dict is
somewhere inside, and anything else is one value. A tuple is walked only when it holds a tensor,
which would be lost otherwise. An empty dict is one value, because the loading side may ask for it.

Keys stay what they are (a str or an int) in a path. Nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.index import Path, PlainValue
from ckpt_tools.errors import CheckpointError, UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.torch_stubs import Opaque, StoredDTensor, StoredTensor

Stored = StoredTensor | StoredDTensor

# More than any real state dict has; a pickle of a few KB can refer to itself without end, or say
# one list so often that its items are more than memory holds.
_MAX_DEPTH = 100
_MAX_REPEATED = 200_000
# Python's and numpy's generators have 625 numbers, a sampler's state may list an epoch's samples.
_MAX_PLAIN = 100_000
_MAX_PLAIN_IN_ALL = 5_000_000
# Python refuses to print numbers of thousands of digits.
_MAX_INT = 1 << 512
_FLAT = frozenset({"_flat_param", "flat_param"})


class TensorLeaf(NamedTuple):
    """A tensor and its place in the nesting."""

    path: Path
    stored: Stored


class ObjectLeaf(NamedTuple):
    """Something that is not a tensor: its value when it is plain, else the name of its type.

    ``flaw`` says why it cannot be used: it is a tensor of a kind that is not read, or of a class
    that nobody knows. What is not plain may still have a value, to be shown.
    """

    path: Path
    value: PlainValue
    type_name: str | None
    flaw: CheckpointError | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether tensors are in it, which cannot be read."""
        return isinstance(self.flaw, UnsupportedError)


@dataclass(frozen=True, slots=True)
class StateDict:
    """The leaves of one state dict, in the order of the nesting."""

    tensors: tuple[TensorLeaf, ...]
    objects: tuple[ObjectLeaf, ...]


def flatten(value: object, *, where: str) -> StateDict:
    """The leaves of a nested value; one that is no container has the path ``("value",)``.

    Raises UnreadableError for a nesting without end, and UnsupportedError for two leaves of one
    name or for the flat parameters of FSDP1.
    """
    walk = _Walk(where)
    top = value if isinstance(value, dict | list | tuple) and len(value) else {"value": value}
    if isinstance(top, tuple) or (isinstance(top, list) and not walk.holds(top)):
        top = dict(enumerate(top)) if walk.holds(top) else {"value": top}
    tensors: list[TensorLeaf] = []
    objects: list[ObjectLeaf] = []
    for path, leaf in walk.leaves(top, ()):
        if isinstance(leaf, StoredTensor | StoredDTensor):
            tensors.append(TensorLeaf(path, leaf))
        else:
            objects.append(ObjectLeaf(path, *walk.plain(leaf), flaw=walk.flaw(leaf)))
    _refuse_flat_parameters([leaf.path for leaf in tensors], where)
    _check_names([*(leaf.path for leaf in tensors), *(leaf.path for leaf in objects)], where)
    return StateDict(tuple(tensors), tuple(objects))


class _Walk:
    """One walk through a nesting: remembers what it has seen of each container."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._walked: set[int] = set()
        self._repeated = 0
        self._known: dict[tuple[int, bool], bool] = {}
        self._opened: dict[int, tuple[PlainValue, str | None]] = {}
        self._flaws: dict[int, CheckpointError | None] = {}
        self._left = _MAX_PLAIN_IN_ALL

    def leaves(self, value: object, path: Path) -> Iterator[tuple[Path, object]]:
        """The leaves below a value, each with its path."""
        if isinstance(value, dict) and value and self._has_parts(value):
            self._enter(value, len(path))
            for key, item in value.items():
                yield from self.leaves(item, (*path, key if type(key) is int else str(key)))
        elif isinstance(value, list | tuple) and self.holds(value):
            self._enter(value, len(path))
            for place, item in enumerate(value):
                yield from self.leaves(item, (*path, place))
        else:
            yield path, value

    def _has_parts(self, value: dict[object, object]) -> bool:
        """Whether the keys of a dict can be parts of a path; one that cannot is one value."""
        odd = next((key for key in value if not _is_part(key)), None)
        if odd is None:
            return True
        if any(self._holds(item, 0, tensors_only=True) for item in value.values()):
            raise UnsupportedError(
                f"{self._where}: a dict of tensors has a key of type {_type_name(odd)}.",
                hint="Save it again with names for keys.",
            )
        return False

    def plain(self, value: object) -> tuple[PlainValue, str | None]:
        """The value and None when it is plain, else None and the name of what is not."""
        if id(value) not in self._opened:
            look = _Look(min(self._left, _MAX_PLAIN))
            name = look.odd_type(value, 0)
            self._left -= min(self._left, _MAX_PLAIN) - look.left
            plain = value if name is None else getattr(value, "fields", None)
            self._flaws[id(value)] = look.flaw
            self._opened[id(value)] = plain, name  # type: ignore[assignment]  # looked through
        return self._opened[id(value)]

    def flaw(self, value: object) -> CheckpointError | None:
        """Why a value that was looked through cannot be used, or None."""
        return self._flaws.get(id(value))

    def holds(self, value: list[object] | tuple[object, ...]) -> bool:
        """Whether a list has a tensor or a dict somewhere inside; whether a tuple has a tensor."""
        return self._holds(value, 0, tensors_only=isinstance(value, tuple))

    def _holds(self, value: object, depth: int, *, tensors_only: bool) -> bool:
        if isinstance(value, StoredTensor | StoredDTensor):
            return True
        if isinstance(value, Opaque):
            return value.is_tensor
        if isinstance(value, dict):
            if not tensors_only:
                return True
            items: Iterable[object] = value.values()
        elif type(value) in {list, tuple} and isinstance(value, list | tuple):
            items = value
        else:
            return False
        key = (id(value), tensors_only)
        if key not in self._known:
            self._check_depth(depth)
            self._known[key] = any(
                self._holds(item, depth + 1, tensors_only=tensors_only or type(value) is tuple)
                for item in items
            )
        return self._known[key]

    def _enter(self, value: Sized, depth: int) -> None:
        """Take note that a container is walked, and refuse one that is walked too often."""
        if id(value) in self._walked:
            self._repeated += len(value)
        self._walked.add(id(value))
        self._check_depth(depth if self._repeated <= _MAX_REPEATED else _MAX_DEPTH + 1)

    def _check_depth(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise UnreadableError(
                f"{self._where}: its values are nested without end; no state dict looks like this."
            )


def _is_part(key: object) -> bool:
    """Whether a key can be a part of a path, as it is or by its text."""
    if type(key) is int:
        return abs(key) < _MAX_INT
    return type(key) in {str, float, bool, type(None)}


def _is_text(text: str) -> bool:
    """Whether a str can be written out: a pickle can also hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Look:
    """A look through a value for what is not plain; ``left`` parts may still be looked at."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.flaw: CheckpointError | None = None

    def odd_type(self, value: object, depth: int) -> str | None:
        """The name of the first type that is not plain, or of a container that is too large."""
        self.left -= 1
        if self.left < 0 or depth > _MAX_DEPTH:
            return _type_name(value)
        if _is_plain_scalar(value):
            return None
        if isinstance(value, Opaque):
            self.flaw = value.flaw
        if not isinstance(value, dict | list | tuple) or len(value) > self.left:
            return _type_name(value)
        if not isinstance(value, dict):
            return self._first_odd(value, depth)
        if not all(type(key) in {str, int} and _is_plain_scalar(key) for key in value):
            return _type_name(value)
        return self._first_odd(value.values(), depth)

    def _first_odd(self, values: Iterable[object], depth: int) -> str | None:
        return next(filter(None, (self.odd_type(item, depth + 1) for item in values)), None)


def _is_plain_scalar(value: object) -> bool:
    if type(value) is int:
        return abs(value) < _MAX_INT
    if type(value) is str:
        return _is_text(value)
    return value is None or type(value) in {bool, float}


def _type_name(value: object) -> str:
    return str(getattr(value, "qualname", type(value).__name__))


def _refuse_flat_parameters(paths: Sequence[Path], where: str) -> None:
    """Refuse FSDP1's LOCAL_STATE_DICT: flat parameters have lost the shapes of the weights."""
    for path in paths:
        if any(isinstance(part, str) and part.rpartition(".")[2] in _FLAT for part in path):
            raise UnsupportedError(
                f"{where}: {names.join(path)} is a flat parameter of FSDP1 (LOCAL_STATE_DICT): one "
                "rank's piece of many weights in a row, without their shapes.",
                hint="Only the job that saved it can read it. Load it there and save again: with "
                "FULL_STATE_DICT, or SHARDED_STATE_DICT and a device_mesh, or through "
                "torch.distributed.checkpoint.",
            )


def _check_names(paths: Iterable[Path], where: str) -> None:
    """Refuse two leaves of one name, and names that are no text."""
    seen: dict[str, Path] = {}
    for path in paths:
        fqn = names.join(path)
        if not _is_text(fqn):
            raise UnreadableError(f"{where} is damaged: {fqn!a:.80} is no name.")
        other = seen.setdefault(fqn, path)
        if other is not path:
            raise UnsupportedError(
                f"{where}: two entries have the name {fqn}: {list(other)} and {list(path)}.",
                hint="Save again with names that differ when joined by dots.",
            )
