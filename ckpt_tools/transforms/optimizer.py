"""An optimizer's state dict in its three shapes, a tree each.

    nested     {"state": {"w": {"exp_avg": t}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    flattened  {"state.w.exp_avg": t, "param_groups.w.lr": 0.1}
    numbered   {"state": {0: {"exp_avg": t}}, "param_groups": [{"lr": 0.1, "params": [0]}]}

Nested is what `get_optimizer_state_dict` gives and `FSDP.optim_state_dict` too, flattened what it
gives with ``flatten_optimizer_state_dict``, numbered what an optimizer itself gives. Each is read
into states and groups of parameters, and written from these. Keys beside these stay.

This room turns trees of entries and opens no file. Hyper-parameters whose values no index holds
(tensors) are compared by the caller's ``digest``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from operator import itemgetter
from typing import Literal, NamedTuple, TypeGuard, cast

from ckpt_tools.core import names
from ckpt_tools.core.index import ByteRange, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.plain_values import PlainValue
from ckpt_tools.core.state_tree import Branch, Key, Path, Tree, list_of, of_paths
from ckpt_tools.errors import UnsupportedError, UsageError

Shape = Literal["nested", "flattened", "numbered"]
# Equal for two entries exactly when their bytes are.
Digest = Callable[[Entry], str]
# A parameter's name, or its number.
Param = str | int

_STATE, _GROUPS, _PARAMS, _PARAM_NAMES = "state", "param_groups", "params", "param_names"


class ParamNames(NamedTuple):
    """Parameters' names in an optimizer's own order; none means those that its groups store.

    ``groups`` are the sizes of the groups, where they are known: then they must fit, too.
    """

    names: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()


class _ParamGroup(NamedTuple):
    """One parameter group: its dict, and the parameters that this lists."""

    tree: Branch[Entry]
    params: tuple[Param, ...]

    def options(self) -> Branch[Entry]:
        """The hyper-parameters."""
        return _dict({key: item for key, item in _items(self.tree) if key != _PARAMS})

    def stored_names(self) -> tuple[str, ...] | None:
        """The names that the group keeps beside its parameters, in their order."""
        entry = self.tree.get(_PARAM_NAMES)
        value = entry.value if isinstance(entry, ObjectEntry) else None
        texts = tuple(one for one in value or () if isinstance(one, str)) if _is_list(value) else ()
        return texts if len(texts) == len(self.params) else None

    def listing(
        self, params: Sequence[Param], stored: Mapping[Param, str] | None = None
    ) -> _ParamGroup:
        """The same group for other parameters; ``stored`` has names to keep beside them."""
        if tuple(params) == self.params:
            return self
        items = dict(_items(self.tree)) | {_PARAMS: _held_in(_PARAMS, list(params))}
        if stored and _PARAM_NAMES in items:
            items[_PARAM_NAMES] = _held_in(_PARAM_NAMES, [stored.get(p, str(p)) for p in params])
        return _ParamGroup(_dict(items), tuple(params))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What a state dict holds: the state of each parameter, the groups, and keys beside these.

    A group is None where the list has a place for one that was left out; ``groups`` is None where
    there is not a list of groups at all.
    """

    states: Mapping[Param, Tree[Entry]]
    groups: tuple[_ParamGroup | None, ...] | None
    beside: Mapping[Key, Tree[Entry]] = field(default_factory=dict)

    def held(self) -> list[_ParamGroup]:
        """The groups that are there."""
        return [group for group in self.groups or () if group is not None]

    def members(self) -> list[Param]:
        """All parameters, group after group. Raises UnsupportedError for one listed twice."""
        counts = Counter(param for group in self.held() for param in group.params)
        for param, times in counts.items():
            if times > 1:
                raise UnsupportedError(f"The optimizer's groups list parameter {param} twice.")
        return list(counts)

    def is_numbered(self) -> bool:
        """Whether parameters are numbered; state before any group may tell it, too."""
        return any(type(param) is int for param in self.members() or self.states)

    def renamed(self, change: Callable[[Param], Param]) -> Optimizer:
        """The same with other names or numbers. Raises UsageError for two that become one."""
        changed = {param: change(param) for param in (*self.members(), *self.states)}
        for name, times in Counter(changed.values()).items():
            if times > 1:
                shown = " and ".join(str(old) for old, new in changed.items() if new == name)
                raise UsageError(
                    f"Parameters {shown} of the optimizer would both be called {name}.",
                    hint="Leave one of them out with --exclude.",
                )
        groups = self.groups and tuple(
            group and group.listing([changed[param] for param in group.params])
            for group in self.groups
        )
        states = {changed[param]: state for param, state in self.states.items()}
        return replace(self, states=states, groups=groups)


def find(tree: Branch[Entry], containers: Iterable[Path]) -> list[tuple[Path, Branch[Entry]]]:
    """The optimizers' state dicts in these containers with their paths, the outermost only."""
    optimizers: list[tuple[Path, Branch[Entry]]] = []
    waiting = [(path, tree.get(*path)) for path in containers]
    for path, branch in waiting:  # which grows as it goes
        if not isinstance(branch, Branch):
            continue
        if branch.keys is not None and any(map(_is_own, branch.parts())):
            optimizers.append((path, branch))
        else:
            waiting += [((*path, part), item) for part, item in branch.pairs()]
    return optimizers


def _is_own(part: str | int) -> bool:
    return str(part).split(".")[0] in (_STATE, _GROUPS)


def shape_of(tree: Branch[Entry]) -> Shape:
    """Which of the three shapes a state dict has. Raises UnsupportedError for a mixture."""
    own = set(filter(_is_own, map(str, tree.parts())))
    whole = own & {_STATE, _GROUPS}
    if own != whole and whole:
        raise UnsupportedError(
            f"The optimizer's state dict has both {min(whole)} and {min(own - whole)}: nested and "
            "flattened at once."
        )
    if not whole:
        return "flattened"
    return "numbered" if read(tree).is_numbered() else "nested"


def nested(tree: Branch[Entry], *, digest: Digest) -> Branch[Entry]:
    """The same state by name, with groups; wrapper components go from the names.

    Flattened groups become one for each set of equal hyper-parameters. Raises UsageError when the
    states are numbered, for which only `with_names` has names, and UnsupportedError for what no
    optimizer's state dict looks like.
    """
    return written(_by_name(tree, digest))


def flattened(tree: Branch[Entry]) -> Branch[Entry]:
    """The same state, flattened: each option of a group once for each of its parameters.

    Dicts in the state are cut key by key and options are taken as they are, as torch's own
    `_flatten_optim_state_dict` does it. Raises UsageError when the states are numbered,
    UnsupportedError for state that torch does not flatten (lists, strings, None) or that is of a
    parameter in no group.
    """
    if shape_of(tree) == "flattened":
        return tree
    optim = _named(read(tree), tree)
    members = set(optim.members())
    stray = next((param for param in optim.states if param not in members), None)
    if optim.groups is not None and stray is not None:
        raise UnsupportedError(f"{stray} has optimizer state, and is in no group.")
    placed: list[tuple[Key, Tree[Entry]]] = [
        (f"{_STATE}.{names.join((str(param), *path))}", entry)
        for param, state in optim.states.items()
        for path, entry in _flat_state(state)
    ]
    placed += [
        (f"{_GROUPS}.{param}.{key}", option)
        for group in optim.held()
        for param in group.params
        for key, option in group.options().pairs()
    ]
    placed += optim.beside.items()
    for key, times in Counter(key for key, _ in placed).items():
        if times > 1:
            raise UnsupportedError(f"Two entries of the optimizer would both be called {key}.")
    return _dict(dict(placed))


def numbered(tree: Branch[Entry], order: ParamNames | None, *, digest: Digest) -> Branch[Entry]:
    """The same state, numbered in the loading optimizer's own order.

    `Optimizer.load_state_dict` pairs parameters by their places in the groups, whatever their
    numbers are, so groups and what they list are put into that order. Raises UsageError when the
    states are named and no order is given, when names and parameters are not the same, or when
    groups cannot be put into that order.
    """
    if shape_of(tree) == "numbered":
        return written(read(tree))
    optim = _by_name(tree, digest)
    if order is None and (optim.states or optim.members()):
        raise UsageError(
            "This optimizer's state is by name, and the loader counts parameters in the order of "
            "its own optimizer, which no checkpoint stores.",
            hint="Give that order by --param-names FILE, one name a line; or --only model.",
        )
    order = order or ParamNames()
    members, listed = set(optim.members()), set(order.names)
    unknown = next((p for p in (*optim.states, *optim.members()) if p not in listed), None)
    if unknown is not None:
        raise UsageError(f"{unknown} has optimizer state, and --param-names does not list it.")
    absent = next((name for name in order.names if name not in members), None)
    if optim.groups is not None and absent is not None:
        raise UsageError(f"--param-names lists {absent}, which is in no group of the optimizer.")
    if optim.groups is not None:
        optim = replace(optim, groups=_in_order(optim.held(), order, digest))
    numbers = {name: number for number, name in enumerate(order.names)}
    return written(optim.renamed(lambda param: numbers[str(param)]))


def _in_order(
    held: Sequence[_ParamGroup], order: ParamNames, digest: Digest
) -> tuple[_ParamGroup, ...]:
    """Groups as the loading optimizer has them, of its own sizes where these are known."""
    owners = {param: group for group in held for param in group.params}
    stored = {
        param: name
        for group in held
        for param, name in zip(group.params, group.stored_names() or (), strict=False)
    }
    groups = []
    for params in _split(held, order):
        empty = next((group for group in held if not group.params), held[0])
        own = {id(owners[param]): owners[param] for param in params} or {0: empty}
        first, *others = own.values()
        value = _value_of(first.options(), digest) if others else None
        if any(_value_of(other.options(), digest) != value for other in others):
            raise _out_of_order(params)
        groups.append(first.listing(params, stored))
    for param, name in zip((p for group in groups for p in group.params), order.names, strict=True):
        if param != name:
            raise _out_of_order((name, str(param)))
    return tuple(groups)


def _split(held: Sequence[_ParamGroup], order: ParamNames) -> Iterator[Sequence[str]]:
    """The names that each group of the loading optimizer has."""
    if order.groups:
        rest = iter(order.names)
        yield from (tuple(islice(rest, size)) for size in order.groups)
        return
    numbers = {name: number for number, name in enumerate(order.names)}
    first, placed = 0, []
    for group in held:  # an empty group stays behind the one before it
        params = sorted(map(str, group.params), key=numbers.__getitem__)
        first = numbers[params[0]] if params else first
        placed.append((first, params))
    yield from (params for _, params in sorted(placed, key=itemgetter(0)))


def _out_of_order(params: Sequence[str]) -> UsageError:
    return UsageError(
        f"The order of --param-names would put {' and '.join(params[:2])} into one group of the "
        "optimizer, or a group into pieces, and their hyper-parameters are in other groups here.",
        hint="The list goes group after group, as the loading optimizer has them.",
    )


def read(tree: Branch[Entry]) -> Optimizer:
    """What a nested or numbered state dict holds. Numbers are ints, whatever their keys were.

    Raises UnsupportedError for what is no state dict of an optimizer, and for a group that does not
    list its parameters.
    """
    items = dict(zip(map(str, tree.parts()), _items(tree), strict=True))
    _, state = items.pop(_STATE, (None, None))
    _, groups = items.pop(_GROUPS, (None, None))
    if state is None or (isinstance(state, ObjectEntry) and state.opened and state.value == {}):
        state = _dict({})
    if not isinstance(state, Branch) or state.keys is None:
        raise UnsupportedError("The optimizer's state is not a dict, so it is of no parameter.")
    held = None if groups is None else _groups_of(groups)
    optim = Optimizer(dict(state.pairs()), held, dict(items.values()))
    listed = optim.members()
    texts = [param for param in listed if isinstance(param, str)]
    if texts and len(texts) < len(listed):
        raise UnsupportedError(
            f"The optimizer's groups list names and numbers at once: {texts[0]} is a name."
        )
    if texts or not all(param.isdecimal() for param in map(str, listed or optim.states)):
        return optim
    states = {int(k) if str(k).isdecimal() else k: item for k, item in optim.states.items()}
    return replace(optim, states=states)


def _groups_of(tree: Tree[Entry]) -> tuple[_ParamGroup | None, ...]:
    """The groups; a DCP directory of torch up to 2.3 has a list without tensors as one object."""
    if isinstance(tree, ObjectEntry) and tree.opened and _is_list(tree.value):
        tree = list_of(
            _dict({key: _held_in(key, item) for key, item in value.items()})
            if isinstance(value, Mapping)
            else _held_in("", value)
            for value in tree.value
        )
    if not isinstance(tree, Branch) or tree.keys is not None:
        raise UnsupportedError("The optimizer's param_groups are not a list of groups.")
    groups: list[_ParamGroup | None] = []
    for number, group in enumerate(tree.items):
        if group is None:
            groups.append(None)
            continue
        if not isinstance(group, Branch) or group.keys is None:
            raise UnsupportedError(f"Group {number} of the optimizer is not a dict.")
        entry = group.get(_PARAMS)
        value = entry.value if isinstance(entry, ObjectEntry) else None
        if not _is_list(value) or not all(type(one) in (str, int) for one in value):
            raise UnsupportedError(f"Group {number} of the optimizer does not list its parameters.")
        groups.append(_ParamGroup(group, tuple(cast("Sequence[Param]", value))))
    return tuple(groups)


def _by_name(tree: Branch[Entry], digest: Digest) -> Optimizer:
    """What a state dict of any shape holds, by the names of the parameters."""
    optim = _unflattened(tree, digest) if shape_of(tree) == "flattened" else read(tree)
    return _named(optim, tree)


def _named(optim: Optimizer, tree: Branch[Entry]) -> Optimizer:
    """An optimizer by the names that torch's state dict calls give parameters."""
    if optim.is_numbered():
        raise UsageError(
            f"{next(tree.leaves()).fqn}: this optimizer's state is numbered, and here it "
            "must be by name.",
            hint="--param-names FILE names them: one name a line, in the optimizer's own order.",
        )
    return optim.renamed(lambda param: names.unwrapped(str(param)))


def written(optim: Optimizer) -> Branch[Entry]:
    """A state dict with groups; ``state`` is there, if empty, where groups are."""
    items: dict[Key, Tree[Entry]] = {}
    if optim.states or optim.groups is not None:
        items[_STATE] = _dict(cast("Mapping[Key, Tree[Entry]]", optim.states))
    if optim.groups is not None:
        trees: list[Tree[Entry]] = [group and group.tree for group in optim.groups]
        items[_GROUPS] = list_of(trees) if trees else _held_in(_GROUPS, [])
    return _dict(items | dict(optim.beside))


def _unflattened(tree: Branch[Entry], digest: Digest) -> Optimizer:
    """What a flattened state dict holds.

    A parameter's name is what stands before the last dot of a group's key, and a state's key begins
    with the longest such name: ``state.a.b.left.factor`` is state of ``a.b`` where there is a
    ``param_groups.a.b.lr``, and its value is at ``left``, ``factor``.
    """
    options: dict[str, dict[Key, Tree[Entry]]] = {}
    states: list[tuple[str, Tree[Entry]]] = []
    beside: dict[Key, Tree[Entry]] = {}
    for key, item in _items(tree):
        top, _, rest = str(key).partition(".")
        if top == _GROUPS:
            name, _, option = rest.rpartition(".")
            options.setdefault(name, {})[option] = item
        elif top == _STATE:
            states.append((rest, item))
        else:
            beside[key] = item
    placed = [(_cut(rest, options), item) for rest, item in states]
    held = dict(of_paths(cast("list[tuple[Path, Entry]]", placed)).pairs())
    if not options:
        return Optimizer(held, None, beside)
    # A parameter without state has an empty dict, as torch has it: a strict loader asks for it.
    by_name: dict[Param, Tree[Entry]] = {name: held.get(name, _dict({})) for name in options}
    members: dict[Hashable, list[str]] = {}  # parameters with equal hyper-parameters are one group
    for name, own in options.items():
        members.setdefault(_value_of(_dict(own), digest), []).append(name)
    groups = (_ParamGroup(_dict(options[own[0]]), ()).listing(own) for own in members.values())
    return Optimizer(by_name, tuple(groups), beside)


def _cut(rest: str, options: Mapping[str, object]) -> Path:
    """The parameter and the keys of a flattened state; without any group, one key is the last."""
    parts = rest.split(".")
    if not options:
        return ".".join(parts[:-1]), parts[-1]
    lengths = range(len(parts) - 1, 0, -1)
    end = next((end for end in lengths if ".".join(parts[:end]) in options), None)
    if end is None:
        raise UnsupportedError(
            f"{_STATE}.{rest} is of a parameter that no group of the optimizer has.",
            hint="Leave it out with --exclude.",
        )
    for key, inner in pairwise(parts[end:]):
        if key.isdigit() and inner.isdigit():  # 0.9, say, of AggMo's momenta
            raise UnsupportedError(
                f"{_STATE}.{rest}: {key}.{inner} is a number, or the key {inner} inside of {key}; "
                "flattened, the two look the same.",
                hint="Save the optimizer without flatten_optimizer_state_dict, or export the model "
                "alone: --only model.",
            )
    return ".".join(parts[:end]), *parts[end:]


def _value_of(tree: Tree[Entry], digest: Digest) -> Hashable:
    """What two hyper-parameters have in common exactly when they are equal."""
    if isinstance(tree, TensorEntry):
        return "tensor", tree.dtype.name, tree.shape, digest(tree)
    if isinstance(tree, ObjectEntry) and tree.opened:
        return _plain(tree.value)
    if isinstance(tree, ObjectEntry):
        if not tree.data.length:
            raise UnsupportedError(
                f"{tree.fqn}: a hyper-parameter of type {tree.type_name} cannot be compared, so "
                "its group is not known.",
                hint="Leave --layout out: the optimizer then stays flattened.",
            )
        return "bytes", digest(tree)
    if not isinstance(tree, Branch):
        return None
    if tree.keys is None:
        return tree.kind, tuple(_value_of(item, digest) for item in tree.items)
    return "dict", frozenset((repr(key), _value_of(item, digest)) for key, item in _items(tree))


def _plain(value: PlainValue) -> Hashable:
    """A plain value, so that NaN is NaN, 1 is not 1.0, a list no tuple, and dicts have no order."""
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, AbstractSet):
        return "set", frozenset(map(_plain, value))
    if isinstance(value, Mapping):
        return "dict", frozenset((repr(key), _plain(item)) for key, item in value.items())
    return type(value), repr(value)


def _flat_state(state: Tree[Entry]) -> Iterator[tuple[Path, Entry]]:
    """The values of one parameter's state, all of them of the kinds that torch flattens."""
    held: Branch[Entry] = state if isinstance(state, Branch) else list_of([state])
    listed = [path for path, branch in held.branches() if branch.keys is None]
    for path, entry in held.walk():
        is_other = isinstance(entry, ObjectEntry) and type(entry.value) not in (bool, int, float)
        if is_other or any(path[: len(above)] == above for above in listed):
            raise UnsupportedError(
                f"{entry.fqn}: torch flattens state of tensors, numbers and dicts only, and this "
                "is another value, or in a list, or no parameter's.",
                hint="Choose a --layout that keeps the optimizer nested, or --only model.",
            )
        yield path, entry


def _dict(items: Mapping[Key, Tree[Entry]]) -> Branch[Entry]:
    return Branch("dict", tuple(items), tuple(items.values()))


def _items(tree: Branch[Entry]) -> Iterator[tuple[Key, Tree[Entry]]]:
    """The items of a dict with their keys as they are."""
    return zip(tree.keys or (), tree.items, strict=True)


def _is_list(value: object) -> TypeGuard[list[PlainValue] | tuple[PlainValue, ...]]:
    return isinstance(value, list | tuple)


def _held_in(key: Key, value: PlainValue) -> ObjectEntry:
    part = key if isinstance(key, int) else str(key)
    return ObjectEntry(str(part), (part,), "optim", ByteRange("", 0, 0), value=value, opened=True)
