"""Optimizer states that are numbered, under the names of their parameters.

`optimizer.state_dict()` numbers its parameters, group after group, in the optimizer's own order,
which is not that of the model: frozen parameters have no number, and groups come one after another.
So names are taken from a list in that very order, or from groups that keep their names beside their
numbers, and never from a place in the model. This room knows the index, and no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

from ckpt_tools.core import names
from ckpt_tools.core.index import CheckpointIndex, Entry, TensorEntry
from ckpt_tools.core.optimizer_states import LIKE_PARAMETER
from ckpt_tools.core.state_tree import Branch, Path, Tree
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.transforms import optimizer
from ckpt_tools.transforms.optimizer import Optimizer, Param, ParamNames

Index = TypeVar("Index", bound=CheckpointIndex)


def parse_names(text: str, *, where: str) -> tuple[str, ...]:
    """The names of a list, one a line; empty lines and those that begin with # say nothing.

    Raises UsageError for a name that is there twice, and for a list without any.
    """
    lines = (line.strip() for line in text.splitlines())
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise UsageError(f"{where} has no names in it; one a line is expected.")
    if len(set(names)) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise UsageError(f"{where} names {twice} twice; a parameter has one number.")
    return tuple(names)


def names_in(index: CheckpointIndex) -> ParamNames:
    """The parameters' names as another optimizer state of the same job lists them, in its order.

    The objects of the index must be opened. Raises UsageError when it lists none, or numbers too.
    """
    for tree in optimizers_of(index).values():
        if optimizer.shape_of(tree) == "flattened":
            continue
        groups = optimizer.read(tree).held()
        listed = [
            tuple(p for p in group.params if isinstance(p, str)) or group.stored_names() or ()
            for group in groups
        ]
        if any(listed) and all(
            len(group.params) == len(own) for group, own in zip(groups, listed, strict=True)
        ):
            ordered = tuple(name for own in listed for name in own)
            return ParamNames(ordered, tuple(map(len, listed)))
    raise UsageError(
        f"{index.root} lists no parameter names in an optimizer's param_groups.",
        hint="--param-names takes a text file, one name a line, or a checkpoint with names.",
    )


def optimizers_of(index: CheckpointIndex) -> dict[Path, Branch[Entry]]:
    """The optimizers' state dicts in an index, by their paths."""
    above = names.containers_of(index)
    optim = (entry for entry in index.entries if entry.section == "optim")
    containers = dict.fromkeys(above[entry.fqn] for entry in optim)
    return dict(optimizer.find(index.entry_tree(), containers))


def numbered(index: CheckpointIndex) -> dict[Path, Branch[Entry]]:
    """The optimizers of this index whose states are numbered; its groups must be opened."""
    optimizers = optimizers_of(index)
    return {
        path: tree for path, tree in optimizers.items() if optimizer.shape_of(tree) == "numbered"
    }


def loadable(index: Index) -> Index:
    """The same index, its optimizers as they are loaded from a pickle; its groups must be opened.

    DCP makes texts of numbers, and has nothing for an empty dict. But no optimizer finds its
    parameter 0 under the key "0", and none loads a state dict without ``state``. Names stay.
    """
    for path, tree in optimizers_of(index).items():
        try:
            nested = optimizer.shape_of(tree) != "flattened"
            made = optimizer.written(optimizer.read(tree)) if nested else tree
        except UnsupportedError:  # a part of one, by the filters: it stays what it is
            continue
        if made != tree:
            index = index.arranged(_replaced(index.entry_tree(), path, made))
    return index


def with_names(index: CheckpointIndex, given: ParamNames) -> CheckpointIndex:
    """The same index with its numbered optimizer's state, and its groups' lists, under names.

    ``given`` has one name for each number, group after group. The objects of the index must be
    opened.

    Raises UsageError, with the first entry that has no match, when names and numbers are not
    equally many, when the model has no such parameter, or when groups or shapes differ.
    """
    optimizers = numbered(index)
    if not optimizers:
        raise UsageError(
            f"{index.root}: no optimizer state here is numbered, so it needs no names.",
            hint="Leave --param-names out.",
        )
    if len(optimizers) > 1:
        shown = " and ".join(map(names.join, optimizers))
        raise UsageError(
            f"{index.root} has several numbered optimizers, {shown}, and one list of names.",
            hint="Choose one with --include.",
        )
    ((path, tree),) = optimizers.items()
    optim = optimizer.read(tree)
    stored = [group.stored_names() for group in optim.held()]
    listed = given.names or tuple(name for own in stored if own is not None for name in own)
    if not given.names and (not stored or None in stored):
        raise UsageError(
            f"{index.root}: its param_groups keep no names beside their numbers.",
            hint="Give --param-names a file: one name a line, in the optimizer's own order.",
        )
    names_of = _matched(optim, listed, where=index.root)
    _check_groups(optim, given, where=index.root)
    _check_shapes(index, optim, names_of)
    named = optimizer.written(optim.renamed(lambda param: names_of.get(param, param)))
    return index.arranged(_replaced(index.entry_tree(), path, named))


def _replaced(tree: Tree[Entry], path: Path, new: Branch[Entry]) -> Branch[Entry]:
    """The tree with another container at this path."""
    if not path or not isinstance(tree, Branch):
        return new
    items = [_replaced(i, path[1:], new) if p == path[0] else i for p, i in tree.pairs()]
    return tree.holding(items)


def _matched(optim: Optimizer, given: Sequence[str], *, where: str) -> dict[Param, str]:
    """The name of each number; names the first of either that has no match."""
    states = [param for param in optim.states if isinstance(param, int)]
    numbers = optim.members() or sorted(states)
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
    names_of = dict(zip(numbers, given, strict=True))
    stateless = sorted(set(states) - names_of.keys())
    if stateless:
        raise UsageError(f"{where}: number {stateless[0]} has state, but is in no group.")
    return names_of


def _check_groups(optim: Optimizer, given: ParamNames, *, where: str) -> None:
    """Refuse names of another optimizer's groups: their order is then another one."""
    sizes = tuple(len(group.params) for group in optim.held())
    if not given.groups or sizes == given.groups:
        return
    pairs = zip_longest(sizes, given.groups)
    place = next(number for number, (own, other) in enumerate(pairs) if own != other)
    raise UsageError(
        f"{where}: the optimizer's groups have {list(sizes)} parameters, and those that the names "
        f"come from {list(given.groups)}; group {place} is the first that differs.",
        hint="Names of other groups are in another order. Give a list in this optimizer's own.",
    )


def _check_shapes(index: CheckpointIndex, optim: Optimizer, names_of: Mapping[Param, str]) -> None:
    """Hold each name to the model of the same checkpoint, where that has one."""
    containers = names.containers_of(index)
    shapes = {
        names.clean(names.join(entry.path[len(containers[entry.fqn]) :])): entry.shape
        for entry in index.tensors
        if entry.section == "model"
    }
    if not shapes:
        return
    for param, name in names_of.items():
        if names.clean(name) not in shapes:
            raise UsageError(
                f"{index.root}: number {param} would be {name}, and the model of this checkpoint "
                "has no such parameter.",
                hint="`ckpt-tools ls --only model` lists what it has.",
            )
        state = optim.states.get(param)
        for key, entry in state.pairs() if isinstance(state, Branch) else ():
            shape = shapes[names.clean(name)]
            if key not in LIKE_PARAMETER or not isinstance(entry, TensorEntry):
                continue
            # Its own shape, or a number for each row (Nero); one number (Amos), or none yet (SARA).
            fits = entry.shape in ((), (0,)) or (
                len(entry.shape) == len(shape)
                and all(size in (1, whole) for size, whole in zip(entry.shape, shape, strict=True))
            )
            if not fits:
                raise UsageError(
                    f"{entry.fqn} has shape {list(entry.shape)}, and {name}, whose it would be, "
                    f"has {list(shape)}.",
                    hint="The names are not in the order of the optimizer's own groups.",
                )
