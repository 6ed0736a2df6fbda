"""The name of an entry inside its section, independent of format, framework and wrappers.

The container (``app.model``) is taken off by path, wrapper components by whole component, so that
the same weights have the same names as a DCP directory, as rank files and as safetensors. Strings
only; nothing here reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.index import CheckpointIndex, Entry, Section
from ckpt_tools.core.optimizer_states import megatron_state
from ckpt_tools.errors import UnsupportedError

# What an optimizer's state dict puts above the parameters' names; Composer puts its class above,
# and a container that is not taken off is above, too.
_STATE = re.compile(r"((?:[^.]+\.)*?state\.)(.+)")


class Inside(NamedTuple):
    """A section, and a name inside it."""

    section: Section
    name: str


def canonical_names(
    index: CheckpointIndex, entries: Iterable[Entry] | None = None
) -> dict[str, Inside]:
    """The name inside its section of every entry, or of these, by fqn.

    Raises UnsupportedError when two of them have the same name in one section.
    """
    containers = names.containers_of(index)
    inside: dict[str, Inside] = {}
    first: dict[Inside, str] = {}
    for entry in index.entries if entries is None else entries:
        container = containers[entry.fqn]
        # One of another name tells the optimizers of a job apart (``opt_g``, ``opt_d``): it stays.
        known = bool(container) and names.is_container_name(container[-1])
        name = names.join(entry.path[len(container) if known else 0 :])
        place = Inside(entry.section, clean_name(name, entry.section))
        other = first.setdefault(place, entry.fqn)
        if other != entry.fqn:
            raise UnsupportedError(
                f"{index.root}: {other} and {entry.fqn} are both {place.name!r} inside of "
                f"{place.section!r}, without containers and wrapper components.",
                hint="--exclude leaves one of them out.",
            )
        inside[entry.fqn] = place
    return inside


def clean_name(name: str, section: Section) -> str:
    """A name below its container, without wrapper components."""
    state = _STATE.fullmatch(name) if section == "optim" else None
    return names.clean(name) if state is None else state[1] + names.clean(state[2])


def owner_of(place: Inside) -> tuple[str, str] | None:
    """Which parameter a tensor of the optimizer is for, and what it is (``exp_avg``).

    ``state.w.exp_avg``; Megatron-core says ``state.exp_avg.w``.
    """
    state = _STATE.fullmatch(place.name) if place.section == "optim" else None
    if state is None:
        return None
    owner, _, kind = state[2].rpartition(".")
    return megatron_state(place.name) or ((owner, kind) if owner else None)
