"""Which items torch makes of a state dict, by their names and paths.

A dict gives its items, under the texts of their keys, and nothing when it is empty. A list gives
them when a tensor, a dict, or a list that gives its items is in it. Anything else is one pickled
item: a tuple too, whatever it holds. So

    {"a": [t, (t, 1)], 0: (t, t), "e": {}}    gives    a.0 (tensor), a.1 (pickled), 0 (pickled)

Source: `traverse_state_dict` of torch.distributed.checkpoint, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from ckpt_tools.core.state_tree import Branch, L, Path, of_paths

# What an item says of the list that it is in.
_Says = Literal["walk", "pack", "nothing"]


def items_of(
    tree: Branch[L], *, is_tensor: Callable[[L], bool]
) -> Iterator[tuple[Path, L | Branch[L]]]:
    """Each item with its path, in torch's order: a leaf, or a container that is pickled as one.

    A list of values alone is a leaf, so of a list that is a container something was walked, and
    may be gone. It is one item only where the tuples in it say that nothing was.
    """

    def leaf(value: L) -> _Says:
        return "walk" if is_tensor(value) else "nothing"

    def container(inner: Branch[L], items: list[_Says | None]) -> _Says:
        if inner.kind != "list":
            return "pack" if inner.kind == "tuple" else "walk"
        return "pack" if "pack" in items and "walk" not in items else "walk"

    return tree.walk_to(lambda branch: branch.fold(leaf, container) == "pack")


def as_read(tree: Branch[L], *, is_tensor: Callable[[L], bool]) -> Branch[L]:
    """The tree as it is read back from a DCP directory, which stores only paths."""
    made: Branch[L | Branch[L]] = of_paths(items_of(tree, is_tensor=is_tensor))
    return made  # type: ignore[return-value]  # a leaf that is a container is one of the tree
