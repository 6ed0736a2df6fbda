"""Who holds what as a page: every tensor, folded by layer, to be searched and hovered over.

Tensors with the same cut and holders share one entry in the page's data, so that 100,000 fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.analysis.ownership import (
    Held,
    Holdings,
    Moved,
    bytes_held,
    skew_of,
)
from ckpt_tools.cli.pictures import colors
from ckpt_tools.cli.pictures.shell import page, text
from ckpt_tools.cli.render import Json, printable
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.text import counted, format_size

_BODY = """<main><h1>{title}</h1>
<div class="quiet">{facts}</div>
<div id="sides" class="sides"></div>
{list}
</main><div id="tip" role="tooltip"></div><aside id="detail"></aside>"""

SCRIPTS = ("pieces.js", "layout.js")
LIST = """<div class="tools">
<input id="search" type="search" placeholder="Search names ( / )" aria-label="Search names">
<button id="open">open all</button><button id="close">close all</button>
<span id="count" class="quiet" role="status"></span></div>
{heads}<div id="list"></div>"""


def layout_page(
    root: str, before: Holdings, *, target: Holdings | None = None, change: Moved | None = None
) -> str:
    """The page of a checkpoint, and of its layout after a reshard when there is a target."""
    facts = [counted(len(before.tensors), "tensor")]
    facts.append(format_size(sum(held.nbytes for held in before.tensors)))
    if target is not None and change is not None:
        share = change.nbytes / (sum(bytes_held(target)) or 1)
        facts.append(
            f"{format_size(change.nbytes)} move, {share:.0%} of what the new ranks hold, "
            "if rank n stays where it is"
        )
    body = _BODY.format(
        title=text(root), facts=text(", ".join(facts)), list=LIST.format(heads=heads(change))
    )
    data = layout_data(before, target=target, change=change)
    return page(f"Layout of {root}", [body], scripts=SCRIPTS, data=data)


def heads(change: Moved | None) -> str:
    """The line above the list: what its columns are."""
    words = ["name", "shape", "bytes"]
    words += ["who holds what"] if change is None else ["before", "after", "moves"]
    cells = (f'<span class="{"n" if w in ("bytes", "moves") else ""}">{w}</span>' for w in words)
    return f'<div class="row heads">{"".join(cells)}</div>'


def layout_data(
    before: Holdings, *, target: Holdings | None = None, change: Moved | None = None
) -> dict[str, Json]:
    """What the script draws from."""
    types = sorted({held.dtype for held in before.tensors})
    places = {dtype: place for place, dtype in enumerate(types)}
    names = [held.fqn for held in before.tensors]
    sides: list[Json] = [_side(before, before.tensors, title="before")]
    moves: Json = None
    if target is not None and change is not None:
        later = {held.fqn: held for held in target.tensors}
        gets = list(change.by_rank)
        ordered = [later.get(fqn) for fqn in names]
        sides.append({**_side(target, ordered, title="after"), "gets": gets})
        by_name = dict(zip(later, change.by_tensor, strict=True))
        moves = [by_name.get(fqn, 0) for fqn in names]
    return {
        "names": "\n".join(map(printable, names)),
        "dtypes": [[dtype.name, dtype.itemsize] for dtype in types],
        "dtype": [places[held.dtype] for held in before.tensors],
        "sides": sides,
        "moved": moves,
        "colors": list(colors.HEX),
        "inks": [colors.ink(place) for place in range(len(colors.HEX))],
    }


def _side(holdings: Holdings, tensors: Sequence[Held | None], *, title: str) -> dict[str, Json]:
    """One layout: its mesh, its bytes, each way of being cut once, and which tensor has which."""
    kinds: dict[tuple[int, tuple[str, ...]], int] = {}
    drawn: list[Json] = []
    numbers = []
    for held in tensors:
        if held is None:
            numbers.append(-1)
            continue
        key = id(held.pieces), held.placements
        if key not in kinds:
            kinds[key] = len(drawn)
            drawn.append(_kind(held))
        numbers.append(kinds[key])
    totals = bytes_held(holdings)
    return {
        "title": title,
        "unit": holdings.unit,
        "files": [printable(path) for path in holdings.files],
        "mesh": None if holdings.mesh is None else _mesh(holdings.mesh, holdings.status),
        "loads": totals,
        "loadWords": _load_words(holdings, totals),
        "kinds": drawn,
        "kind": numbers,
    }


def _kind(held: Held) -> Json:
    return {
        "shape": list(held.shape),
        "words": ", ".join(held.placements),
        "pieces": [
            [list(p.box.offsets), list(p.box.sizes), list(p.holders), p.file] for p in held.pieces
        ],
    }


def _mesh(mesh: Mesh, status: str | None) -> Json:
    names = mesh.dim_names or tuple(f"dim{dim}" for dim in range(len(mesh.shape)))
    how = {"confirmed": ", confirmed by the files", "inferred": ", inferred from the boxes"}
    words = " × ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    return {
        "shape": list(mesh.shape),
        "names": list(names),
        "words": f"Mesh: {words}{how.get(status or '', '')}",
    }


def _load_words(holdings: Holdings, totals: Sequence[int]) -> str:
    skew = skew_of(totals)
    most = format_size(max(totals, default=0))
    text = f": {most} the most" if len(totals) > 1 else f": {most}"
    if skew is not None and len(totals) > 1:
        text += f", {skew:.2f} times the average"
    return f"Bytes per {holdings.unit}{text}"
