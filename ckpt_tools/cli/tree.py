"""Entries as a tree of the parts of their names, with sums at every branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckpt_tools.analysis.summary import FoundMesh
from ckpt_tools.cli.entries import row
from ckpt_tools.cli.render import cut_to, printable
from ckpt_tools.core.index import ObjectEntry, TensorEntry
from ckpt_tools.core.text import counted, format_size

# Of a long value, a tree shows only the start: what comes after it is seen in the other forms.
_LONGEST = 100

Entry = TensorEntry | ObjectEntry


@dataclass(slots=True)
class _Branch:
    """A part of a name: what ends here, what goes on below, and how much that is."""

    entries: list[Entry] = field(default_factory=list)
    below: dict[str, _Branch] = field(default_factory=dict)
    tensors: int = 0
    objects: int = 0
    nbytes: int = 0


def tree_lines(entries: Sequence[Entry], found: FoundMesh | None) -> Iterator[str]:
    """The lines of the tree; parts that have only one part below them are joined to it."""
    root = _Branch()
    for entry in entries:
        branch = root
        _count(branch, entry)
        for part in _parts(entry):
            branch = branch.below.setdefault(part, _Branch())
            _count(branch, entry)
        branch.entries.append(entry)
    yield from _lines(root, found, indent="")


def _parts(entry: Entry) -> list[str]:
    return [part for component in entry.path for part in str(component).split(".")]


def _count(branch: _Branch, entry: Entry) -> None:
    if isinstance(entry, TensorEntry):
        branch.tensors += 1
        branch.nbytes += entry.nbytes
    else:
        branch.objects += 1


def _lines(branch: _Branch, found: FoundMesh | None, *, indent: str) -> Iterator[str]:
    names = sorted(branch.below, key=_number_first)
    for name in names:
        is_last = name == names[-1]
        label, below = _joined(name, branch.below[name])
        corner, bar = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield f"{indent}{corner}{printable(label)}{_told(below, found)}"
        yield from _lines(below, found, indent=indent + bar)


def _number_first(part: str) -> tuple[int, str]:
    """Numbers in their own order (layer 2 before layer 10), before all other names."""
    return (int(part), "") if part.isdecimal() else (1 << 62, part)


def _joined(name: str, branch: _Branch) -> tuple[str, _Branch]:
    while len(branch.below) == 1 and not branch.entries:
        (part, branch), *_ = branch.below.items()
        name = f"{name}.{part}"
    return name, branch


def _told(branch: _Branch, found: FoundMesh | None) -> str:
    """What stands behind a name: the entry that ends here, or the sum of those below."""
    told = [cut_to("  ".join(row(entry, found)[1:]), _LONGEST) for entry in branch.entries]
    if branch.below:
        told.append(_sum(branch))
    return "".join(f"  {text}" for text in told)


def _sum(branch: _Branch) -> str:
    parts = []
    if branch.tensors:
        parts.append(f"{counted(branch.tensors, 'tensor')} of {format_size(branch.nbytes)}")
    if branch.objects:
        parts.append(counted(branch.objects, "object"))
    return ", ".join(parts)
