"""The sections of a checkpoint in ``__metadata__``, since a flat file of tensors has none.

A value says which containers there are and what section each is of; a name is in the longest of
them that it begins with, and where that is wrong it is listed. Nothing is written for weights alone
without a container, as every other tool writes them. For example, of a model, its optimizer and one
random state::

    {"containers":[[["model"],"model"],[["optim"],"optim"],[[],"other"]],"names":{}}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.index import SECTIONS, Path, Section
from ckpt_tools.errors import UnreadableError

KEY = "ckpt_tools_sections"


class Home(NamedTuple):
    """The container that a tensor stands in, and the section that this is of."""

    container: Path
    section: Section


_USUAL = Home((), "model")


class Homes:
    """Finds the home of a name."""

    def __init__(self, containers: Sequence[Home], listed: Mapping[str, Home]) -> None:
        self._listed = listed
        self._by_prefix = {names.join((*home.container, "")): home for home in containers}
        self._by_prefix[""] = next((home for home in containers if not home.container), _USUAL)

    def of(self, fqn: str) -> Home:
        """The home of a tensor."""
        listed = self._listed.get(fqn)
        if listed is not None:
            return listed
        prefixes = [prefix for prefix in self._by_prefix if fqn.startswith(prefix)]
        return self._by_prefix[max(prefixes, key=len)]


def encoded(homes: Mapping[str, Home]) -> dict[str, str]:
    """What goes into ``__metadata__`` for these tensors: one value, or nothing."""
    if set(homes.values()) <= {_USUAL}:
        return {}
    usual: dict[Path, Home] = {}
    for home, _ in sorted(Counter(homes.values()).items(), key=lambda item: (-item[1], item[0])):
        usual.setdefault(home.container, home)
    containers = sorted(usual.values())
    stated = Homes(containers, {})
    value = {
        "containers": [[list(home.container), home.section] for home in containers],
        "names": {
            fqn: [list(home.container), home.section]
            for fqn, home in sorted(homes.items())
            if stated.of(fqn) != home
        },
    }
    return {KEY: json.dumps(value, ensure_ascii=False, separators=(",", ":"))}


def decoded(metadata: Mapping[str, str], path: str) -> Homes | None:
    """What ``__metadata__`` of a file says, None when it says nothing.

    Raises UnreadableError when that cannot be read.
    """
    text = metadata.get(KEY)
    if text is None:
        return None
    try:
        raw = json.loads(text)
        containers = [_home(one) for one in raw["containers"]]
        return Homes(containers, {str(fqn): _home(one) for fqn, one in raw["names"].items()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableError(f"{path}: its {KEY} cannot be read: {error}.") from error


def _home(raw: object) -> Home:
    if not isinstance(raw, list) or len(raw) != 2 or not isinstance(raw[0], list):
        raise TypeError(f"{raw!r:.60} is not a container with its section")
    section = next((one for one in SECTIONS if one == raw[1]), None)
    if section is None or not all(type(part) in (str, int) for part in raw[0]):
        raise TypeError(f"{raw!r:.60} is not a container with its section")
    return Home(tuple(raw[0]), section)
