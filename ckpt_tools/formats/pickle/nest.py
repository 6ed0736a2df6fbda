"""Puts what is to be pickled into the containers of a tree, each of its own kind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from ckpt_tools.core.state_tree import Branch, L
from ckpt_tools.formats.pickle.dump import Node


def nested(tree: Branch[L], node_of: Callable[[L], Node]) -> Node:
    """The nested dicts, lists and tuples of a tree, with the node of each leaf at its place.

    A place without a value becomes None.
    """

    def branch(old: Branch[L], nodes: list[Node]) -> Node:
        if old.keys is None:
            return tuple(nodes) if old.kind == "tuple" else nodes
        pairs = zip(old.keys, nodes, strict=True)
        return OrderedDict(pairs) if old.kind == "OrderedDict" else dict(pairs)

    return tree.fold(node_of, branch)
