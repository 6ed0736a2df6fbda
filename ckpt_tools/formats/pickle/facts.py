"""What is inside of a value, found in one walk: tensors, dicts, and whether all of it is plain."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.pickle.limits import MAX_PLAIN
from ckpt_tools.formats.pickle.nodes import ATOMS, Opaque, is_key, type_name
from ckpt_tools.formats.pickle.stored import Stored


class Facts(NamedTuple):
    """What is inside of a value.

    ``tensors``: one, or what stands for one that is not read. ``dicts``: a dict in a list, or in
    lists in it. ``odd`` is the class of the first thing that is not plain, or of a container of too
    many, and None when all is plain; ``flaw`` says why that cannot be used. ``parts`` counts each
    as often as it is met.
    """

    tensors: bool = False
    dicts: bool = False
    odd: str | None = None
    flaw: CheckpointError | None = None
    parts: int = 1


def facts_of(value: object, known: dict[int, Facts]) -> Facts:
    """The facts of a settled value; ``known`` are those of what holds others, by its id."""
    if type(value) in ATOMS:
        return _of_atoms(0)
    if isinstance(value, list | tuple) and len(value) <= _SHORT and _are_atoms(value):
        return _of_atoms(len(value))
    if id(value) not in known:
        known[id(value)] = _found(value, known)
    return known[id(value)]


def _found(value: object, known: dict[int, Facts]) -> Facts:
    if isinstance(value, Opaque):
        return Facts(tensors=value.is_tensor, odd=value.qualname, flaw=value.flaw)
    if isinstance(value, Stored):
        return Facts(tensors=True, odd=type_name(value))
    if not isinstance(value, dict | list | tuple | set | frozenset):
        return _of_atoms(0)
    is_odd = len(value) > MAX_PLAIN or (isinstance(value, dict) and not all(map(is_key, value)))
    odd = type_name(value) if is_odd else None
    items = value.values() if isinstance(value, dict) else value
    if _are_atoms(items):
        return Facts(odd=odd, parts=1 + len(value))
    tensors = dicts = False
    parts, flaw = 1, None
    for item in items:
        found = facts_of(item, known)
        tensors = tensors or found.tensors
        dicts = dicts or isinstance(item, dict) or (found.dicts and isinstance(item, list))
        parts += found.parts
        if odd is None:
            odd, flaw = found.odd, found.flaw
    return Facts(tensors, dicts, odd, flaw, parts)


_SHORT = 64


def _are_atoms(values: Iterable[object]) -> bool:
    return ATOMS.issuperset(map(type, values))


@cache
def _of_atoms(count: int) -> Facts:
    """Of a container of so many; of a million that are alike it is one."""
    return Facts(parts=1 + count)
