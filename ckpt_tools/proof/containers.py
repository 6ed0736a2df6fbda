"""Compares the containers of two checkpoints.

Between two pickles (torch files, rank files) kinds and the types of keys must be equal; an
OrderedDict is a dict. Where one side is DCP, both are taken as DCP has them: keys as text, no empty
dicts, a tuple only where it is pickled whole. Safetensors have no containers, and DCP directories
may have none; then no containers are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpt_tools import formats
from ckpt_tools.core import names
from ckpt_tools.core.index import NO_TREE, CheckpointIndex
from ckpt_tools.core.state_tree import Branch, Path, nested
from ckpt_tools.proof.pairs import EntryDiff

_KEYS_SHOWN = 3


def compare_containers(
    a: CheckpointIndex, b: CheckpointIndex
) -> tuple[int, list[EntryDiff]] | None:
    """How many containers are on both sides, and which differ; None where one side keeps none.

    The outermost has no name. Names that only one side has are no difference of containers.
    """
    if not (_keeps_containers(a) and _keeps_containers(b)):
        return None
    here, there = a.nesting, b.nesting
    for form in {formats.named(index.format) for index in (a, b)}:
        here = form.containers(here, is_tensor=lambda fqn: a.tensor(fqn) is not None) or here
        there = form.containers(there, is_tensor=lambda fqn: b.tensor(fqn) is not None) or there
    names_here, names_there = frozenset(here.leaves()), frozenset(there.leaves())
    count = 0
    differing: list[EntryDiff] = []
    waiting: list[tuple[Path, Branch[str], Branch[str]]] = [((), here, there)]
    while waiting:
        path, one, other = waiting.pop()
        count += 1
        if _kind(one) != _kind(other):
            differing.append(_differing(path, _words(one), _words(other)))
            continue
        differing += _keys(path, one, other)
        theirs = dict(other.pairs())
        for part, item in one.pairs():
            match = theirs.pop(part, None)
            if isinstance(item, Branch) and isinstance(match, Branch):
                waiting.append(((*path, part), item, match))
            elif match is None and _is_other(item, names_there):
                differing.append(_differing((*path, part), _words(item), None))
        for part, item in theirs.items():
            if _is_other(item, names_here):
                differing.append(_differing((*path, part), None, _words(item)))
    return count, differing


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


def _differing(path: Path, a: str | None, b: str | None) -> EntryDiff:
    return EntryDiff(names.join(path), "container", a, b)


def _is_other(item: str | Branch[str] | None, names_there: frozenset[str]) -> bool:
    """Whether what has no counterpart is a difference that no name tells."""
    if not isinstance(item, Branch):
        return item is not None and item in names_there
    held = list(item.leaves())
    return not held or any(fqn in names_there for fqn in held)


def _keys(path: Path, one: Branch[str], other: Branch[str]) -> Iterator[EntryDiff]:
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
        yield _differing(path, a, b)


def _kind(branch: Branch[str]) -> str:
    return "dict" if branch.keys is not None else branch.kind


def _words(item: str | Branch[str] | None) -> str:
    if not isinstance(item, Branch):
        return "an item"
    return f"{item.kind} of {len(item.items)}" if item.items else f"empty {item.kind}"
