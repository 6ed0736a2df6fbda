"""`ckpt-tools show`: one entry, its chunks, and values of it.

The command, tables and JSON of an entry, and `Corner`: the values of a small part of a tensor.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools.analysis.infer_mesh import FoundMesh
from ckpt_tools.analysis.summary import layout_of, mesh_of, placement_names
from ckpt_tools.cli import choosing, entries, options, render
from ckpt_tools.cli.group import say
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
from ckpt_tools.core.options import only_one_of, option, required
from ckpt_tools.core.plain_values import PickledValue
from ckpt_tools.core.records import Json, as_json, record_json
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.formats import locate, open_object
from ckpt_tools.storage.reader import Files

_CHUNKS_SHOWN = 32
CHUNK_HEADER = ("CHUNK", "RANK", "FILE", "AT BYTE", "BYTES", "REPLICAS")

_HELP = """Show one entry of a checkpoint: type, shape, placements, each chunk, and values.

NAME is the whole name, or the end of one alone: emb.weight.

Of a tensor only the first corner is read, or what --slice chooses. --raw prints only the value of a
plain object or of a tensor with one element: strings without quotes, everything else as JSON.

""" + options.examples(
    "ckpt-tools show run7/step-1000 model.layers.0.attn.wq.weight",
    "ckpt-tools show run7/step-1000 model.emb.weight --slice '0:4,:8'",
    "step=$(ckpt-tools show --raw run7/step-1000 train_state.step)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    name: str = required("NAME", complete=choosing.names, parse=str)
    part: str | None = option(
        None, "--slice", "Show the values of this part, e.g. '0:4,:8'.", metavar="SLICE"
    )
    raw: bool = option(False, "--raw", "Print only the value, for scripts.")
    json: bool = options.as_json()
    reading: choosing.Reading


@options.command("show", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Find the entry, then print it in the form that was asked for."""
    part, raw, json = asked.part, asked.raw, asked.json
    only_one_of({"--raw": raw, "--json": json})
    index = asked.reading.read(asked.ckpt)
    entry = index.tensor(asked.name) or index.object(asked.name)
    if entry is None:  # the only one whose name ends so
        ending = [one for one in index.entries if one.fqn.endswith(f".{asked.name}")]
        if len(ending) != 1:
            raise choosing.no_such_name(index, asked.name)
        entry = ending[0]
        say(f"Showing {entry.fqn}.")
    name = entry.fqn
    one = index.select({name})
    if any(name in problem.about for problem in one.problems):
        one.require_whole()
    if isinstance(entry, ObjectEntry):
        if part is not None:
            raise UsageError(f"{name} is an object, and only a tensor has a --slice.")
        with Files() as files:
            _show_object(open_object(one, entry, files), raw=raw, json=json)
    elif raw:
        values = read_corner(located(one), part).values
        if len(values) != 1:
            raise UsageError(
                f"--raw prints one value, and this part of {name} has {len(values):,}.",
                hint="--json prints them all; --slice chooses one.",
            )
        render.emit_raw([render.bare(as_json(values[0]))])
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


def _show_object(entry: ObjectEntry, *, raw: bool, json: bool) -> None:
    closed = entry.value if isinstance(entry.value, PickledValue) else None
    if (raw or json) and (not entry.opened or (closed is not None and closed.fields is None)):
        what = entry.type_name or "too large" if closed is None else closed.qualname
        raise UnsupportedError(f"{entry.fqn} is not a plain value, not opened: {what}.")
    if raw:
        render.emit_raw([render.bare(entries.plain_json(entry.value))])
    elif json:
        render.emit_json({"schema": "ckpt-tools/show/1", **entries.entry_json(entry, None)})
    else:
        value = entries.value_text(entry)
        if closed is not None and closed.fields is not None:  # a config
            value = f"{closed.qualname} {jsonlib.dumps(entries.plain_json(closed))}"
        render.emit([render.heading(entry.fqn)])
        render.emit(render.facts([*facts_of(entry, None), ("value", value)]))


def _show_tensor(
    one: CheckpointIndex, mesh: FoundMesh | None, *, part: str | None, json: bool
) -> None:
    entry = located(one)
    values = read_corner(entry, part)
    # Chunks that were unpacked to be read are again where they are stored.
    files = {file.path for file in one.files}
    pairs = zip(entry.chunks, one.tensors[0].chunks, strict=True)
    chunks = [there if there.data.path in files else stored for there, stored in pairs]
    entry = replace(entry, chunks=(*chunks,))
    if json:
        said: list[Json] = []
        for chunk in chunks:
            lies = record_json(chunk.box) | {"rank": chunk.rank} | record_json(chunk.data)
            replicas = [place.path for place in chunk.replicas]
            said.append({**lies, "strides": chunk.strides, "replicas": replicas})
        sliced = record_json(values.box) | {"values": nested(values)}
        facts = {**entries.entry_json(entry, mesh), "chunks": said, "slice": sliced}
        render.emit_json({"schema": "ckpt-tools/show/1", **facts})
        return
    render.emit([render.heading(entry.fqn)])
    render.emit(render.facts(facts_of(entry, mesh)))
    table = list(render.table(CHUNK_HEADER, chunk_rows(entry, one.root), align="lrlrrr"))
    if len(entry.chunks) > _CHUNKS_SHOWN:
        table.append(f"  and {len(entry.chunks) - _CHUNKS_SHOWN:,} more; --json lists all")
    render.emit(["", *table, ""])
    render.emit(lines(values))


def facts_of(entry: Entry, mesh: FoundMesh | None) -> Iterator[tuple[str, str]]:
    """What headers say of a tensor or an object: labels and texts."""
    if isinstance(entry, ObjectEntry):
        path, offset, length = entry.data
        among = "among " if entry.nbytes is None else ""
        yield "kind", f"object of section {entry.section}"
        yield "file", f"{path}, {among}bytes {offset:,} to {offset + length:,}"
        if entry.flaw is not None:
            yield "not read", entry.flaw.message
        return
    known = layout_of(entry, mesh)
    size = f"{counted(entry.numel, 'element')}, {format_size(entry.nbytes)}"
    yield "kind", f"tensor of section {entry.section}"
    yield "dtype", entry.dtype.name
    yield "shape", f"{list(entry.shape)}, {size}"
    if known is not None:
        layout, status = known
        placements = ", ".join(placement_names(layout))
        yield "placements", f"{placements} on mesh {layout.mesh}, {status}"


def chunk_rows(entry: TensorEntry, root: str, most: int = _CHUNKS_SHOWN) -> list[tuple[str, ...]]:
    """The cells of `CHUNK_HEADER` for the first chunks of a tensor."""
    chunks = sorted(entry.chunks, key=lambda chunk: chunk.box.offsets)
    return [
        (
            str(chunk.box) if entry.shape else "whole",
            "-" if chunk.rank is None else str(chunk.rank),
            entries.file_name(chunk.data.path, root),
            f"{chunk.data.offset:,}",
            f"{chunk.data.length:,}",
            str(len(chunk.replicas)),
        )
        for chunk in chunks[:most]
    ]


Number = bool | int | float | complex

_ROWS, _COLUMNS = 6, 6
_MAX_VALUES = 100_000


class Corner(NamedTuple):
    """The elements of ``box`` of a tensor in row-major order, and what they are called."""

    box: Box
    values: Sequence[Number]
    noun: str = "values"


def read_corner(entry: TensorEntry, part: str | None) -> Corner:
    """Read what the slice text chooses of a located tensor, or its first corner without one.

    Raises UsageError for a slice that is not valid or that is too large to print.
    """
    # late: numpy comes with it, only values need it
    from ckpt_tools.copying.cast import decode, has_numbers
    from ckpt_tools.copying.read import read_array

    box = first_corner(entry.shape) if part is None else parse_slice(part, entry.shape)
    if box.numel > _MAX_VALUES:
        raise UsageError(
            f"--slice chooses {box.numel:,} values; at most {_MAX_VALUES:,} are printed.",
            hint="`ckpt-tools export --format torch` writes full tensors.",
        )
    with Files() as files:
        data = read_array(entry, box, files=files)
    noun = "values" if has_numbers(entry.dtype) else "packed bits, as integers,"
    return Corner(box, decode(bytes(data), entry.dtype), noun)


def first_corner(shape: Sequence[int]) -> Box:
    """The first few rows and columns of the last two dimensions, at 0 of all others."""
    limits = [1] * (len(shape) - 2) + [_ROWS, _COLUMNS][-len(shape) :] if shape else []
    sizes = tuple(min(size, limit) for size, limit in zip(shape, limits, strict=True))
    return Box((0,) * len(shape), sizes)


def parse_slice(text: str, shape: Sequence[int]) -> Box:
    """The box that ``0:4,:8`` or ``-1`` means for this shape; dimensions left out are whole.

    Raises UsageError when it cannot be read, has too many dimensions, or chooses nothing there.
    """
    parts = [part.strip() for part in text.strip("[] ").split(",") if part.strip()]
    if len(parts) > len(shape):
        raise UsageError(f"--slice {text!r} has {len(parts)} dimensions, the tensor {len(shape)}.")
    spans = [range(size) for size in shape]
    for dim, (part, span) in enumerate(zip(parts, spans, strict=False)):
        first, colon, last = part.partition(":")
        try:
            begin, end = (int(text) if text else None for text in (first, last))
        except ValueError as error:
            raise UsageError(
                f"--slice: {part!r} is not valid.", hint="Write START:END for each dimension."
            ) from error
        if colon:
            spans[dim] = span[begin:end]
            if span and not spans[dim]:
                raise UsageError(f"--slice: {part} is empty in a dimension of {len(span)}.")
        elif begin is not None and -len(span) <= begin < len(span):
            spans[dim] = span[begin:][:1]
        else:
            raise UsageError(f"--slice: index {part} is outside of a dimension of {len(span)}.")
    offsets = (span.start if span else 0 for span in spans)
    return Box((*offsets,), tuple(map(len, spans)))


def nested(corner: Corner) -> Json:
    """The values as nested lists, one level a dimension; a bare value for a scalar."""
    return _nest([*map(as_json, corner.values)], corner.box.sizes)


def _nest(values: Sequence[Json], sizes: Sequence[int]) -> Json:
    if not sizes:
        return values[0]
    step = len(values) // sizes[0] if sizes[0] else 0
    return [_nest(values[i * step : (i + 1) * step], sizes[1:]) for i in range(sizes[0])]


def lines(corner: Corner) -> Iterator[str]:
    """The values as rows of the last dimension, under the slice that each block is."""
    if not corner.values:
        yield "  no elements"
        return
    texts = [value_text(value) for value in corner.values]
    width = max(map(len, texts))
    per_row = corner.box.sizes[-1] if corner.box.sizes else 1
    if corner.box.sizes:
        yield f"  {corner.noun} of {corner.box}"
    rows_in_block = corner.box.sizes[-2] if len(corner.box.sizes) > 1 else 1
    for number, start in enumerate(range(0, len(texts), per_row)):
        if number and number % rows_in_block == 0:
            yield ""
        yield "  " + " ".join(text.rjust(width) for text in texts[start : start + per_row])


def value_text(value: Number) -> str:
    """A value in at most seven digits."""
    if isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, complex):
        return f"{value.real:.7g}{value.imag:+.7g}j"
    return f"{value:.7g}"
