"""Compares the containers and the objects of two checkpoints.

Between two pickles (torch files, rank files) kinds and the types of keys must be equal; an
OrderedDict is a dict. Where one side is DCP, both are taken as DCP has them: keys as text, no empty
dicts, a tuple only where it is pickled whole. Safetensors have no containers, and DCP directories
may have none; then no containers are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import NO_TREE, CheckpointIndex, ObjectEntry
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.core.state_tree import Branch, Path, nested
from ckpt_tools.storage.reader import Files

_KEYS_SHOWN = 3


class ContainerDiff(NamedTuple):
    """One container that is another one on the other side; None where there is none."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True)
class ContainersCompared:
    """How many containers are on both sides, and which are not the same."""

    count: int
    differing: tuple[ContainerDiff, ...]


def compare_containers(a: CheckpointIndex, b: CheckpointIndex) -> ContainersCompared | None:
    """Compare the containers of two checkpoints; None where one of them keeps none.

    Names that only one side has are no difference of containers.
    """
    if not (_keeps_containers(a) and _keeps_containers(b)):
        return None
    here, there = a.nesting, b.nesting
    for form in {formats.named(index.format) for index in (a, b)}:
        here = form.containers(here, is_tensor=lambda fqn: a.tensor(fqn) is not None) or here
        there = form.containers(there, is_tensor=lambda fqn: b.tensor(fqn) is not None) or there
    return _compared(here, there)


def lists_as_in(result: CheckpointIndex, wanted: CheckpointIndex) -> CheckpointIndex:
    """``wanted`` with each list that is one plain value in ``result`` as one here, too.

    A list without tensors and dicts is read as one value. One can become so when it is written: its
    tensors were left out, or DCP did not keep the empty dicts in it. Both must be opened.
    """
    objects = {entry.fqn: entry for entry in wanted.objects}
    joined: dict[Path, str] = {}
    for entry in result.objects:
        if not entry.opened or entry.fqn in objects:
            continue
        there = wanted.nesting.get(*entry.path)
        if not isinstance(there, Branch) or there.keys is not None:
            continue
        held = list(there.leaves())
        if held and all(fqn in objects and objects[fqn].opened for fqn in held):
            value = nested(there, lambda fqn: objects[fqn].value)
            objects[entry.fqn] = replace(entry, value=value)
            joined[entry.path] = entry.fqn
            for fqn in held:
                del objects[fqn]
    ordered = tuple(sorted(objects.values(), key=lambda entry: entry.fqn))
    return replace(wanted, objects=ordered, tree=wanted.nesting.with_leaves(joined))


def _keeps_containers(index: CheckpointIndex) -> bool:
    """Whether the format keeps all containers, or this checkpoint has one that it keeps."""
    form = formats.named(index.format)
    if form.nested:
        return True
    keeps = form.containers(NO_TREE, is_tensor=bool) is not None
    return keeps and any(isinstance(item, Branch) for item in index.nesting.items)


def _compared(a: Branch[str], b: Branch[str]) -> ContainersCompared:
    """Walk through two trees side by side."""
    names_a, names_b = frozenset(a.leaves()), frozenset(b.leaves())
    count = 0
    differing: list[ContainerDiff] = []
    waiting: list[tuple[Path, Branch[str], Branch[str]]] = [((), a, b)]
    while waiting:
        path, one, other = waiting.pop()
        count += 1
        if _kind(one) != _kind(other):
            differing.append(ContainerDiff(names.join(path), _words(one), _words(other)))
            continue
        differing += _keys(path, one, other)
        theirs = dict(other.pairs())
        for part, item in one.pairs():
            there = theirs.pop(part, None)
            if isinstance(item, Branch) and isinstance(there, Branch):
                waiting.append(((*path, part), item, there))
            elif there is None and _is_other(item, names_b):
                differing.append(ContainerDiff(names.join((*path, part)), _words(item), None))
        for part, there in theirs.items():
            if _is_other(there, names_a):
                differing.append(ContainerDiff(names.join((*path, part)), None, _words(there)))
    return ContainersCompared(count, tuple(differing))


def _is_other(item: str | Branch[str] | None, names_there: frozenset[str]) -> bool:
    """Whether what has no counterpart is a difference that no name tells."""
    if not isinstance(item, Branch):
        return item is not None and item in names_there
    held = list(item.leaves())
    return not held or any(fqn in names_there for fqn in held)


def _keys(path: Path, one: Branch[str], other: Branch[str]) -> Iterator[ContainerDiff]:
    """Keys of the same text and of different types."""
    theirs = dict(zip(other.parts(), other.keys or (), strict=False))
    unequal = [
        (key, theirs[part])
        for part, key in zip(one.parts(), one.keys or (), strict=False)
        if part in theirs and type(key) is not type(theirs[part])
    ]
    if unequal:
        mine, others = zip(*unequal[:_KEYS_SHOWN], strict=True)
        more = "…" if len(unequal) > _KEYS_SHOWN else ""
        a, b = (f"dict with {', '.join(map(repr, keys))}{more}" for keys in (mine, others))
        yield ContainerDiff(names.join(path), a, b)


def _kind(branch: Branch[str]) -> str:
    return "dict" if branch.keys is not None else branch.kind


def _words(item: str | Branch[str] | None) -> str:
    if not isinstance(item, Branch):
        return "an item"
    return f"{item.kind} of {len(item.items)}" if item.items else f"empty {item.kind}"


_MAX_COMPARED = 64 << 20


def compare_objects(a: ObjectEntry, b: ObjectEntry, files: Files) -> tuple[bool | None, str]:
    """Whether two objects are equal and, if not, why; None when it cannot be known.

    Plain values are equal when they are equal in Python and of the same types, with keys of the
    same types; only an OrderedDict equals a dict, and a NaN another. What is not opened is compared
    by its pickle: equal bytes are equal values, different bytes may be, too.
    """
    if a.opened and b.opened:
        same = _same(a.value, b.value)
        return same, "" if same else f"{a.value!r} and {b.value!r}"
    if a.opened != b.opened:
        if (b if a.opened else a).type_name is None:
            return None, "too large to be opened"
        return False, "one is a plain value, the other is not"
    here, there = formats.object_digests(a, files), formats.object_digests(b, files)
    if here is None and there is None and _of_equal_pickles(a, b, files):
        return True, ""
    if here is None or there is None:
        return None, "not opened, and without bytes of its own to compare"
    if here == there:
        return True, ""
    return None, "not opened; the pickled bytes differ, which need not mean that the values do"


def _of_equal_pickles(a: ObjectEntry, b: ObjectEntry, files: Files) -> bool:
    """Whether two are the same part of two equal pickles (NumPy's arrays are in the pickle)."""
    comparable = a.codec is None and b.codec is None and a.path == b.path
    return (
        comparable
        and 0 < a.data.length == b.data.length <= _MAX_COMPARED
        and files.read(*a.data) == files.read(*b.data)
    )


def _same(a: PlainValue, b: PlainValue) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        same_keys = {(type(key), key) for key in a} == {(type(key), key) for key in b}
        return same_keys and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and a == b
