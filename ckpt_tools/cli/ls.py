"""`ckpt-tools ls`: one line for each tensor and object, or a tree of their names with sums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpt_tools.analysis.infer_mesh import FoundMesh
from ckpt_tools.analysis.summary import mesh_of
from ckpt_tools.cli import choosing, entries, options, render
from ckpt_tools.cli.entries import ORDERS, Order, row
from ckpt_tools.cli.group import say
from ckpt_tools.cli.render import cut_to
from ckpt_tools.core.index import Entry, TensorEntry
from ckpt_tools.core.names import Filters
from ckpt_tools.core.options import only_one_of, option
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import UsageError

_HELP = """List the tensors and objects of a checkpoint, one per line, by name.

On a terminal, long names get their own line; piped output is not wrapped. PLACEMENTS has one part
for each mesh dimension: S(0) is sharded along dimension 0, R is replicated; for DCP they are
inferred from the stored boxes. Values of objects follow an equals sign, cut after 80 characters;
`show`, --json, --jsonl and --csv print them in full. An object that shares a pickle with others has
no BYTES of its own.

""" + options.examples(
    "ckpt-tools ls run7/step-1000",
    "ckpt-tools ls run7/step-1000 -l -i '*.q_proj.*' --only model",
    "ckpt-tools ls run7/step-1000 --tree",
    "ckpt-tools ls run7/step-1000 --sort size -n 10",
    "ckpt-tools ls run7/step-1000 --jsonl | jq -r 'select(.dtype==\"float32\").fqn'",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    long: bool = option(False, "-l --long", "Also show section, mesh, chunks and ranks.")
    tree: bool = option(False, "--tree", "A tree, with the sum of each level of the names.")
    json: bool = options.as_json()
    jsonl: bool = option(False, "--jsonl", "One JSON object per line, one for each entry.")
    csv: bool = option(False, "--csv", "CSV with a header line.")
    sort: Order = option(
        "name", "--sort", "By name, or the largest first: by bytes or by rows.", choices=ORDERS
    )
    reverse: bool = option(False, "--reverse", "The other way round.")
    first: int | None = option(
        None, "-n --first", "Only the first N in that order.", metavar="N", at_least=1
    )
    filters: Filters
    reading: choosing.Reading


@options.command("ls", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Print the entries in the one form that was asked for."""
    forms = {"--long": asked.long, "--tree": asked.tree, "--json": asked.json}
    only_one_of(forms | {"--jsonl": asked.jsonl, "--csv": asked.csv})
    if asked.tree and (asked.sort != "name" or asked.reverse or asked.first):
        raise UsageError("--tree has an order of its own: the names, all of them.")
    whole = asked.reading.read(asked.ckpt)
    mesh = mesh_of(whole)
    index = choosing.with_values(choosing.choose(whole, asked.filters))
    listed = entries.in_order(index, asked.sort, reverse=asked.reverse)[: asked.first]
    if asked.json:
        objects = [entries.entry_json(entry, mesh) for entry in listed]
        render.emit_json({"schema": "ckpt-tools/ls/1", "entries": objects})
    elif asked.jsonl:
        render.emit_json_lines(entries.entry_json(entry, mesh) for entry in listed)
    elif asked.csv:
        rows = (entries.csv_row(entry, mesh) for entry in listed)
        render.emit_csv(entries.CSV_HEADER, rows)
    elif asked.tree:
        render.emit(tree_lines(listed, mesh))
    else:
        render.emit(entries.lines(listed, mesh, long=asked.long))
    shown = f"; {len(listed):,} shown" if asked.first else ""
    say(f"{index.count}{shown}.")
    whole.require_whole()


# Characters of a value in a tree; the other forms show all.
_LONGEST = 100


class Leaf(NamedTuple):
    """An entry with the parts of its place in a tree, and its bytes that count there."""

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
        way = [root]
        for part in leaf.parts:
            way.append(way[-1].below.setdefault(part, Node()))
        for node in way:
            if isinstance(leaf.entry, TensorEntry):
                node.tensors += 1
            else:
                node.objects += 1
            node.nbytes += leaf.nbytes
        way[-1].leaves.append(leaf)
    return root


def tree_lines(entries: Sequence[Entry], mesh: FoundMesh | None) -> Iterator[str]:
    """The lines of the tree; parts that have only one part below them are joined to it."""
    leaves = (
        Leaf(parts_of(entry), entry, entry.nbytes if isinstance(entry, TensorEntry) else 0)
        for entry in entries
    )
    yield from _lines(tree_of(leaves), mesh, indent="")


def parts_of(entry: Entry) -> tuple[str, ...]:
    """The parts of a name between dots, also of those dots that stand in a key."""
    return tuple(part for component in entry.path for part in str(component).split("."))


def _lines(node: Node, mesh: FoundMesh | None, *, indent: str) -> Iterator[str]:
    """A line for each part below, with the entries that end there and the sum of those below it."""
    names = sorted(node.below, key=_number_first)
    for name in names:
        is_last = name == names[-1]
        label, below = joined(name, node.below[name])
        facts = [cut_to("  ".join(row(leaf.entry, mesh)[1:]), _LONGEST) for leaf in below.leaves]
        if below.below:
            size = format_size(below.nbytes)
            tensors = [f"{counted(below.tensors, 'tensor')} of {size}"] if below.tensors else []
            objects = [counted(below.objects, "object")] if below.objects else []
            facts.append(", ".join([*tensors, *objects]))
        corner, bar = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        yield "  ".join([f"{indent}{corner}{label}", *facts])
        yield from _lines(below, mesh, indent=indent + bar)


def _number_first(part: str) -> tuple[int, str]:
    """Numbers in their own order (layer 2 before layer 10), before all other names."""
    return (int(part), "") if part.isdecimal() else (1 << 62, part)


def joined(name: str, node: Node) -> tuple[str, Node]:
    """A name and its node, with the parts below that are the only one there joined to it."""
    while len(node.below) == 1 and not node.leaves:
        (part, node), *_ = node.below.items()
        name = f"{name}.{part}"
    return name, node
