"""The report of `inspect`, as lines for a person and as JSON for a program."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from ckpt_tools import formats
from ckpt_tools.analysis import summary
from ckpt_tools.analysis.summary import FileLoad, FoundMesh, SectionSum
from ckpt_tools.cli import entries, render
from ckpt_tools.cli.scalars import read_step
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.text import counted, first_of, format_size, some
from ckpt_tools.storage.paths import is_address

_BAR = 20
SECTION_HEADER = ("SECTION", "TENSORS", "OBJECTS", "ELEMENTS", "BYTES", "DTYPES")


def as_json(whole: CheckpointIndex, index: CheckpointIndex) -> render.Json:
    """The object of schema ckpt-tools/inspect/1; the filters chose ``index`` out of ``whole``."""
    found = summary.mesh_of(whole)
    sums = summary.sections_of(index)
    return {
        "schema": "ckpt-tools/inspect/1",
        "path": whole.root,
        "format": whole.format,
        "framework": whole.framework,
        "torch": whole.torch_version,
        "world_size": whole.world_size,
        "mesh": None if found is None else entries.mesh_json(found.mesh, found.status),
        "sections": {section: _section_json(one) for section, one in sums.items()},
        "files": {
            "count": len(whole.files),
            "nbytes": sum(file.length or 0 for file in whole.files),
            "missing": list(whole.missing),
        },
        "complete": not whole.problems,
        "notes": list(whole.notes),
    }


def _section_json(one: SectionSum) -> render.Json:
    return {
        "tensors": one.tensors,
        "objects": one.objects,
        "numel": one.numel,
        "nbytes": one.nbytes,
        "dtypes": one.dtypes,
    }


def lines(
    whole: CheckpointIndex, index: CheckpointIndex, *, every: bool, shards: bool
) -> Iterator[str]:
    """The report for a person, an empty line at its end."""
    found = summary.mesh_of(whole)
    yield render.heading(render.printable(whole.root))
    yield from render.facts(identity(whole, index, found))
    yield ""
    yield from _sections(index)
    yield ""
    yield from render.facts(state(whole))
    if shards:
        yield ""
        yield from _shards(whole)
    if every:
        yield ""
        yield from entries.lines(entries.sorted_entries(index), found, long=True)
    yield ""


def identity(
    whole: CheckpointIndex, index: CheckpointIndex, found: FoundMesh | None
) -> Iterator[tuple[str, str]]:
    """What it is: labels and texts."""
    form = formats.named(whole.format).label
    version = f", torch {whole.torch_version}" if whole.torch_version else ""
    yield "format", form + version
    if whole.framework is not None:
        yield "framework", whole.framework
    if whole.world_size is not None:
        yield "world size", counted(whole.world_size, "rank")
    yield "mesh", _mesh_words(found)
    placements = summary.placements_of(index, found)
    if found is not None and placements:
        yield (
            "placements",
            "\n".join(f"{counted(count, 'tensor')}: {words}" for words, count in placements),
        )


def _mesh_words(found: FoundMesh | None) -> str:
    if found is None:
        return "none is stated, and nothing is cut"
    if found.status == "confirmed":
        return f"{found.mesh}, confirmed by the files"
    return f"{found.mesh}, inferred from the boxes that each rank saved"


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
    shown = render.columns(SECTION_HEADER, section_rows(index), align="lrrrrl", width=None)
    return (f"  {line}" for line in shown)


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


def state(whole: CheckpointIndex) -> Iterator[tuple[str, str]]:
    """What can be done with it, and what is missing: labels and texts."""
    optimizer = summary.optimizer_of(whole)
    if optimizer is not None:
        yield "optimizer", f"{optimizer.kind}: it keeps {', '.join(optimizer.states)}"
    # In a store that would be more requests, for bytes beyond the headers: `show --raw` makes them.
    step = None if is_address(whole.root) else read_step(whole)
    if step is not None:
        yield "step", f"{step.value:,} ({render.printable(step.fqn)})"
    verdict = summary.resume_verdict(whole)
    yield "resume", f"{'yes' if verdict.yes else 'no'}: {verdict.reason}"
    nbytes = sum(file.length or 0 for file in whole.files)
    yield "files", f"{len(whole.files):,}, {format_size(nbytes)}"
    if whole.missing:
        yield "missing", _missing(whole)
    if whole.ties:
        tied = [" = ".join(group) for group in whole.ties]
        yield "tied", "\n".join(render.printable(text) for text in first_of(tied))
    if whole.notes:
        yield "notes", "\n".join(map(render.printable, whole.notes))


def _missing(whole: CheckpointIndex) -> str:
    names = [os.path.relpath(path, whole.root) for path in whole.missing]
    return f"{counted(len(names), 'file')}: {render.printable(some(names))}"


def _shards(whole: CheckpointIndex) -> Iterator[str]:
    """What each file holds, with a bar against the fullest, and how even that is."""
    loads = summary.file_loads(whole)
    most = max((load.nbytes for load in loads), default=0)
    rows = [
        (
            render.printable(os.path.relpath(load.path, whole.root)),
            "-" if load.rank is None else str(load.rank),
            f"{load.chunks:,}",
            f"{load.nbytes:,}",
            "missing" if load.length is None else f"{load.length:,}",
            "#" * round(_BAR * load.nbytes / most) if most else "",
        )
        for load in loads
    ]
    header = ("FILE", "RANK", "CHUNKS", "TENSOR BYTES", "FILE BYTES", "")
    yield from render.table(header, rows, align="lrrrrl")
    yield from _skew(loads)


def _skew(loads: Sequence[FileLoad]) -> Iterator[str]:
    """How far the fullest file is from the average of those that hold tensors."""
    held = [load.nbytes for load in loads if load.nbytes]
    if len(held) > 1:
        skew = max(held) * len(held) / sum(held)
        yield f"  The fullest file holds {skew:.2f} times the average of {len(held):,} files."
