"""`ckpt-tools ls`: one line for each tensor and object."""

from __future__ import annotations

import click

from ckpt_tools.analysis.summary import FoundMesh, mesh_of
from ckpt_tools.cli import asked, entries, options, reading, render
from ckpt_tools.cli.group import say
from ckpt_tools.cli.tree import tree_lines
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.errors import UsageError

_HELP = """List the tensors and objects of a checkpoint, one a line, by name.

On a terminal, long names stand on a line of their own; when piped nothing is folded. PLACEMENTS
have one part for each mesh dimension: S(0) is cut along dimension 0, R is replicated; for DCP they
are inferred from the stored boxes. Values of objects follow an equals sign, cut after 80
characters; `show`, --json, --jsonl and --csv have them whole.

""" + options.examples(
    "ckpt-tools ls run7/step-1000",
    "ckpt-tools ls run7/step-1000 -l -i '*.q_proj.*' --only model",
    "ckpt-tools ls run7/step-1000 --tree",
    "ckpt-tools ls run7/step-1000 --jsonl | jq -r 'select(.dtype==\"float32\").fqn'",
)


_PARAMS = [
    options.checkpoint(),
    click.Option(["-l", "--long"], is_flag=True, help="Also section, mesh, chunks, and ranks."),
    click.Option(["--tree"], is_flag=True, help="A tree, with sums for each part of the names."),
    options.as_json(),
    click.Option(["--jsonl"], is_flag=True, help="One JSON object a line, one for each entry."),
    click.Option(["--csv"], is_flag=True, help="CSV with a header line."),
    *options.filters(),
    *options.reading(),
    *options.talk(),
]


@click.command("ls", cls=options.Command, help=_HELP, params=_PARAMS)
def command(
    *,
    ckpt: str,
    long: bool,
    tree: bool,
    json: bool,
    jsonl: bool,
    csv: bool,
    **_shared: object,
) -> None:
    """Print the entries in the one form that was asked for."""
    forms = {"long": long, "tree": tree, "json": json, "jsonl": jsonl, "csv": csv}
    wanted = [name for name, on in forms.items() if on]
    if len(wanted) > 1:
        raise UsageError(f"--{wanted[0]} and --{wanted[1]} cannot be had at once.")
    chosen = asked.filters()
    whole = reading.read(ckpt, asked.reading())
    found = mesh_of(whole)
    index = reading.with_values(reading.choose(whole, chosen))
    _print(index, found, form=wanted[0] if wanted else "short")
    nbytes = format_size(sum(entry.nbytes for entry in index.tensors))
    tensors = counted(len(index.tensors), "tensor")
    say(f"{tensors} of {nbytes}, {counted(len(index.objects), 'object')}.")
    whole.require_whole()


def _print(index: CheckpointIndex, found: FoundMesh | None, *, form: str) -> None:
    listed = entries.sorted_entries(index)
    if form == "json":
        objects = [entries.entry_json(entry, found) for entry in listed]
        render.emit_json({"schema": "ckpt-tools/ls/1", "entries": objects})
    elif form == "jsonl":
        render.emit_json_lines(entries.entry_json(entry, found) for entry in listed)
    elif form == "csv":
        rows = (entries.csv_row(entry, found) for entry in listed)
        render.emit_csv(entries.CSV_HEADER, rows)
    elif form == "tree":
        render.emit(tree_lines(listed, found))
    else:
        render.emit(entries.lines(listed, found, long=form == "long"))
