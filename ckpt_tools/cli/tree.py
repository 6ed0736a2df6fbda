"""Entries as a tree of the parts of their names, with sums at every node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_tools.analysis.summary import FoundMesh
from ckpt_tools.cli.entries import row
from ckpt_tools.cli.render import cut_to, printable
from ckpt_tools.core.index import Entry, TensorEntry
from ckpt_tools.core.text import counted, format_size

# Of a long value, a tree shows only the start: what comes after it is seen in the other forms.
_LONGEST = 100


class Leaf(NamedTuple):
    """An entry with its name, the parts of its place in a tree, and its bytes that count there."""

    name: str
    parts: tuple[str, ...]
    entry: Entry
    nbytes: int


@dataclass(slots=True)
class Node:
    """A part of a name: what ends here, what goes on below, and how much that is."""

    leaves: list[Leaf] = field(default_factory=list)
    below: dict[str, Node] = field(default_factory=dict)
    tensors: int = 0
    objects: int = 0
    nbytes: int = 0

    def walk(self) -> Iterator[Leaf]:
        """Every leaf that ends here or below."""
        yield from self.leaves
        for node in self.below.values():
            yield from node.walk()


def tree_of(leaves: Iterable[Leaf]) -> Node:
    """The tree in which each leaf has its place."""
    root = Node()
    for leaf in leaves:
        node = root
        _count(node, leaf)
        for part in leaf.parts:
            node = node.below.setdefault(part, Node())
            _count(node, leaf)
        node.leaves.append(leaf)
    return root


def tree_lines(entries: Sequence[Entry], found: FoundMesh | None) -> Iterator[str]:
    """The lines of the tree; parts that have only one part below them are joined to it."""
    leaves = (
        Leaf(
            entry.fqn,
            parts_of(entry),
            entry,
            entry.nbytes if isinstance(entry, TensorEntry) else 0,
        )
        for entry in entries
    )
    yield from _lines(tree_of(leaves), found, indent="")


def parts_of(entry: Entry) -> tuple[str, ...]:
    """The parts of a name between dots, also of those dots that stand in a key."""
    return tuple(part for component in entry.path for part in str(component).split("."))


def _count(node: Node, leaf: Leaf) -> None:
    if isinstance(leaf.entry, TensorEntry):
        node.tensors += 1
    else:
        node.objects += 1
    node.nbytes += leaf.nbytes


def _lines(node: Node, found: FoundMesh | None, *, indent: str) -> Iterator[str]:
    names = sorted(node.below, key=_number_first)
    for name in names:
        is_last = name == names[-1]
        label, below = joined(name, node.below[name])
        corner, bar = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield f"{indent}{corner}{printable(label)}{_told(below, found)}"
        yield from _lines(below, found, indent=indent + bar)


def _number_first(part: str) -> tuple[int, str]:
    """Numbers in their own order (layer 2 before layer 10), before all other names."""
    return (int(part), "") if part.isdecimal() else (1 << 62, part)


def joined(name: str, node: Node) -> tuple[str, Node]:
    """A name and its node, with the parts below that are the only one there joined to it."""
    while len(node.below) == 1 and not node.leaves:
        (part, node), *_ = node.below.items()
        name = f"{name}.{part}"
    return name, node


def _told(node: Node, found: FoundMesh | None) -> str:
    """What stands behind a name: the entry that ends here, or the sum of those below."""
    told = [cut_to("  ".join(row(leaf.entry, found)[1:]), _LONGEST) for leaf in node.leaves]
    if node.below:
        told.append(_sum(node))
    return "".join(f"  {text}" for text in told)


def _sum(node: Node) -> str:
    parts = []
    if node.tensors:
        parts.append(f"{counted(node.tensors, 'tensor')} of {format_size(node.nbytes)}")
    if node.objects:
        parts.append(counted(node.objects, "object"))
    return ", ".join(parts)
