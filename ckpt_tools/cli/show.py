"""`ckpt-tools show`: one entry, its chunks, and values of it."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Sequence

import click

from ckpt_tools.analysis.summary import (
    FoundMesh,
    layout_of,
    mesh_of,
    placement_names,
)
from ckpt_tools.cli import asked, completing, corner, entries, options, reading, render
from ckpt_tools.core.index import CheckpointIndex, Chunk, ObjectEntry, TensorEntry
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.formats import locate, open_object
from ckpt_tools.storage.reader import Files

_CHUNKS_SHOWN = 32
CHUNK_HEADER = ("CHUNK", "RANK", "FILE", "AT BYTE", "BYTES", "REPLICAS")

_HELP = """Show one entry of a checkpoint: type, shape, placements, each chunk, and values.

Of a tensor the first corner is read, or what --slice chooses, never the whole. --raw prints a plain
object, or a tensor of one element, bare on stdout: strings as they are, all else as JSON.

""" + options.examples(
    "ckpt-tools show run7/step-1000 model.layers.0.attn.wq.weight",
    "ckpt-tools show run7/step-1000 model.emb.weight --slice '0:4,:8'",
    "step=$(ckpt-tools show --raw run7/step-1000 train_state.step)",
)


_PARAMS = [
    options.checkpoint(),
    click.Argument(["name"], metavar="NAME", shell_complete=completing.names),
    click.Option(["--slice", "part"], metavar="SLICE", help="Values of this part, e.g. '0:4,:8'."),
    click.Option(["--raw"], is_flag=True, help="Print the value bare, for scripts."),
    options.as_json(),
    *options.reading(),
    *options.talk(),
]


@click.command("show", cls=options.Command, help=_HELP, params=_PARAMS)
def command(
    *,
    ckpt: str,
    name: str,
    part: str | None,
    raw: bool,
    json: bool,
    **_shared: object,
) -> None:
    """Find the entry, then print it in the form that was asked for."""
    if raw and json:
        raise UsageError("--raw and --json cannot be had at once.")
    index = reading.read(ckpt, asked.reading())
    entry = index.tensor(name) or index.object(name)
    if entry is None:
        index = reading.with_values(index)  # a tensor of a tuple has a name once that is opened
        entry = index.tensor(name)
    if entry is None:
        raise reading.no_such_name(index, name)
    one = index.select({name})
    if any(name in problem.about for problem in one.problems):
        one.require_whole()
    if isinstance(entry, ObjectEntry):
        if part is not None:
            raise UsageError(f"{name} is an object, and only a tensor has a --slice.")
        with Files() as files:
            _show_object(open_object(one, entry, files), raw=raw, json=json)
    elif raw:
        _print_bare(corner.read_corner(located(one), part))
    else:
        _show_tensor(one, mesh_of(index), part=part, json=json)
    one.require_whole()


def located(one: CheckpointIndex) -> TensorEntry:
    """The only tensor of this index with raw chunks. Raises what is wrong with it."""
    with Files() as files:
        located = locate(one, files)
    entry = located.tensors[0]
    for problem in located.problems:
        if entry.fqn in problem.about:
            raise problem
    return entry


def _print_bare(values: corner.Corner) -> None:
    if values.numel != 1:
        raise UsageError(
            f"--raw prints one value, and this part of {values.fqn} has {values.numel:,}.",
            hint="--json prints them all; --slice chooses one.",
        )
    click.echo(render.bare(corner.flat(values)[0]))


def _show_object(entry: ObjectEntry, *, raw: bool, json: bool) -> None:
    if (raw or json) and not entry.opened and entry.value is None:
        raise UnsupportedError(
            f"{entry.fqn} is no plain value, and is not opened: {entry.type_name or 'too large'}."
        )
    if raw:
        click.echo(render.bare(entries.plain_json(entry.value)))
    elif json:
        render.emit_json({"schema": "ckpt-tools/show/1", **entries.entry_json(entry, None)})
    else:
        click.echo(render.heading(render.printable(entry.fqn)))
        render.emit(
            render.facts([*object_facts(entry), ("value", render.printable(_value_text(entry)))])
        )


def object_facts(entry: ObjectEntry) -> Sequence[tuple[str, str]]:
    """What headers say of an object: labels and texts."""
    return [
        ("kind", f"object of section {entry.section}"),
        ("file", _file_words(entry.data.path, entry.data.offset, entry.data.length)),
        *([("not read", entry.flaw.message)] if entry.flaw is not None else ()),
    ]


def _value_text(entry: ObjectEntry) -> str:
    """The value on one line; that of a config, which stays closed for all else, with its class."""
    if entry.opened or entry.value is None:
        return entries.value_text(entry)
    return f"{entry.type_name} {jsonlib.dumps(entries.plain_json(entry.value))}"


def _file_words(path: str, offset: int, length: int) -> str:
    return f"{render.printable(path)}, bytes {offset:,} to {offset + length:,}"


def _show_tensor(
    one: CheckpointIndex, found: FoundMesh | None, *, part: str | None, json: bool
) -> None:
    entry = located(one)
    values = corner.read_corner(entry, part)
    if json:
        render.emit_json(
            {
                "schema": "ckpt-tools/show/1",
                **entries.entry_json(entry, found),
                "chunks": [_chunk_json(chunk) for chunk in entry.chunks],
                "slice": {
                    "offsets": list(values.box.offsets),
                    "sizes": list(values.box.sizes),
                    "values": corner.nested(values),
                },
            }
        )
        return
    click.echo(render.heading(render.printable(entry.fqn)))
    render.emit(render.facts(tensor_facts(entry, found)))
    render.emit(["", *_chunk_table(entry, one.root), ""])
    render.emit(corner.lines(values))


def tensor_facts(entry: TensorEntry, found: FoundMesh | None) -> Sequence[tuple[str, str]]:
    """What headers say of a tensor: labels and texts."""
    known = layout_of(entry, found)
    size = f"{counted(entry.numel, 'element')}, {format_size(entry.nbytes)}"
    pairs = [
        ("kind", f"tensor of section {entry.section}"),
        ("dtype", entry.dtype.name),
        ("shape", f"{list(entry.shape)}, {size}"),
    ]
    if known is not None:
        layout, status = known
        placements = ", ".join(placement_names(layout))
        pairs.append(("placements", f"{placements} on mesh {layout.mesh}, {status}"))
    return pairs


def _chunk_json(chunk: Chunk) -> render.Json:
    return {
        "offsets": list(chunk.box.offsets),
        "sizes": list(chunk.box.sizes),
        "rank": chunk.rank,
        "path": chunk.data.path,
        "offset": chunk.data.offset,
        "length": chunk.data.length,
        "strides": None if chunk.strides is None else list(chunk.strides),
        "replicas": [place.path for place in chunk.replicas],
    }


def chunk_rows(entry: TensorEntry, root: str, most: int = _CHUNKS_SHOWN) -> list[tuple[str, ...]]:
    """The cells of `CHUNK_HEADER` for the first chunks of a tensor."""
    chunks = sorted(entry.chunks, key=lambda chunk: chunk.box.offsets)
    return [
        (
            str(chunk.box) if entry.shape else "whole",
            "-" if chunk.rank is None else str(chunk.rank),
            render.printable(entries.file_name(chunk.data.path, root)),
            f"{chunk.data.offset:,}",
            f"{chunk.data.length:,}",
            str(len(chunk.replicas)),
        )
        for chunk in chunks[:most]
    ]


def _chunk_table(entry: TensorEntry, root: str) -> list[str]:
    lines = list(render.table(CHUNK_HEADER, chunk_rows(entry, root), align="lrlrrr"))
    if len(entry.chunks) > _CHUNKS_SHOWN:
        lines.append(f"  and {len(entry.chunks) - _CHUNKS_SHOWN:,} more; --json lists all")
    return lines
