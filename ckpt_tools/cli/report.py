"""The report of `inspect`, as lines for a person and as JSON for a program."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from time import gmtime, strftime

import click

from ckpt_tools import formats
from ckpt_tools.analysis import summary
from ckpt_tools.analysis.inspection import Inspection, Part, inspect
from ckpt_tools.analysis.summary import FileLoad, SectionSum, Step, step_entries
from ckpt_tools.cli import entries, render
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.text import counted, first_of, format_size, some
from ckpt_tools.errors import CheckpointError, IncompleteError
from ckpt_tools.formats import locate, open_object
from ckpt_tools.storage.age import last_written
from ckpt_tools.storage.paths import is_address
from ckpt_tools.storage.reader import Files

_BAR = 12
_COLOURS = {"good": "green", "bad": "red", "doubtful": "yellow"}
SECTION_HEADER = ("SECTION", "TENSORS", "OBJECTS", "ELEMENTS", "BYTES", "DTYPES")


def look(whole: CheckpointIndex, index: CheckpointIndex) -> Inspection:
    """What is known of a checkpoint; the filters chose ``index`` out of ``whole``."""
    # In a store that would be more requests, for bytes beyond the headers: `show --raw` makes them.
    step = None if is_address(whole.root) else read_step(whole)
    there = (file.path for file in whole.files if file.length is not None)
    return inspect(whole, index, step=step, saved=last_written(there))


def as_json(
    whole: CheckpointIndex, index: CheckpointIndex, *, every: bool, shards: bool
) -> render.Json:
    """The object of schema ckpt-tools/inspect/1: all that `lines` says."""
    told = look(whole, index)
    more: dict[str, render.Json] = {}
    if shards:
        more["shards"] = [_load_json(load) for load in summary.file_loads(whole)]
    if every:
        listed = entries.sorted_entries(index)
        more["entries"] = [entries.entry_json(entry, told.mesh) for entry in listed]
    return {
        "schema": "ckpt-tools/inspect/1",
        "path": whole.root,
        "format": whole.format,
        "framework": whole.framework,
        "torch": whole.torch_version,
        "world_size": whole.world_size,
        "mesh": None if told.mesh is None else entries.mesh_json(told.mesh.mesh, told.mesh.status),
        "placements": [{"tensors": count, "placements": text} for text, count in told.placements],
        "sections": {section: _section_json(one) for section, one in told.sections.items()},
        "optimizer": None
        if told.optimizer is None
        else {"kind": told.optimizer.kind, "states": list(told.optimizer.states)},
        "step": None if told.step is None else told.step._asdict(),
        "resume": {"possible": told.resume.yes, "reason": told.resume.reason},
        "saved": None if told.saved is None else strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(told.saved)),
        "files": {
            "count": len(whole.files),
            "nbytes": told.nbytes,
            "missing": list(whole.missing),
        },
        "complete": told.whole,
        "problems": [entries.problem_json(problem) for problem in whole.problems],
        "ties": [list(group) for group in whole.ties],
        "notes": list(whole.notes),
        **more,
    }


def _section_json(one: SectionSum) -> render.Json:
    return {
        "tensors": one.tensors,
        "objects": one.objects,
        "numel": one.numel,
        "nbytes": one.nbytes,
        "dtypes": one.dtypes,
    }


def _load_json(load: FileLoad) -> render.Json:
    return {
        "path": load.path,
        "rank": load.rank,
        "chunks": load.chunks,
        "nbytes": load.nbytes,
        "length": load.length,
    }


def lines(
    whole: CheckpointIndex, index: CheckpointIndex, *, every: bool, shards: bool
) -> Iterator[str]:
    """The report for a person, an empty line at its end."""
    told = look(whole, index)
    yield render.heading(render.printable(whole.root))
    yield from _verdict(told.verdict)
    yield ""
    yield from render.facts(identity(told))
    yield ""
    yield from _sections(index)
    yield ""
    yield from render.facts(state(whole, told))
    if shards:
        yield ""
        yield from _shards(whole)
    if every:
        yield ""
        yield from entries.lines(entries.sorted_entries(index), told.mesh, long=True)
    yield ""


def _verdict(parts: Sequence[Part]) -> Iterator[str]:
    """The parts in a line, or on a narrow terminal in as many as they need."""
    width = render.terminal_width() or sys.maxsize
    line, used = "  ", 2
    for number, part in enumerate(parts, start=1):
        comma = ", " if number < len(parts) else ""
        if used > 2 and used + len(part.text) + len(comma.rstrip()) > width:
            yield line.rstrip()
            line, used = "  ", 2
        line, used = line + _coloured(part) + comma, used + len(part.text) + len(comma)
    yield line


def _coloured(part: Part) -> str:
    return click.style(part.text, fg=_COLOURS[part.kind]) if part.kind in _COLOURS else part.text


def identity(told: Inspection) -> Iterator[tuple[str, str]]:
    """What it is: labels and texts."""
    yield "format", written_as(told)
    if told.framework is not None:
        yield "framework", told.framework
    if told.world_size is not None:
        yield "world size", counted(told.world_size, "rank")
    yield "mesh", str(told.mesh or "none is stated, and nothing is cut")
    if told.mesh is not None and told.placements:
        yield (
            "placements",
            "\n".join(f"{counted(count, 'tensor')}: {text}" for text, count in told.placements),
        )


def written_as(told: Inspection) -> str:
    """The format, with the version of torch that wrote it where the files say."""
    version = f", torch {told.torch_version}" if told.torch_version else ""
    return formats.named(told.format).label + version


def section_rows(index: CheckpointIndex) -> list[tuple[str, ...]]:
    """The cells of `SECTION_HEADER` for each section that holds anything."""
    return [
        (
            section,
            f"{one.tensors:,}",
            f"{one.objects:,}",
            f"{one.numel:,}",
            format_size(one.nbytes),
            _dtype_words(one),
        )
        for section, one in summary.sections_of(index).items()
        if one.tensors or one.objects
    ]


def _sections(index: CheckpointIndex) -> Iterator[str]:
    # Not `table`: importing tabulate takes longer than all the rest of this report.
    return render.indented(SECTION_HEADER, section_rows(index), align="lrrrrw")


def _dtype_words(one: SectionSum) -> str:
    """The element types, with the share of each when there are several."""
    if len(one.dtypes) < 2:
        return ", ".join(one.dtypes)
    return ", ".join(f"{name} {_percent(n, one.numel)}" for name, n in one.dtypes.items())


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"


def state(whole: CheckpointIndex, told: Inspection) -> Iterator[tuple[str, str]]:
    """What can be done with it, and what is missing: labels and texts."""
    if told.optimizer is not None:
        yield "optimizer", f"{told.optimizer.kind}: it keeps {', '.join(told.optimizer.states)}"
    if told.step is not None:
        yield "step", f"{told.step.value:,} ({render.printable(told.step.fqn)})"
    yield "resume", f"{'yes' if told.resume.yes else 'no'}: {told.resume.reason}"
    yield "files", f"{len(whole.files):,}, {format_size(told.nbytes)}"
    if whole.missing:
        yield "missing", _missing(whole)
    if whole.ties:
        tied = [" = ".join(group) for group in whole.ties]
        yield "tied", "\n".join(render.printable(text) for text in first_of(tied))
    if whole.notes:
        yield "notes", "\n".join(map(render.printable, whole.notes))


def _missing(whole: CheckpointIndex) -> str:
    names = [entries.file_name(path, whole.root) for path in whole.missing]
    return f"{counted(len(names), 'file')}: {render.printable(some(names))}"


def _shards(whole: CheckpointIndex) -> Iterator[str]:
    """What each file holds, with a bar against the fullest, and how even that is."""
    loads = summary.file_loads(whole)
    most = max((load.nbytes for load in loads), default=0)
    rows = [
        (
            render.printable(entries.file_name(load.path, whole.root)),
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
    yield from _skew(loads)


def _skew(loads: Sequence[FileLoad]) -> Iterator[str]:
    """How far the fullest file is from the average of those that hold tensors."""
    held = [load.nbytes for load in loads if load.nbytes]
    if len(held) > 1:
        skew = max(held) * len(held) / sum(held)
        yield f"  The fullest file holds {skew:.2f} times the average of {len(held):,} files."


# The types that steps have, for struct: numpy would cost a looking command its start.
_STRUCT = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def read_step(index: CheckpointIndex) -> Step | None:
    """The step that a plain object or a one-element tensor tells, or None.

    An entry that cannot be read tells nothing; what is damaged is the reader's to report.
    """
    with Files() as files:
        for entry in step_entries(index):
            try:
                value = _number(index.select({entry.fqn}), files)
            except CheckpointError:
                continue
            if value is not None:
                return Step(value, entry.fqn)
    return None


def _number(index: CheckpointIndex, files: Files) -> int | None:
    """The only entry of this index as a whole number, or None when it is none."""
    value: object = None
    if index.objects:
        value = open_object(index, index.objects[0], files).value
    else:
        value = read_single(locate(index, files).tensors[0], files)
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return None


def read_single(entry: TensorEntry, files: Files) -> object:
    """The value of a located one-element tensor, read without any mover of tensors.

    Raises IncompleteError when its shard is not there.
    """
    chunk = next((chunk for chunk in entry.chunks if chunk.box.numel == 1), None)
    if chunk is None:
        raise IncompleteError(f"{entry.fqn}: the shard that holds its element is not there.")
    data = files.read(chunk.data.path, chunk.data.offset, entry.dtype.itemsize)
    if entry.dtype.name in _STRUCT:
        return struct.unpack(_STRUCT[entry.dtype.name], data)[0]
    from ckpt_tools.copying.cast import decode  # late: numpy comes with it

    return decode(data, entry.dtype)[0]
