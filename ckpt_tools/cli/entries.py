"""Entries of a checkpoint as rows and as JSON, for every command that lists or shows them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

from ckpt_tools.analysis.infer_mesh import FoundMesh, Status, mesh_json
from ckpt_tools.analysis.summary import layout_of, placement_names
from ckpt_tools.cli.render import Json, columns, cut_to, finite, number, terminal_width
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.layout import Layout
from ckpt_tools.core.plain_values import PickledValue, PlainValue
from ckpt_tools.core.text import format_size, rank_spans

if TYPE_CHECKING:
    from ckpt_tools.proof.stats import TensorStats

HEADER = ("NAME", "DTYPE", "SHAPE", "BYTES", "PLACEMENTS")
LONG_HEADER = (*HEADER[:-1], "SECTION", "MESH", "CHUNKS", "RANKS", HEADER[-1])
ALIGN, LONG_ALIGN = "lllrc", "lllrllrlc"
_ENTRY = ("fqn", "kind", "section", "dtype", "shape", "nbytes")
CSV_HEADER = (*_ENTRY, "placements", "mesh", "chunks", "value")
_LONGEST_VALUE = 80  # characters in a list; `show` and the JSON have values whole

Known = tuple[Layout, Status] | None


Order = Literal["name", "size", "rows"]
ORDERS: tuple[Order, ...] = get_args(Order)


def in_order(
    index: CheckpointIndex, order: Order = "name", *, reverse: bool = False
) -> list[Entry]:
    """Tensors and objects together, by name; or the largest first, by bytes or by rows."""

    def size(entry: Entry) -> int:
        if isinstance(entry, ObjectEntry):
            return -1 if order == "rows" else entry.nbytes or 0
        return entry.nbytes if order == "size" else next(iter(entry.shape), 0)

    ordered = sorted(index.entries, key=lambda entry: entry.fqn)
    if order != "name":
        ordered.sort(key=size, reverse=True)
    return ordered[::-1] if reverse else ordered


@lru_cache(maxsize=256)
def short_placements(layout: Layout) -> str:
    """Placements as the command line takes them: ``R,S(0)``; a strided shard is ``_S(0)``."""
    return ",".join(map(_short, placement_names(layout)))


def _short(name: str) -> str:
    for long, short in (("Replicate", "R"), ("_StridedShard", "_S"), ("Shard", "S")):
        if name.startswith(long):
            return short + name[len(long) :].partition(",")[0].rstrip(")") + ")" * ("(" in name)
    return name


def short_shape(shape: Sequence[int]) -> str:
    """``[128256,4096]``: no space, so that a column stays one word."""
    return f"[{','.join(map(str, shape))}]"


def value_text(entry: ObjectEntry) -> str:
    """The value of a plain object as one line of JSON, or what it is when it was not opened."""
    if not entry.opened:
        return f"({entry.type_name or 'not opened'})"
    if isinstance(entry.value, PickledValue):
        return str(entry.value)
    return json.dumps(_spelled(entry.value))


def row(entry: Entry, mesh: FoundMesh | None) -> tuple[str, ...]:
    """The cells of `HEADER`; an object has its value where a tensor has its placements."""
    if isinstance(entry, ObjectEntry):
        size = "-" if entry.nbytes is None else format_size(entry.nbytes)
        return entry.fqn, "object", "-", size, f"= {cut_to(value_text(entry), _LONGEST_VALUE)}"
    known = layout_of(entry, mesh)
    placed = "-" if known is None else short_placements(known[0])
    size = format_size(entry.nbytes)
    return entry.fqn, entry.dtype.name, short_shape(entry.shape), size, placed


def long_row(entry: Entry, mesh: FoundMesh | None) -> tuple[str, ...]:
    """The cells of `LONG_HEADER`."""
    *first, last = row(entry, mesh)
    on_mesh = chunks = ranks = "-"
    if isinstance(entry, TensorEntry):
        known = layout_of(entry, mesh)
        on_mesh = "-" if known is None else str(known[0].mesh)
        chunks = str(len(entry.chunks))
        ranks = rank_spans(sorted({c.rank for c in entry.chunks if c.rank is not None})) or "-"
    return (*first, entry.section, on_mesh, chunks, ranks, last)


def file_name(path: str, root: str) -> str:
    """The name of a file below the root of its checkpoint; of a checkpoint of one file its own."""
    return os.path.basename(path) if path == root else os.path.relpath(path, root)


def entry_json(entry: Entry, mesh: FoundMesh | None) -> dict[str, Json]:
    """An entry as `ls --json` gives it."""
    facts: dict[str, Json] = {
        "fqn": entry.fqn,
        "path": list(entry.path),
        "kind": "object" if isinstance(entry, ObjectEntry) else "tensor",
        "section": entry.section,
        **dict.fromkeys(("dtype", "shape", "nbytes", "placements")),
        "mesh": mesh_json(None, None),
        **dict.fromkeys(("chunks", "value")),
    }
    if isinstance(entry, ObjectEntry):
        return facts | {"nbytes": entry.nbytes, "value": plain_json(entry.value)}
    known = layout_of(entry, mesh)
    return facts | {
        "dtype": entry.dtype.name,
        "shape": list(entry.shape),
        "nbytes": entry.nbytes,
        "placements": None if known is None else list(placement_names(known[0])),
        "mesh": mesh_json(known and known[0].mesh, known and known[1]),
        "chunks": len(entry.chunks),
    }


def plain_json(value: PlainValue) -> Json:
    """A plain value as JSON has it: keys are strings, and what JSON lacks stays a string."""
    return finite(_spelled(value))


def _spelled(value: PlainValue) -> Json:
    """A plain value in JSON's own types; a set is a sorted list, a config what it holds."""
    if isinstance(value, PickledValue) and value.fields is not None:
        return _spelled(value.fields)
    if isinstance(value, dict):
        return {str(key): _spelled(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return [_spelled(inner) for inner in sorted(value, key=repr)]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def stats_cells(tensor: TensorStats) -> tuple[str, ...]:
    """Mean, spread, least, greatest and norm, and how many are NaN, infinite and zero."""
    values = (tensor.mean, tensor.std, tensor.min, tensor.max, tensor.l2)
    counts = (tensor.nan, tensor.inf, tensor.zeros)
    return (*map(number, values), *(f"{count:,}" for count in counts))


def csv_row(entry: Entry, mesh: FoundMesh | None) -> tuple[str | int, ...]:
    """The cells of `CSV_HEADER`; numbers are exact, and nothing is shortened."""
    if isinstance(entry, ObjectEntry):
        value = value_text(entry) if entry.opened else ""
        size = "" if entry.nbytes is None else entry.nbytes
        return (entry.fqn, "object", entry.section, "", "", size, "", "", "", value)
    known = layout_of(entry, mesh)
    placed = ("", "") if known is None else (short_placements(known[0]), str(known[0].mesh))
    what = (entry.fqn, "tensor", entry.section, entry.dtype.name, short_shape(entry.shape))
    return (*what, entry.nbytes, *placed, len(entry.chunks), "")


def lines(listed: Sequence[Entry], mesh: FoundMesh | None, *, long: bool) -> Iterator[str]:
    """A table of entries; on a terminal long names are folded and long values cut."""
    cells = long_row if long else row
    rows = [cells(entry, mesh) for entry in listed]
    header, align = (LONG_HEADER, LONG_ALIGN) if long else (HEADER, ALIGN)
    yield from columns(header, rows, align=align, width=terminal_width())
