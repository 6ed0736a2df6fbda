"""An optimizer's state dict in its three shapes: nested by name, flattened, and numbered.

    nested      state / <name> / exp_avg              param_groups / 0 / lr, params = [<name>, …]
    flattened   state.<name>.exp_avg                  param_groups.<name>.lr
    numbered    state / 0 / exp_avg                   param_groups / 0 / lr, params = [0, …]

Nested is what `get_optimizer_state_dict` gives and `FSDP.optim_state_dict` too, flattened what it
gives with ``flatten_optimizer_state_dict``, numbered what an optimizer itself gives. This room
turns paths and group lists; tensors stay what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.core import names
from ckpt_tools.core.index import ObjectEntry, Path, PlainValue, TensorEntry
from ckpt_tools.errors import UnsupportedError, UsageError

Entry = TensorEntry | ObjectEntry
Pair = tuple[Entry, Path]

_STATE, _GROUPS = "state", "param_groups"
_LISTS = ("params", "param_names")


def split(path: Path) -> tuple[Path, Path]:
    """What stands above an optimizer's own ``state`` or ``param_groups``, and the rest."""
    for depth, part in enumerate(path):
        if str(part).split(".")[0] in (_STATE, _GROUPS):
            return path[:depth], path[depth:]
    return (), path


def nested(pairs: Sequence[Pair]) -> list[Pair]:
    """The same state by name, with groups; wrapper components go from the names.

    Flattened groups become one for each set of equal hyper-parameters. Raises UsageError when the
    states are numbered, for which only `optim_names` has names.
    """
    if not pairs or not _is_flattened(pairs):
        return [_renamed(pair) for pair in _refuse_numbers(pairs)]
    states = [(entry, (_STATE, *_cut(path))) for entry, path in pairs if _is_state(path)]
    return [*states, *_regrouped(pairs)]


def flattened(pairs: Sequence[Pair]) -> list[Pair]:
    """The same state, flattened: each option of a group once for each of its parameters.

    Raises UsageError when the states are numbered, UnsupportedError when a group does not list its
    parameters.
    """
    if not pairs or _is_flattened(pairs):
        return list(pairs)
    by_name = nested(pairs)
    members = _members(by_name)
    found: list[Pair] = []
    for entry, path in by_name:
        if path[0] == _STATE:
            found.append((entry, (".".join(map(str, path)),)))
        elif path[-1] not in _LISTS:
            found += [
                (entry, (f"{_GROUPS}.{name}.{names.join(path[2:])}",)) for name in members[path[1]]
            ]
    return found


def numbered(pairs: Sequence[Pair], order: Sequence[str] | None) -> list[Pair]:
    """The same state, numbered in the loading optimizer's own order.

    Raises UsageError when the states are named and no order is given, or it misses one of them.
    """
    if not pairs or _has_numbers(pairs):
        return list(pairs)
    if order is None:
        raise UsageError(
            "This optimizer's state is by name, and the loader counts parameters in the order of "
            "its own optimizer, which no checkpoint tells.",
            hint="Give that order by --param-names FILE, one name a line; or --only model.",
        )
    numbers = {name: number for number, name in enumerate(order)}
    found: list[Pair] = []
    for entry, path in nested(pairs):
        if path[0] == _STATE:
            found.append((entry, (_STATE, _number(str(path[1]), numbers), *path[2:])))
        elif path[-1] == "params" and isinstance(entry, ObjectEntry):
            listed: list[PlainValue] = [_number(name, numbers) for name in _names_of(entry)]
            found.append((replace(entry, value=listed, opened=True, codec=None), path))
        else:
            found.append((entry, path))
    return found


def _number(name: str, numbers: dict[str, int]) -> int:
    if name not in numbers:
        raise UsageError(f"{name} has optimizer state, and --param-names does not list it.")
    return numbers[name]


def _is_flattened(pairs: Sequence[Pair]) -> bool:
    return any(len(path) == 1 for _, path in pairs)


def _is_state(path: Path) -> bool:
    return str(path[0]).startswith(f"{_STATE}.") or path[0] == _STATE


def _has_numbers(pairs: Sequence[Pair]) -> bool:
    return any(
        path[0] == _STATE and len(path) > 2 and str(path[1]).isdecimal() for _, path in pairs
    )


def _refuse_numbers(pairs: Sequence[Pair]) -> Sequence[Pair]:
    if _has_numbers(pairs):
        first = next(e for e, path in pairs if path[0] == _STATE and str(path[1]).isdecimal())
        raise UsageError(
            f"{first.fqn}: this optimizer's state is numbered, and here it must be by name.",
            hint="--param-names FILE names them: one name a line, in the optimizer's own order.",
        )
    return pairs


def _renamed(pair: Pair) -> Pair:
    """A nested entry with its parameter's name as torch's state dict calls have it."""
    entry, path = pair
    if path[0] == _STATE and len(path) > 2:
        return entry, (_STATE, _bare(str(path[1])), *path[2:])
    if path[-1] in _LISTS and isinstance(entry, ObjectEntry):
        listed = _names_of(entry)
        if any(name != _bare(name) for name in listed):
            value: list[PlainValue] = [_bare(name) for name in listed]
            return replace(entry, value=value, opened=True, codec=None), path
    return pair


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in names.WRAPPERS)


def _cut(path: Path) -> tuple[str, str]:
    """The parameter and the key of a flattened name: the key is what follows the last dot."""
    _, _, rest = str(path[0]).partition(".")
    name, _, key = rest.rpartition(".")
    return name, key


def _regrouped(pairs: Sequence[Pair]) -> list[Pair]:
    """Groups made anew: parameters with equal hyper-parameters are one group."""
    options: dict[str, dict[str, ObjectEntry]] = {}
    for entry, path in pairs:
        if not _is_state(path) and isinstance(entry, ObjectEntry):
            name, key = _cut(path)
            options.setdefault(name, {})[key] = entry
    groups: dict[str, list[str]] = {}
    for name, entries in options.items():
        groups.setdefault(_told(entries), []).append(name)
    found: list[Pair] = []
    for number, members in enumerate(groups.values()):
        entries = options[members[0]]
        found += [(entry, (_GROUPS, number, key)) for key, entry in entries.items()]
        any_entry = next(iter(entries.values()))
        listed = replace(
            any_entry, fqn="params", value=list(members), opened=True, codec=None, type_name=None
        )
        found.append((listed, (_GROUPS, number, "params")))
    return found


def _told(entries: dict[str, ObjectEntry]) -> str:
    """A group's hyper-parameters in words, equal when they are."""
    for entry in entries.values():
        if not entry.opened:
            raise UnsupportedError(
                f"{entry.fqn}: a hyper-parameter of type {entry.type_name} cannot be compared, so "
                "its group cannot be told.",
                hint="Leave --layout out: the optimizer then stays flattened.",
            )
    return repr(sorted((key, repr(entry.value)) for key, entry in entries.items()))


def _members(pairs: Sequence[Pair]) -> dict[str | int, list[str]]:
    """The parameters of each group."""
    found: dict[str | int, list[str]] = {}
    groups = {path[1] for _, path in pairs if path[0] == _GROUPS}
    for entry, path in pairs:
        if path[0] == _GROUPS and path[-1] == "params" and isinstance(entry, ObjectEntry):
            found[path[1]] = _names_of(entry)
    for group in groups - found.keys():
        raise UnsupportedError(f"Group {group} of the optimizer does not list its parameters.")
    return found


def _names_of(entry: ObjectEntry) -> list[str]:
    value = entry.value
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise UnsupportedError(f"{entry.fqn}: a list of parameter names is expected here.")
    return [str(one) for one in value]
