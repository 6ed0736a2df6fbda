"""A nested state dict, once unpickled, as its tree and flat lists of tensors and other values.

It walks as torch's own distributed checkpoint flattens, so that one state dict has the same names
in both formats: a dict always gives its items, a list gives them when a tensor or a dict is
somewhere inside, and anything else is one value. A tuple is walked only when it holds a tensor,
which would be lost otherwise. An empty dict is an empty container of the tree, and no value.

Keys stay what they are in the tree; in a path they are text. The values are settled
(`settle.settled`): they do not contain themselves, and their keys are names. Nothing here reads
a file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeGuard

from ckpt_tools.core import names
from ckpt_tools.core.index import ByteRange, ObjectEntry, Section
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.core.state_tree import Branch, Key, Kind, Path, Tree
from ckpt_tools.core.text import MAX_NAME
from ckpt_tools.errors import CheckpointError, UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle.facts import Facts, facts_of
from ckpt_tools.formats.pickle.limits import (
    FREE_NAMES,
    MAX_PLAIN,
    MAX_PLAIN_IN_ALL,
    MAX_REPEATED,
    USUAL_NAME,
)
from ckpt_tools.formats.pickle.load import collector_paused
from ckpt_tools.formats.pickle.nodes import is_key, type_name
from ckpt_tools.formats.pickle.stored import Stored

_Container: TypeAlias = dict[Key, object] | list[object] | tuple[object, ...]

_FLAT = frozenset({"_flat_param", "flat_param"})


class TensorLeaf(NamedTuple):
    """A tensor and its place in the nesting; ``fqn`` is the path joined by dots."""

    fqn: str
    path: Path
    stored: Stored


class _ObjectLeaf(NamedTuple):
    """Something that is not a tensor: its value when it is plain, else the name of its type.

    ``flaw`` says why it cannot be used: it is a tensor of a kind that is not read, or of a class
    that is not known.
    """

    fqn: str
    path: Path
    value: PlainValue
    type_name: str | None
    flaw: CheckpointError | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether tensors are in it, which cannot be read."""
        return isinstance(self.flaw, UnsupportedError)

    def entry(self, section: Section, data: ByteRange) -> ObjectEntry:
        """The entry of this value, which is in the pickle at ``data``."""
        return ObjectEntry(
            *(self.fqn, self.path, section, data, self.value),
            opened=self.type_name is None,
            type_name=self.type_name,
            flaw=self.flaw,
        )


@dataclass(frozen=True, slots=True)
class StateDict:
    """The leaves of one state dict, in the order of the nesting, and the tree of their names."""

    tensors: tuple[TensorLeaf, ...]
    objects: tuple[_ObjectLeaf, ...]
    tree: Branch[str]


@collector_paused()
def flatten(value: object, *, where: str, under: Sequence[str] = ()) -> StateDict:
    """The leaves of a nested value; one that is no container has the path ``("value",)``.

    ``under`` are keys of dicts to put it into. Raises UnreadableError for a value that is repeated
    too often, and UnsupportedError for two leaves of one name or for the flat parameters of FSDP1.
    """
    walk = _Flattening(where)
    top: _Container = value if walk.is_container(value) else {"value": value}
    for part in reversed(under):
        top = {part: top}
    state = walk.state(top, "", ())
    _check_names(state, where)
    return state


def flatten_at(value: object, *, where: str, fqn: str, path: Path) -> StateDict | None:
    """The leaves of a container that stands at ``path`` of a state dict, and is called ``fqn``
    there; None for a value that is a leaf itself.
    """
    walk = _Flattening(where)
    return walk.state(value, fqn, path) if walk.is_container(value) else None


class _Flattening:
    """One walk through a nesting: what it found, and what it has seen of each container."""

    def __init__(self, where: str) -> None:
        self.tensors: list[TensorLeaf] = []
        self.objects: list[_ObjectLeaf] = []
        self._where = where
        self._walked: set[int] = set()
        self._repeated = 0
        self._known: dict[int, Facts] = {}
        self._opened: dict[int, tuple[PlainValue, str | None, CheckpointError | None]] = {}
        self._left = MAX_PLAIN_IN_ALL
        self._keys: dict[tuple[str, ...], tuple[str, ...]] = {}
        self._name_text = FREE_NAMES

    def state(self, value: _Container, fqn: str, path: Path) -> StateDict:
        """All that is in a container."""
        tree = self._branch(value, fqn, path)
        return StateDict(tuple(self.tensors), tuple(self.objects), tree)

    def is_container(self, value: object) -> TypeGuard[_Container]:
        """Whether a value is walked, and no leaf: a list with a tensor or a dict somewhere inside,
        a tuple with a tensor, a dict whose keys can be parts of a path.
        """
        if isinstance(value, dict):
            return self._has_parts(value)
        if not isinstance(value, list | tuple):
            return False
        found = facts_of(value, self._known)
        return found.tensors or (found.dicts and isinstance(value, list))

    def _tree(self, value: object, fqn: str, path: Path) -> Tree[str]:
        """The tree of a value, whose leaves go to ``tensors`` and ``objects``."""
        self._name_text += USUAL_NAME - len(fqn)
        if self._name_text < 0 or len(fqn) > MAX_NAME:
            raise UnreadableError(f"{self._where} has names of {len(fqn):,} bytes in containers.")
        if isinstance(value, Stored):
            self.tensors.append(TensorLeaf(fqn, path, value))
            return fqn
        if self.is_container(value):
            return self._branch(value, fqn, path)
        self.objects.append(_ObjectLeaf(fqn, path, *self._leaf(value)))
        return fqn

    def _branch(self, value: _Container, fqn: str, path: Path) -> Branch[str]:
        """The tree of a container, of those that are in it first."""
        self._enter(value)
        above = f"{fqn}." if path else ""
        if not isinstance(value, dict):
            trees = (self._tree(item, f"{above}{at}", (*path, at)) for at, item in enumerate(value))
            return Branch("tuple" if isinstance(value, tuple) else "list", None, tuple(trees))
        items = []
        texts = set()
        for key, item in value.items():
            text = key if type(key) is str else str(key)
            texts.add(text)
            items.append(self._tree(item, f"{above}{text}", (*path, text)))
        if len(texts) < len(value):
            raise self._same_text(value, fqn)
        keys = tuple(value)
        if all(type(key) is str for key in keys):  # equal tuples of others may differ: 1 == True
            keys = self._keys.setdefault(keys, keys)  # type: ignore[arg-type]  # all are str
        kind: Kind = "OrderedDict" if isinstance(value, OrderedDict) else "dict"
        return Branch(kind, keys, tuple(items))

    def _same_text(self, value: dict[Key, object], fqn: str) -> UnsupportedError:
        text = Counter(map(str, value)).most_common(1)[0][0]
        one, other = [key for key in value if str(key) == text][:2]
        return UnsupportedError(
            f"{self._where}: two entries have the name {fqn}{'.' if fqn else ''}{text}: those of "
            f"the keys {one!r} and {other!r} of one dict.",
            hint="Save again with keys whose texts differ.",
        )

    def _has_parts(self, value: dict[object, object]) -> bool:
        """Whether the keys of a dict can be parts of a path; one that cannot is one value."""
        unusable = next((key for key in value if type(key) is not str and not is_key(key)), None)
        if unusable is None:
            return True
        if facts_of(value, self._known).tensors:
            raise UnsupportedError(
                f"{self._where}: a dict of tensors has a key of type {type_name(unusable)}.",
                hint="Save it again with names for keys.",
            )
        return False

    def _leaf(self, value: object) -> tuple[PlainValue, str | None, CheckpointError | None]:
        """The value when it is plain, else None, the class of what is not, and its flaw."""
        if id(value) not in self._opened:
            found, most = facts_of(value, self._known), min(self._left, MAX_PLAIN)
            odd = type_name(value) if found.odd is None and found.parts > most else found.odd
            self._left -= min(found.parts, most)
            plain = value if odd is None else None
            self._opened[id(value)] = plain, odd, found.flaw  # type: ignore[assignment]  # looked through
        return self._opened[id(value)]

    def _enter(self, value: Sized) -> None:
        """Take note of a container, and refuse one that is walked too often."""
        if id(value) in self._walked:
            self._repeated += len(value)
        self._walked.add(id(value))
        if self._repeated > MAX_REPEATED:
            raise UnreadableError(
                f"{self._where}: its values are nested without end; no state dict looks like this."
            )


def _check_names(state: StateDict, where: str) -> None:
    """Refuse FSDP1's LOCAL_STATE_DICT, and two leaves of one name.

    Flat parameters have lost the shapes of the weights.
    """
    for tensor in state.tensors:
        parts = (part for part in tensor.path if isinstance(part, str))
        if any(part.rpartition(".")[2] in _FLAT for part in parts):
            raise UnsupportedError(
                f"{where}: {names.join(tensor.path)} is a flat parameter of FSDP1 "
                "(LOCAL_STATE_DICT): one rank's piece of many weights in a row, without their "
                "shapes.",
                hint="Only the job that saved it can read it. Load it there and save again: with "
                "FULL_STATE_DICT, or SHARDED_STATE_DICT and a device_mesh, or through "
                "torch.distributed.checkpoint.",
            )
    seen: dict[str, Path] = {}
    leaves: list[TensorLeaf | _ObjectLeaf] = [*state.tensors, *state.objects]
    for leaf in leaves:
        other = seen.setdefault(leaf.fqn, leaf.path)
        if other is not leaf.path:
            raise UnsupportedError(
                f"{where}: two entries have the name {leaf.fqn}: {list(other)} and "
                f"{list(leaf.path)}.",
                hint="Save again with names that differ when joined by dots.",
            )
