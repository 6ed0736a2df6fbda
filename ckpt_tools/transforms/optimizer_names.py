"""Optimizer states that are numbered, under the names of their parameters.

`optimizer.state_dict()` numbers its parameters, group after group, in the optimizer's own order,
which is not that of the model: frozen parameters have no number, and groups come one after another.
So names are taken from a list in that very order, or from groups that keep their names beside their
numbers, and never from a place in the model. This room knows entries, and no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.index import (
    CheckpointIndex,
    ObjectEntry,
    Path,
    PlainValue,
    TensorEntry,
)
from ckpt_tools.errors import UnsupportedError, UsageError

_STATE, _GROUPS = "state", "param_groups"
# State that has the parameter's own shape, in every optimizer of torch that has it.
_ALIKE = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "sum"}
)


class ParamNames(NamedTuple):
    """Parameters' names in an optimizer's own order; none means those that its groups store.

    ``groups`` are the sizes of the groups, where they are known: then they must fit, too.
    """

    names: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()


@dataclass(slots=True)
class Numbered:
    """One optimizer with numbers: where it stands, and its groups' lists of numbers and names."""

    prefix: Path
    states: set[int] = field(default_factory=set)
    params: dict[int, tuple[int, ...]] = field(default_factory=dict)
    stored: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def numbers(self) -> list[int]:
        """All numbers, group after group."""
        if not self.params:
            return sorted(self.states)
        return [number for group in sorted(self.params) for number in self.params[group]]

    def stored_names(self) -> list[str] | None:
        """The names that the groups keep beside their numbers, in the same order, or None."""
        if not self.params or self.params.keys() != self.stored.keys():
            return None
        return [name for group in sorted(self.stored) for name in self.stored[group]]


def parse_names(text: str, *, where: str) -> tuple[str, ...]:
    """The names of a list, one a line; empty lines and those that begin with # say nothing.

    Raises UsageError for a name that is there twice, and for a list without any.
    """
    lines = (line.strip() for line in text.splitlines())
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:
        raise UsageError(f"{where} has no names in it; one a line is expected.")
    if len(set(found)) < len(found):
        twice = next(name for place, name in enumerate(found) if name in found[:place])
        raise UsageError(f"{where} names {twice} twice; a parameter has one number.")
    return tuple(found)


def names_in(index: CheckpointIndex) -> ParamNames:
    """The parameters' names as another optimizer state of the same job lists them, in its order.

    The objects of the index must be opened. Raises UsageError when it lists none, or numbers too.
    """
    groups: dict[int, tuple[str, ...]] = {}
    for entry in index.objects:
        place = _group_of(entry.path)
        if place is None or entry.path[-1] not in ("params", "param_names"):
            continue
        listed = _texts(entry.value)
        if listed is not None:
            groups[place[1]] = listed
    if not groups:
        raise UsageError(
            f"{index.root} lists no parameter names in an optimizer's param_groups.",
            hint="--param-names takes a text file, one name a line, or a checkpoint with names.",
        )
    ordered = [groups[group] for group in sorted(groups)]
    return ParamNames(tuple(name for group in ordered for name in group), tuple(map(len, ordered)))


def numbered(index: CheckpointIndex) -> list[Numbered]:
    """The optimizers of this index whose states are numbered; its objects must be opened."""
    found: dict[Path, Numbered] = {}
    for tensor in index.tensors:
        place = _state_of(tensor.path)
        if place is not None:
            found.setdefault(place[0], Numbered(place[0])).states.add(place[1])
    for entry in index.objects:
        group = _group_of(entry.path)
        if group is None:
            continue
        ours = found.get(group[0])
        numbers, texts = _numbers(entry.value), _texts(entry.value)
        if ours is not None and entry.path[-1] == "params" and numbers is not None:
            ours.params[group[1]] = numbers
        if ours is not None and entry.path[-1] == "param_names" and texts is not None:
            ours.stored[group[1]] = texts
    return [found[prefix] for prefix in sorted(found, key=str)]


def with_names(index: CheckpointIndex, given: ParamNames) -> CheckpointIndex:
    """The same index with its numbered optimizer's state, and its groups' lists, under names.

    ``given`` has one name for each number, group after group. The objects of the index must be
    opened.

    Raises UsageError, with the first entry that has no match, when names and numbers are not
    equally many, when the model has no such parameter, or when groups or shapes differ.
    """
    ours = _only_one(index)
    listed = list(given.names) if given.names else ours.stored_names()
    if listed is None:
        raise UsageError(
            f"{index.root}: its param_groups keep no names beside their numbers.",
            hint="Give --param-names a file: one name a line, in the optimizer's own order.",
        )
    found = _matched(ours, listed, where=index.root)
    _check_groups(ours, given, where=index.root)
    _check_shapes(index, ours, found)
    tensors = [_renamed_tensor(entry, ours, found) for entry in index.tensors]
    objects = [_renamed_object(entry, ours, found) for entry in index.objects]
    return replace(
        index,
        tensors=tuple(sorted(tensors, key=lambda entry: entry.fqn)),
        objects=tuple(sorted(objects, key=lambda entry: entry.fqn)),
    )


def _only_one(index: CheckpointIndex) -> Numbered:
    found = numbered(index)
    if not found:
        raise UsageError(
            f"{index.root}: no optimizer state here is numbered, so it needs no names.",
            hint="Leave --param-names out.",
        )
    if len(found) > 1:
        shown = " and ".join(names.join(one.prefix) for one in found)
        raise UsageError(
            f"{index.root} has several numbered optimizers, {shown}, and one list of names.",
            hint="Choose one with --include.",
        )
    return found[0]


def _matched(ours: Numbered, given: Sequence[str], *, where: str) -> dict[int, str]:
    """The name of each number; names the first of either that has no match."""
    numbers = ours.numbers()
    if len(numbers) > len(given):
        raise UsageError(
            f"{where}: the optimizer numbers {len(numbers)} parameters and {len(given)} names were "
            f"given; number {numbers[len(given)]} is the first without a name."
        )
    if len(given) > len(numbers):
        raise UsageError(
            f"{where}: {len(given)} names were given and the optimizer numbers {len(numbers)} "
            f"parameters; {given[len(numbers)]} is the first name without a number.",
            hint="Parameters that are frozen, or not the optimizer's, have no number.",
        )
    found = dict(zip(numbers, given, strict=True))
    stateless = sorted(ours.states - found.keys())
    if stateless:
        raise UsageError(f"{where}: number {stateless[0]} has state, but is in no group.")
    return found


def _check_groups(ours: Numbered, given: ParamNames, *, where: str) -> None:
    """Refuse names of another optimizer's groups: their order is then another one."""
    sizes = tuple(len(ours.params[group]) for group in sorted(ours.params))
    if not given.groups or sizes == given.groups:
        return
    place = next(
        (n for n, pair in enumerate(zip(sizes, given.groups, strict=False)) if pair[0] != pair[1]),
        min(len(sizes), len(given.groups)),
    )
    raise UsageError(
        f"{where}: the optimizer's groups have {list(sizes)} parameters, and those that the names "
        f"come from {list(given.groups)}; group {place} is the first that differs.",
        hint="Names of other groups are in another order. Give a list in this optimizer's own.",
    )


def _check_shapes(index: CheckpointIndex, ours: Numbered, found: Mapping[int, str]) -> None:
    """Hold each name to the model of the same checkpoint, where that has one."""
    shapes = parameter_shapes(index)
    if not shapes:
        return
    for number in sorted(found):
        if names.clean(found[number]) not in shapes:
            raise UsageError(
                f"{index.root}: number {number} would be {found[number]}, and the model of this "
                "checkpoint has no such parameter.",
                hint="`ckpt-tools ls --only model` lists what it has.",
            )
    for entry in index.tensors:
        place = _state_of(entry.path)
        if place is None or place[0] != ours.prefix or entry.path[-1] not in _ALIKE:
            continue
        shape = shapes[names.clean(found[place[1]])]
        if entry.shape != shape:
            raise UsageError(
                f"{entry.fqn} has shape {list(entry.shape)}, and {found[place[1]]}, whose it would "
                f"be, has {list(shape)}.",
                hint="The names are not in the order of the optimizer's own groups.",
            )


def parameter_shapes(index: CheckpointIndex) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's tensors by their names inside the model, without wrapper components."""
    paths = [entry.path for entry in index.tensors] + [entry.path for entry in index.objects]
    kinds = names.classify(paths, objects={entry.path for entry in index.objects})
    prefixes = dict(zip(paths, kinds, strict=True))
    return {
        names.clean(names.join(entry.path[len(prefixes[entry.path][1]) :])): entry.shape
        for entry in index.tensors
        if entry.section == "model"
    }


def _renamed_tensor(entry: TensorEntry, ours: Numbered, found: Mapping[int, str]) -> TensorEntry:
    place = _state_of(entry.path)
    if place is None or place[0] != ours.prefix:
        return entry
    path = _named(entry.path, len(ours.prefix) + 1, found)
    return replace(entry, fqn=names.join(path), path=path)


def _renamed_object(entry: ObjectEntry, ours: Numbered, found: Mapping[int, str]) -> ObjectEntry:
    """An object under a number, or a group's list of numbers; all others as they are."""
    place = _state_of(entry.path)
    if place is not None and place[0] == ours.prefix:
        path = _named(entry.path, len(ours.prefix) + 1, found)
        return replace(entry, fqn=names.join(path), path=path)
    group = _group_of(entry.path)
    if group is None or group[0] != ours.prefix or entry.path[-1] != "params":
        return entry
    numbers = _numbers(entry.value)
    if numbers is None:
        raise UnsupportedError(f"{entry.fqn}: its list of parameters is no list of numbers.")
    return replace(entry, value=[found[number] for number in numbers], opened=True, codec=None)


def _named(path: Path, depth: int, found: Mapping[int, str]) -> Path:
    return (*path[:depth], found[int(path[depth])], *path[depth + 1 :])


def _state_of(path: Path) -> tuple[Path, int] | None:
    """The optimizer and the number that a state entry is of."""
    for depth, part in enumerate(path[:-2]):
        if part == _STATE and str(path[depth + 1]).isdecimal():
            return path[:depth], int(path[depth + 1])
    return None


def _group_of(path: Path) -> tuple[Path, int] | None:
    """The optimizer and the place of the group that an option is of."""
    for depth, part in enumerate(path[:-2]):
        if part == _GROUPS and str(path[depth + 1]).isdecimal():
            return path[:depth], int(path[depth + 1])
    return None


def _numbers(value: PlainValue) -> tuple[int, ...] | None:
    found = _items(value)
    numbers = tuple(one for one in found if isinstance(one, int))
    return numbers if isinstance(value, list | tuple) and len(numbers) == len(found) else None


def _texts(value: PlainValue) -> tuple[str, ...] | None:
    found = _items(value)
    texts = tuple(one for one in found if isinstance(one, str))
    return texts if isinstance(value, list | tuple) and len(texts) == len(found) else None


def _items(value: PlainValue) -> list[PlainValue]:
    return list(value) if isinstance(value, list | tuple) else []
