"""Puts entries back into the nesting that their paths tell, for pickles of whole state dicts.

A part of a path that is a str is a key. One that is an int is a place in a list when the container
has all of 0 to n - 1 and nothing else, and a key otherwise. One exception: what is directly under
``state`` is always a dict, because an optimizer numbers its parameters there from 0 on.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tools.core import names
from ckpt_tools.core.index import Path
from ckpt_tools.errors import UnsupportedError
from ckpt_tools.formats.pickle.dump import Node


class _Container:
    """A dict or list, not decided yet."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: dict[str | int, _Container | _Leaf] = {}


class _Leaf:
    """An entry."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node


def nested(leaves: Iterable[tuple[Path, Node]]) -> Node:
    """The nested dicts and lists that hold each leaf at its path, keys in the order of the leaves.

    Raises UnsupportedError when a path is an entry and a container at once.
    """
    root = _Container()
    for path, node in leaves:
        container = root
        for part in path[:-1]:
            inner = container.items.setdefault(part, _Container())
            if isinstance(inner, _Leaf):
                raise _twice(path)
            container = inner
        if container.items.setdefault(path[-1], leaf := _Leaf(node)) is not leaf:
            raise _twice(path)
    return _as_node(root, name="")


def _as_node(container: _Container, *, name: str | int) -> Node:
    nodes: dict[str | int, Node] = {
        key: item.node if isinstance(item, _Leaf) else _as_node(item, name=key)
        for key, item in container.items.items()
    }
    places = [key for key in nodes if isinstance(key, int)]
    if name != "state" and nodes and sorted(places) == list(range(len(nodes))):
        return [nodes[place] for place in range(len(nodes))]
    return nodes


def _twice(path: Path) -> UnsupportedError:
    return UnsupportedError(
        f"{names.join(path)} is there twice, or is both an entry and a container of others.",
        hint="Leave one of them out with --exclude.",
    )
