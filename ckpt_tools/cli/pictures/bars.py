"""Who holds what as HTML that needs no script: ranks with their bytes, and a row for each kind of
tensor, which opens to its pieces and its names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from ckpt_tools.analysis.ownership import HeldTensor, Holdings, Moved, bytes_held
from ckpt_tools.analysis.summary import skew_of
from ckpt_tools.cli.entries import short_shape
from ckpt_tools.cli.pictures import colors, fold
from ckpt_tools.cli.pictures.shapes import rects
from ckpt_tools.cli.pictures.shell import table, text
from ckpt_tools.cli.pictures.text import mesh_words, piece_cells, place_words, status_words
from ckpt_tools.core.text import counted, format_size, rank_spans, some

_COLUMN = 48  # pixels
_OPEN_RANKS, _OPEN_FILES = 256, 16
_MAX_DRAWN, _MAX_PIECES = 256, 256
_BUDGET = 30_000  # pieces that a page draws: rows after that say in words what they are
_TOOLS = """<div id="tools" hidden>
<input id="filter" type="search" placeholder="Filter names" aria-label="Filter names">
<button id="open">open all</button><button id="close">close all</button>
<span id="count" class="quiet" role="status"></span></div>
<p id="nothing" hidden>Nothing matches.</p>"""

Side = tuple[str, Holdings]


def who_holds_what(
    before: Holdings, after: Moved | None = None, *, damaged: frozenset[str]
) -> Iterator[str]:
    """The ranks, then the rows; of both sides when there is a reshard, on one scale."""
    sides: list[Side] = [("", before)]
    if after is not None:
        sides = [("before", before), ("after", after.holdings)]
    most = max((load for _, side in sides for load in bytes_held(side)), default=0)
    for title, side in sides:
        gets = after.by_rank if after is not None and side is after.holdings else None
        yield from _holders(side, title, most=most, gets=gets)
    if len(sides) > 1:
        yield f'<p class="quiet">Both on one scale: a full column is {format_size(most)}.</p>'
    repeated = colors.repeated(max(side.holders for _, side in sides))
    yield f'<p class="quiet">{repeated}</p>' if repeated else ""
    yield from _rows(sides, after, damaged)


# ------------------------------------------------------------------------- the ranks, or the files


def _holders(side: Holdings, title: str, *, most: int, gets: Sequence[int] | None) -> Iterator[str]:
    """A column of bytes for each holder, in the rows of the mesh, and a table of the same."""
    loads = bytes_held(side)
    names = [_name(side, holder) for holder in range(len(loads))]
    opened = " open" if len(loads) <= _OPEN_RANKS else ""
    words = [title] if title else []
    if side.mesh is not None:
        words.append(f"mesh {mesh_words(side.mesh)}{status_words(side)}")
    whole = ": ".join(words) or counted(side.holders, side.unit)
    heading = f"<h2>{text(whole[0].upper() + whole[1:])}</h2>"
    yield f"<section>{heading}<details{opened}><summary>"
    fullest, skew = format_size(max(loads, default=0)), skew_of(loads)
    uneven = ""
    if skew is not None and len(loads) > 1:
        uneven = f" the most, {skew:.2f} times the average"
    yield f'Bytes per {side.unit}: {fullest}{uneven}.</summary><div class="ranks">'
    for line in _lines(side, len(loads)):
        cells = ""
        for n in line:
            height = max(1, round(_COLUMN * loads[n] / most)) if loads[n] else 0
            column = f'<b class="{colors.classes(n)}" style="height:{height}px"></b>'
            cells += f'<i title="{text(names[n])}: {loads[n]:,} B">{column}{n}</i>'
        yield f"<p>{cells}</p>"
    yield "</div></details>"
    # A rank is called by its number, a file is not: its name is wanted at once.
    opened = " open" if side.unit == "file" and len(loads) <= _OPEN_FILES else ""
    yield f"<details{opened}><summary>Bytes of each {side.unit}</summary>"
    header = [side.unit, "bytes", *(["of them moved here"] if gets else [])]
    rows = [
        [name, f"{load:,}", *([f"{gets[n]:,}"] if gets else [])]
        for n, (name, load) in enumerate(zip(names, loads, strict=True))
    ]
    yield from table(header, rows, numbers=(1, 2))
    yield "</details></section>"


def _name(side: Holdings, holder: int) -> str:
    """What a holder is: a rank with its place in the mesh, or a number with its file."""
    if side.unit == "file":
        lost = ", missing" if holder in side.missing else ""
        return f"{holder}: {side.files[holder]}{lost}"
    if side.mesh is None or holder >= side.mesh.size:
        return f"rank {holder}"
    return f"rank {holder}: {place_words(side.mesh, holder)}"


def _lines(side: Holdings, holders: int) -> Iterator[range]:
    """The rows of a mesh, cut where they are too long for a page: 32 small numbers fit on each."""
    longest = 32 if holders <= 100 else 16
    across = side.mesh.shape[-1] if side.mesh is not None and side.mesh.shape else holders
    for start in range(0, holders, max(1, across)):
        end = min(start + across, holders)
        for first in range(start, end, longest):
            yield range(first, min(first + longest, end))


# ------------------------------------------------------------------------------------- the tensors


def _rows(sides: Sequence[Side], after: Moved | None, damaged: frozenset[str]) -> Iterator[str]:
    """A row for tensors with the same pieces and holders, folded: it opens to pieces and names."""
    moves: dict[str, int] = {}
    if after is not None:
        names = (held.fqn for held in after.holdings.tensors)
        moves = dict(zip(names, after.by_tensor, strict=True))
    later = [{held.fqn: held for held in side.tensors} for _, side in sides[1:]]
    yield _TOOLS
    words = ["name", "shape", "bytes", "who holds what", *(["moves"] if later else [])]
    cells = (f'<span class="{"n" if w in ("bytes", "moves") else ""}">{w}</span>' for w in words)
    yield f'<div{" class=two" if later else ""}><div class="row heads">{"".join(cells)}</div>'
    budget = _BUDGET
    for row in fold.rows(*(side for _, side in sides)):
        then = [
            [held_of[held.fqn] for held in row.tensors if held.fqn in held_of] for held_of in later
        ]
        drawn = [
            (side, same) for side, same in zip(sides, [row.tensors, *then], strict=True) if same
        ]
        budget -= sum(min(len(same[0].pieces), _MAX_PIECES) for _, same in drawn)
        moved = sum(moves.get(held.fqn, 0) for held in row.tensors) if later else None
        yield "<details class=row><summary>" + _facts(row, moved=moved, damaged=damaged)
        bars = (_bar(side, same[0], fits=budget > 0) for side, same in drawn)
        yield f"<span>{''.join(bars)}</span></summary>"
        for side, same in drawn:
            yield from _pieces(side, same, fits=budget > 0)
        if len(row.tensors) > 1:
            listed = "\n".join(text(one.fqn) for one in row.tensors)
            yield f'<pre class="names wrap">{listed}</pre>'
        yield "</details>"
    yield "</div>"


def _facts(row: fold.Row, *, moved: int | None, damaged: frozenset[str]) -> str:
    """The cells of a row that are words."""
    bad = sum(held.fqn in damaged for held in row.tensors)
    marks = f'<span class="quiet">{row.times}</span>'
    if bad:
        marks += f' <b class="bad">{"damaged" if len(row.tensors) == 1 else f"{bad:,} damaged"}</b>'
    shape = text(f"{short_shape(row.first.shape)} {row.first.dtype.name}")
    last = "" if moved is None else f'<span class="n moves">{format_size(moved)}</span>'
    return (
        f'<span><b class="name">{text(row.label)}</b>{marks}</span><span class="quiet">{shape}'
        f'</span><span class="n">{format_size(row.nbytes)}</span>{last}'
    )


def _bar(titled: Side, held: HeldTensor, *, fits: bool) -> str:
    """The pieces of a tensor in place, with their holders; a sentence when they are many."""
    title, side = titled
    lead = f'<small class="quiet">{title}</small> ' if title else ""
    if not held.pieces:
        words = "all of it is missing" if held.nbytes else "no elements"
        return f'<span class="side">{lead}{words}</span>'
    if not fits or len(held.pieces) > _MAX_DRAWN:
        who = rank_spans(sorted({n for piece in held.pieces for n in piece.holders})) or "unknown"
        words = f"{counted(len(held.pieces), 'piece')} of {side.unit}s {who}"
        return f'<span class="side">{lead}<span>{words}</span></span>'
    drawn = rects(held.pieces, held.shape)
    lines = min(8, round(1 / min(rect.height for rect in drawn)))
    parts = []
    for rect in drawn:
        lost = " lost" if rect.piece.file in side.missing else ""
        style = "nobody" if rect.holder is None else colors.classes(rect.holder)
        placed = (
            f"left:{rect.x:.4%};width:{rect.width:.4%};top:{rect.y:.4%};height:{rect.height:.4%}"
        )
        hover = f"{side.unit} {rank_spans(rect.piece.holders) or 'unknown'} {rect.piece.box}"
        parts.append(f'<i class="{style}{lost}" style="{placed}" title="{hover}">{rect.label}</i>')
    height = max(18, 12 * lines)
    stored = sum(piece.box.numel for piece in held.pieces) * held.dtype.itemsize
    holed = " holed" if stored < held.nbytes else ""
    bar = f'<span class="bar{holed}" style="height:{height}px">{"".join(parts)}</span>'
    return f'<span class="side">{lead}{bar}</span>'


def _pieces(titled: Side, same: Sequence[HeldTensor], *, fits: bool) -> Iterator[str]:
    """A table of the pieces: who holds each, its box, its bytes, and its files in all of these."""
    (title, side), held = titled, same[0]
    words = ": ".join(filter(None, [title, ", ".join(held.placements)]))
    yield f'<p class="quiet">{text(words)}</p>' if words else ""
    if not fits:
        yield '<p class="quiet"><code>ckpt-tools layout CKPT NAME</code> lists its pieces.</p>'
        return
    kinds = {id(one.pieces): one.pieces for one in same}.values()
    rows = []
    for number, piece in enumerate(islice(held.pieces, _MAX_PIECES)):
        # In tensors of one row it may lie in several files.
        files = {pieces[number].file for pieces in kinds}
        known = sorted(file for file in files if file is not None)
        names = [f"{side.files[n]}{' (missing)' if n in side.missing else ''}" for n in known]
        rows.append((*piece_cells(piece, held), some(names, 3) or "-"))
    yield from table((f"{side.unit}s", "box", "bytes", "file"), rows, numbers=[2])
    if len(held.pieces) > len(rows):
        yield f'<p class="quiet">and {len(held.pieces) - len(rows):,} more</p>'
