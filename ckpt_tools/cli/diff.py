"""`ckpt-tools diff`: what is different between two checkpoints of any formats and meshes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import click

from ckpt_tools.cli import choosing, options, render
from ckpt_tools.cli.group import say
from ckpt_tools.core.names import Filters
from ckpt_tools.core.options import option, required
from ckpt_tools.core.text import counted
from ckpt_tools.errors import UsageError
from ckpt_tools.proof.diff import Diff, fitting
from ckpt_tools.proof.diff import diff as compare_values
from ckpt_tools.proof.diff import diff_headers as compare_headers
from ckpt_tools.proof.diff_options import DiffOptions
from ckpt_tools.proof.pairs import EntryDiff
from ckpt_tools.storage.reader import Files

_HELP = """Show the differences between two checkpoints: names, types, values, objects, containers.

A and B can have different formats and meshes. Values are compared bit by bit, or with --rtol and
--atol: then |a - b| can be up to atol + rtol * |b|. Names are compared unchanged; --clean-names,
which is implied where only clean names are on both sides, removes containers (app.model) and
wrapper components, and names outside the model then begin with their section
(optim:state.emb.weight.exp_avg). --rename PATTERN=NEW changes names by a regular
expression; with the prefix `a:` or `b:` on one side only.

Objects are compared by value, unopened ones by their bytes. The containers of entries (dicts,
lists, tuples, and the types of their keys) are compared if both sides store them: safetensors
stores none, and they are not compared with --clean-names or --rename.

Exit code 0 means that everything requested was compared and is equal; 1 means that something
differs, or that an object could not be compared. --json prints schema ckpt-tools/diff/1.

""" + options.examples(
    "ckpt-tools diff run7/step-1000 run7-hf --clean-names --only model",
    "ckpt-tools diff run7/step-1000 resharded",
    "ckpt-tools diff run7/step-1000 run7/step-2000 --header-only",
    "ckpt-tools diff a b --rename 'a:^decoder[.]=model.' --rtol 1e-3 --ignore-dtypes",
)

HEADER: tuple[str, ...] = ("NAME", "WHAT", "A", "B", "DIFFERING", "MAX |Δ|", "AT", "REL L2")
WORDS = {
    "only a": "only in A",
    "only b": "only in B",
    "kind": "tensor or object",
    "dtype": "type",
    "shape": "shape",
    "values": "values",
    "unknown": "could not be compared",
    "container": "container",
    "same": "same",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    a: str = required("A", own=True, parse=str)
    b: str = required("B", own=True, parse=str)
    header_only: bool = option(
        False, "--header-only", "Compare names, types and shapes, no values."
    )
    wanted: DiffOptions
    sort: Literal["name", "size"] = option(
        "name",
        "--sort",
        "By name, or the largest difference (MAX |Δ|) first.",
        choices=("name", "size"),
    )
    first: int | None = option(
        None, "-n --first", "Show only the first N in that order.", metavar="N", at_least=1
    )
    threads: int | None = options.threads()
    json: bool = options.as_json()
    filters: Filters
    reading: choosing.Reading


@options.command("diff", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Compare what the filters choose on both sides; exit with 1 when it is not the same."""
    wanted, reading, header_only = asked.wanted, asked.reading, asked.header_only
    if header_only and (wanted.ignore_dtypes or not wanted.is_bitwise):
        raise UsageError("--header-only compares no values, so tolerances mean nothing.")
    whole = reading.read(asked.a)
    a = choosing.chosen_in(whole, asked.filters)
    other = reading.read(asked.b)
    b = choosing.chosen_in(other, asked.filters)
    choosing.say_idle(asked.filters, [whole, other])
    if fitting(a, b, wanted) != wanted:
        say("No tensor's name is on both sides: compared without containers (--clean-names).")
    if header_only:
        compared = compare_headers(a, b, options=wanted)
    else:
        total = a.count.nbytes + b.count.nbytes
        with render.byte_bar(total, label="diff") as on_bytes, Files() as files:
            compared = compare_values(
                a, b, files, options=wanted, threads=asked.threads, on_bytes=on_bytes
            )
    if asked.sort == "size":
        compared = replace(compared, entries=tuple(sorted(compared.entries, key=_size)))
    if asked.json:
        render.emit_json(compared.to_dict())
    else:
        render.emit(_lines(compared, asked.first))
    for index in (a, b):
        index.require_whole()  # only headers have come this far with anything lost
    if not compared.equal:
        click.get_current_context().exit(1)


def _size(entry: EntryDiff) -> float:
    """Less for a larger difference: what has no values to compare, or NaNs, comes first."""
    return -math.inf if entry.delta is None or entry.delta.nan else -entry.delta.max_abs


def _lines(diff: Diff, first: int | None) -> Iterator[str]:
    every = [entry for entry in diff.entries if entry.status != "same"]
    differing = every[:first]
    if differing:
        rows = [row(entry) for entry in differing]
        header, align = HEADER, "llllrrlr"
        if not any(entry.delta for entry in differing):
            header, align, rows = HEADER[:4], align[:4], [row[:4] for row in rows]
        yield from render.columns(header, rows, align=align, width=render.terminal_width())
        for entry in differing:
            if entry.detail:
                yield f"  {entry.name}: {entry.detail}"
        if len(differing) < len(every):
            yield f"and {len(every) - len(differing):,} more"
        yield ""
    compared = f"{counted(diff.tensors, 'tensor')} and {counted(diff.objects, 'object')}"
    if diff.containers is not None:
        compared += " and the containers they are in"
    by = "" if diff.values_compared else " by headers only: VALUES WERE NOT COMPARED"
    counts = Counter(WORDS[entry.status] for entry in every)
    kinds = ", ".join(f"{word} ({count:,})" for word, count in counts.items())
    found = f"{diff.same:,} are the same. Different: {kinds}." if every else "All are the same."
    yield f"Compared {compared}{by}. {found}"


def row(entry: EntryDiff) -> tuple[str, ...]:
    """The cells of `HEADER`."""
    what, delta = (entry.name, WORDS[entry.status], _short(entry.a), _short(entry.b)), entry.delta
    if delta is None:
        return (*what, "-", "-", "-", "-")
    place = delta.at if delta.at is not None else delta.first
    return (
        *what,
        f"{delta.differing:,} of {delta.numel:,}",
        render.number(delta.max_abs),
        "-" if place is None else f"[{', '.join(map(str, place))}]",
        render.number(delta.relative_l2),
    )


def _short(text: str | None) -> str:
    return "-" if text is None else render.cut_to(text, 40)
