"""The report of `inspect`: its lines and its JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import click

from ckpt_tools import formats
from ckpt_tools.analysis import summary
from ckpt_tools.analysis.inspection import Inspection, VerdictPart
from ckpt_tools.cli import entries, render
from ckpt_tools.core import records
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.text import counted, first_of, format_size, some
from ckpt_tools.proof.look import look

_BAR = 12
_COLOURS = {"good": "green", "bad": "red", "doubtful": "yellow"}
SECTION_HEADER = ("SECTION", "TENSORS", "OBJECTS", "ELEMENTS", "BYTES", "DTYPES")


def as_json(
    whole: CheckpointIndex, index: CheckpointIndex, *, every: bool, shards: bool
) -> dict[str, render.Json]:
    """The object of schema ckpt-tools/inspect/1: all that `lines` says."""
    facts = look(whole, index)
    said = facts.to_dict()
    if shards:
        said["shards"] = records.as_json(summary.file_loads(whole))
    if every:
        listed = entries.in_order(index)
        said["entries"] = [entries.entry_json(entry, facts.mesh) for entry in listed]
    return said


def lines(
    whole: CheckpointIndex, index: CheckpointIndex, *, every: bool, shards: bool
) -> Iterator[str]:
    """The report for people, with an empty line at its end."""
    facts = look(whole, index)
    yield render.heading(whole.root)
    yield from _verdict(facts.verdict)
    yield ""
    yield from render.facts(identity(facts))
    yield ""
    # Not `table`: importing tabulate takes longer than all the rest of this report.
    yield from render.indented(SECTION_HEADER, section_rows(index), align="lrrrrw")
    yield ""
    yield from render.facts(state(facts))
    if shards:
        yield ""
        yield from _shards(whole)
    if every:
        yield ""
        yield from entries.lines(entries.in_order(index), facts.mesh, long=True)
    yield ""


def _verdict(parts: Sequence[VerdictPart]) -> Iterator[str]:
    """The parts in a line, or on a narrow terminal in as many as they need."""
    width = render.terminal_width() or sys.maxsize
    line, used = "  ", 2
    for number, part in enumerate(parts, start=1):
        comma = ", " if number < len(parts) else ""
        color = _COLOURS.get(part.kind)
        if used > 2 and used + len(part.text) + len(comma.rstrip()) > width:
            yield render.Styled(line.rstrip())
            line, used = "  ", 2
        line += (click.style(part.text, fg=color) if color else part.text) + comma
        used += len(part.text) + len(comma)
    yield render.Styled(line)


def identity(facts: Inspection) -> Iterator[render.Fact]:
    """What it is: labels and texts."""
    yield "format", written_as(facts)
    if facts.framework is not None:
        yield "framework", facts.framework
    if facts.world_size is not None:
        yield "world size", counted(facts.world_size, "rank")
    none = ""
    if facts.is_sharded:
        none = ", and none gives these shards"
    elif facts.whole:
        none = ", nothing sharded"
    yield "mesh", str(facts.mesh or f"none stated{none}")
    if facts.is_sharded and facts.placements:
        lines = [f"{counted(count, 'tensor')}: {text}" for text, count in facts.placements]
        yield "placements", lines


def written_as(facts: Inspection) -> str:
    """The format, with the version of torch that wrote it where the files say."""
    version = f", torch {facts.torch_version}" if facts.torch_version else ""
    return formats.named(facts.format).label + version


def section_rows(index: CheckpointIndex) -> list[tuple[str, ...]]:
    """The cells of `SECTION_HEADER` for each section that holds anything."""
    rows: list[tuple[str, ...]] = []
    for section, one in summary.sections_of(index).items():
        types = list(one.dtypes)
        if len(types) > 1:
            types = [f"{name} {_percent(n, one.numel)}" for name, n in one.dtypes.items()]
        counts = [f"{count:,}" for count in (one.tensors, one.objects, one.numel)]
        if one.tensors or one.objects:
            rows.append((section, *counts, format_size(one.nbytes), ", ".join(types)))
    return rows


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"


def state(facts: Inspection) -> Iterator[render.Fact]:
    """What can be done with it, and what is missing: labels and texts."""
    if facts.optimizer is not None:
        yield "optimizer", f"{facts.optimizer.kind}: it keeps {', '.join(facts.optimizer.states)}"
    if facts.step is not None:
        yield "step", f"{facts.step.value:,} ({facts.step.fqn})"
    yield "resume", f"{'yes' if facts.resume.yes else 'no'}: {facts.resume.reason}"
    yield "files", f"{facts.files:,}, {format_size(facts.nbytes)}"
    if facts.missing:
        names = [entries.file_name(path, facts.root) for path in facts.missing]
        yield "missing", f"{counted(len(names), 'file')}: {some(names)}"
    if facts.ties:
        yield "tied", first_of([" = ".join(group) for group in facts.ties])
    if facts.notes:
        yield "notes", facts.notes


def _shards(whole: CheckpointIndex) -> Iterator[str]:
    """What each file holds, with a bar against the fullest, and how even that is."""
    loads = summary.file_loads(whole)
    most = max((load.nbytes for load in loads), default=0)
    rows = [
        (
            entries.file_name(load.path, whole.root),
            "-" if load.rank is None else str(load.rank),
            f"{load.chunks:,}",
            f"{load.nbytes:,}",
            "missing" if load.length is None else f"{load.length:,}",
            "#" * round(_BAR * load.nbytes / most) if most else "",
        )
        for load in loads
    ]
    header = ("FILE", "RANK", "CHUNKS", "TENSOR BYTES", "FILE BYTES", "")
    yield from render.indented(header, rows, align="lrrrrc")
    held = [load.nbytes for load in loads if load.nbytes]
    if len(held) > 1:
        skew = f"{summary.skew_of(held):.2f} times the average"
        yield f"  The fullest file holds {skew} of {len(held):,} files."
