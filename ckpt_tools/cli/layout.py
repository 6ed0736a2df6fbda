"""`ckpt-tools layout`: a picture of who holds what, in the terminal or as a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import click

from ckpt_tools.analysis import ownership
from ckpt_tools.analysis.infer_mesh import mesh_json
from ckpt_tools.analysis.ownership import Holdings, Moved
from ckpt_tools.analysis.summary import mesh_of, skew_of
from ckpt_tools.cli import choosing, entries, options, render
from ckpt_tools.cli.group import say
from ckpt_tools.cli.pictures import colors, fold, text
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.mesh_spec import (
    default_placements,
    described,
    parse_mesh,
    parse_placements,
    parse_rule,
)
from ckpt_tools.core.names import Filters
from ckpt_tools.core.options import only_one_of, option, repeated
from ckpt_tools.core.records import as_json
from ckpt_tools.core.text import format_size
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.frameworks import sources_of

_HELP = """Draw which rank holds what: the mesh, the bytes of each rank, and a bar for every tensor.

A bar has one part for each stored chunk, as wide as its share, with the ranks that hold it.
Replicas are known from the layout, which for DCP is inferred from the boxes. Tensors that differ
only by the numbers in their names and have the same layout share one bar. With NAME, one tensor is
drawn as a grid of its chunks. Formats without ranks show files instead.

--html writes one page with all tensors, grouped by layer; it needs neither network nor scripts,
and a damaged checkpoint gets one, too. With --to-mesh both also show the layout after `reshard`,
and how many bytes each rank gets that the rank of the same number did not have before. --json
prints schema ckpt-tools/layout/1.

""" + options.examples(
    "ckpt-tools layout run7/step-1000",
    "ckpt-tools layout run7/step-1000 model.emb.weight",
    "ckpt-tools layout run7/step-1000 --html layout.html",
    "ckpt-tools layout run7/step-1000 --to-mesh 2x2 --html before-after.html",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    name: str | None = option(None, "[NAME]", complete=choosing.tensors)
    every: bool = option(False, "--every", "One bar for each tensor; no shared bars.")
    html: str | None = option(None, "--html", "Write an HTML page; - is stdout.", metavar="FILE")
    force: bool = option(False, "--force", "Replace an existing FILE.")
    to_mesh: Mesh | None = option(
        None,
        "--to-mesh",
        "Also show the layout after resharding to this mesh.",
        metavar="MESH",
        parse=parse_mesh,
    )
    placements: str | None = option(
        None, "--placements", "As in reshard: 'R,S(0)'.", metavar="LIST"
    )
    rules: tuple[str, ...] = repeated("--place", "As in reshard.", metavar="GLOB=LIST", parse=str)
    json: bool = options.as_json()
    filters: Filters
    reading: choosing.Reading


@options.command("layout", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Draw what the filters choose, in the one form that was asked for."""
    name, html, json = asked.name, asked.html, asked.json
    only_one_of({"--html": bool(html), "--json": json})
    if asked.to_mesh is None and (asked.placements or asked.rules):
        raise UsageError("--placements and --place need --to-mesh.")
    ckpt = asked.reading.find(asked.ckpt)
    if html is None:
        whole = choosing.read(ckpt, asked.reading.options)
    else:
        from ckpt_tools.cli.pictures import banner  # late, here and below: most runs write no page

        whole = banner.read(ckpt, html, asked.reading.options, force=asked.force)
    chosen = choosing.choose(whole, asked.filters)
    if name is not None:
        if whole.tensor(name) is None and whole.object(name) is not None:
            raise UsageError(f"{name} is an object, and only tensors have shards.")
        if whole.tensor(name) is None:
            raise choosing.no_such_name(whole, name)
        chosen = whole.select({name})
    before = ownership.holdings_of(chosen, mesh_of(whole))
    after = None
    if asked.to_mesh is not None and not (html and chosen.problems):  # broken: shown as it is
        after = _after(chosen, before, asked.to_mesh, asked)
    if json:
        render.emit_json(_json(whole.root, before, after))
    elif html is not None:
        from ckpt_tools.cli.pictures import pages, shell
        from ckpt_tools.proof.look import look

        picture = pages.layout_page(look(whole, chosen), before, after, damaged=whole.damaged)
        shell.write(html, picture, sources=(ckpt, *sources_of(whole)), force=asked.force)
    elif name is not None:
        render.emit(_one_lines(before, after))
    else:
        render.emit(_lines(whole.root, before, after, every=asked.every))
    whole.require_whole()


def _after(chosen: CheckpointIndex, before: Holdings, mesh: Mesh, asked: _Asked) -> Moved:
    """Who will hold what after a reshard. Raises what planning that reshard raises."""
    # Late: most pictures show what is there.
    from ckpt_tools.convert.reshard import ReshardOptions, plan_reshard

    given = asked.placements
    placements = None if given is None else parse_placements(given, mesh)
    rules = tuple(parse_rule(text, mesh) for text in asked.rules)
    plan = plan_reshard(chosen, ReshardOptions(mesh, placements, rules))
    say(described(mesh, placements or default_placements(mesh)))
    layouts = {target.fqn: target.layout for target in plan.targets}
    return ownership.moved(before, ownership.after(before, mesh, layouts))


def _paint() -> text.Paint:
    color = click.get_current_context().color
    is_coloured = render.terminal_width() is not None if color is None else color
    return colors.painted if is_coloured else text.plain


def _lines(root: str, before: Holdings, after: Moved | None, *, every: bool) -> Iterator[str]:
    paint = _paint()
    yield render.heading(root)
    yield from _side(before, paint, every=every)
    if after is None:
        return
    yield ""
    yield render.heading(f"After reshard --to-mesh {after.holdings.mesh}")
    yield from _side(after.holdings, paint, every=every)
    yield ""
    yield f"{text.moved_words(after)}."


def _side(holdings: Holdings, paint: text.Paint, *, every: bool) -> Iterator[str]:
    if holdings.mesh is not None:
        yield f"Mesh {holdings.mesh}{text.status_words(holdings)}"
        yield from text.mesh_lines(holdings.mesh, paint, width=render.terminal_width())
        yield ""
    yield from text.load_lines(holdings, paint)
    yield ""
    single = [fold.Row(held.fqn, (held,)) for held in holdings.tensors]
    rows = single if every else fold.rows(holdings)
    yield from text.bar_lines(rows, paint, width=render.terminal_width())


def _one_lines(before: Holdings, after: Moved | None) -> Iterator[str]:
    held, paint = before.tensors[0], _paint()
    yield render.heading(held.fqn)
    facts = f"{entries.short_shape(held.shape)} {held.dtype.name}, {format_size(held.nbytes)}"
    yield f"  {facts}" + (f", {', '.join(held.placements)}" if held.placements else "")
    width = render.terminal_width()
    yield from text.grid_lines(held, paint, width=width)
    yield from text.piece_lines(held, before)
    if after is not None and after.holdings.tensors:
        target = after.holdings
        yield ""
        yield render.heading(f"After reshard --to-mesh {target.mesh}")
        yield from text.grid_lines(target.tensors[0], paint, width=width)
        yield from text.piece_lines(target.tensors[0], target)


def _json(root: str, before: Holdings, after: Moved | None) -> dict[str, render.Json]:
    return {
        "schema": "ckpt-tools/layout/1",
        "path": root,
        **_holdings_json(before),
        "after": None if after is None else _holdings_json(after.holdings),
        "moved": None if after is None else {"nbytes": after.nbytes, "by_rank": after.by_rank},
    }


def _holdings_json(holdings: Holdings) -> dict[str, render.Json]:
    mesh, totals = holdings.mesh, ownership.bytes_held(holdings)
    return {
        "unit": holdings.unit,
        "mesh": mesh_json(mesh, holdings.status),
        "files": list(holdings.files),
        "bytes_held": totals,
        "skew": skew_of(totals),
        "tensors": as_json(holdings.tensors),
    }
