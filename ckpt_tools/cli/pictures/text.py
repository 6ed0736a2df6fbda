"""Who holds what, for a terminal: the mesh, bytes per rank, a bar per tensor, a grid for one.

Without colour the edges and numbers say the same. It knows nothing of options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ckpt_tools.analysis.ownership import HeldBox, HeldTensor, Holdings, Moved, bytes_held
from ckpt_tools.analysis.summary import skew_of
from ckpt_tools.cli import render
from ckpt_tools.cli.entries import short_shape
from ckpt_tools.cli.pictures.fold import Row
from ckpt_tools.core.geometry import cut_dims
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.text import counted, format_size, rank_spans
from ckpt_tools.errors import printable

_LOAD = 32
_BAR = 40
_GRID_ROWS, _GRID_COLUMNS = 16, 72
_MAX_HOLDERS = 32
_MAX_PIECES = 64

Paint = Callable[[str, int], str]


def plain(text: str, holder: int) -> str:  # noqa: ARG001 - one of two ways to paint
    """The text as it is: for pipes and for NO_COLOR."""
    return text


def mesh_lines(mesh: Mesh, paint: Paint, *, width: int | None) -> Iterator[str]:
    """The ranks of a mesh as a grid: the last dimension across, the one before it down."""
    names = mesh.names
    across = mesh.shape[-1] if mesh.shape else 1
    cell = len(str(mesh.size - 1)) + 2
    downwards = f", {names[-2]} downwards" if len(names) > 1 else ""
    yield f"  {mesh_words(mesh)}: {names[-1]} from left to right{downwards}"
    if mesh.size > 512:
        yield f"  {counted(mesh.size, 'rank')}, not drawn"
        return
    per_line = min(across, max(1, (min(width or 100, 100) - 4) // cell))
    deep = mesh.shape[-2] if len(mesh.shape) > 2 else 0
    for start in range(0, mesh.size, across):
        if deep and start and (start // across) % deep == 0:
            yield ""
        for first in range(start, start + across, per_line):
            ranks = range(first, min(first + per_line, start + across))
            drawn = "".join(paint(str(rank).center(cell), rank) for rank in ranks)
            yield render.Styled(f"  {drawn}")


def mesh_words(mesh: Mesh) -> str:
    """The dimensions of a mesh: ``dp=2 × tp=4``."""
    return " × ".join(f"{name}={size}" for name, size in zip(mesh.names, mesh.shape, strict=True))


def status_words(holdings: Holdings) -> str:
    """How the mesh is known, after it; nothing for one that is asked for."""
    words = {"confirmed": ", confirmed by the files", "inferred": ", inferred from the boxes"}
    return "" if holdings.status is None else words[holdings.status]


def place_words(mesh: Mesh, rank: int) -> str:
    """Where a rank is in a mesh: ``dp=1, tp=0``."""
    places = zip(mesh.names, mesh.coordinate(rank), strict=True)
    return ", ".join(f"{name}={index}" for name, index in places)


def load_lines(holdings: Holdings, paint: Paint) -> Iterator[str]:
    """A bar of bytes for each holder, and how far the fullest is from the average."""
    totals = bytes_held(holdings)
    most = max(totals, default=0)
    yield render.heading(f"Bytes per {holdings.unit}")
    shown: Sequence[int] = range(len(totals))
    if len(totals) > _MAX_HOLDERS:
        order = sorted(shown, key=totals.__getitem__)
        shown = sorted([*order[:4], *order[-4:]])
    names = {
        holder: str(holder) if holdings.unit == "rank" else printable(holdings.files[holder])
        for holder in shown
    }
    width = render.widest(names.values())
    for holder in shown:
        bar = "█" * round(_LOAD * totals[holder] / most) if most else ""
        size = format_size(totals[holder])
        drawn = paint(" " * len(bar), holder) if paint is not plain else bar
        yield render.Styled(f"  {names[holder]:>{width}} {drawn}{' ' * (bool(bar))}{size}")
    if len(totals) > len(shown):
        yield f"  the emptiest and the fullest of {len(totals):,}; --json has all"
    skew = skew_of(totals)
    if skew is not None and len(totals) > 1:
        yield f"  The fullest holds {skew:.2f} times the average."


def bar_lines(rows: Sequence[Row], paint: Paint, *, width: int | None) -> Iterator[str]:
    """A bar for each row, after its name, its shape and its bytes."""
    labels = [f"{printable(row.label)} {row.times}".rstrip() for row in rows]
    shapes = [f"{short_shape(row.first.shape)} {row.first.dtype.name}" for row in rows]
    sizes = [format_size(row.nbytes) for row in rows]
    name, shape, size = (render.widest(texts) for texts in (labels, shapes, sizes))
    beside = max((len(_more(row.first.pieces)) for row in rows), default=0)
    fold = width is not None and name + shape + size + _BAR + beside + 6 > width
    room = 0 if width is None else width - shape - size - beside - 6
    bar = max(8, min(_BAR, room)) if fold else _BAR
    for row, label, shaped, sized in zip(rows, labels, shapes, sizes, strict=True):
        drawn = bar_of(row.first, paint, size=bar)
        facts = f"{shaped:<{shape}}  {sized:>{size}}  {drawn}".rstrip()
        if fold:
            yield label
            yield render.Styled(f"  {facts}")
        else:
            yield render.Styled(f"{label:<{name}}  {facts}")


def bar_of(held: HeldTensor, paint: Paint, *, size: int) -> str:
    """The pieces of a tensor side by side, each as wide as its share, with who holds it."""
    pieces = held.pieces
    if not pieces:
        return "no elements"
    if len(pieces) > size // 2:  # more than fit: a stripe of colours, or only a count
        holders = sorted({holder for piece in pieces for holder in piece.holders})
        spans = rank_spans(holders)
        who = spans if len(spans) < 24 else counted(len(holders), "holder")
        words = f"{counted(len(pieces), 'piece')} of {who}"
        if paint is plain:
            return f"│{words.center(size - 2)}│"
        picked = (pieces[place * len(pieces) // size] for place in range(size))
        return f"{''.join(paint(' ', _first(piece)) for piece in picked)} {words}"
    total = sum(piece.box.numel for piece in pieces)
    bound = "│" if paint is plain else "▏"
    text, done, edge = "", 0, 0
    for piece in pieces:
        done += piece.box.numel
        end = max(edge + 1, round(size * done / total))
        room = end - edge - len(bound)
        labels = [rank_spans(piece.holders) or "?", *map(str, piece.holders[:1]), ""]
        label = next(label for label in labels if len(label) <= room)
        text += paint(f"{bound}{label}".ljust(end - edge), _first(piece))
        edge = end
    return text + (bound if paint is plain else "") + _more(pieces)


def _first(piece: HeldBox) -> int:
    """The holder in whose colour a piece is drawn; grey, that of number 7, for none."""
    return piece.holders[0] if piece.holders else 7


def _more(pieces: Sequence[HeldBox]) -> str:
    """How often each piece is held, where that is more than once."""
    most = max((len(piece.holders) for piece in pieces), default=0)
    return f" {most} replicas" if most > 1 else ""


def grid_lines(held: HeldTensor, paint: Paint, *, width: int | None) -> Iterator[str]:
    """One tensor as a rectangle: its first dimension that is cut downwards, the next across."""
    room = max(12, (width or _GRID_COLUMNS + 4) - 4)
    dims = cut_dims([piece.box for piece in held.pieces], held.shape)
    if len(held.pieces) > _MAX_PIECES or len(dims) > 2 or not held.pieces:
        yield render.Styled("  " + bar_of(held, paint, size=min(_GRID_COLUMNS, room)))
        return
    last = len(held.shape) - 1  # where less is cut, the last dimensions are drawn
    down = next((dim for dim in dims if dim != last), last - 1) if last > 0 else None
    across = dims[1] if len(dims) == 2 else last if held.shape else None
    rows = _edges(held, down, _GRID_ROWS, least=2)
    columns = _edges(held, across, min(_GRID_COLUMNS, room), least=4)
    if down is not None:
        yield f"  dimension {down} downwards" + ("" if across is None else f", {across} across")
    elif across is not None:
        yield f"  dimension {across} across"
    spans = sorted((_extent(p, across, columns), _extent(p, down, rows), p) for p in held.pieces)
    for line in range(max(rows.values(), default=1)):
        drawn = ""
        for (left, right), (top, bottom), piece in spans:
            if not top <= line < bottom:
                continue
            label = f" {rank_spans(piece.holders) or '?'} " if line == top else ""
            corner, fill = ("┌", "─") if line == top else ("│", " ")
            if paint is not plain:
                corner, fill = "▏", " "
            body = f"{corner}{label}"[: right - left].ljust(right - left, fill)
            drawn += paint(body, _first(piece))
        yield render.Styled(f"  {drawn}")


def _edges(held: HeldTensor, dim: int | None, limit: int, *, least: int) -> dict[int, int]:
    """At which line or column of the picture each edge of a piece is drawn."""
    if dim is None:
        return {0: 0, 1: limit if least == 4 else 3}
    spots = {0, held.shape[dim]}
    for piece in held.pieces:
        spots |= {piece.box.offsets[dim], piece.box.ends[dim]}
    drawn, at = {}, 0
    for before, spot in zip([0, *sorted(spots)], sorted(spots), strict=False):
        at += 0 if spot == 0 else max(least, round(limit * (spot - before) / held.shape[dim]))
        drawn[spot] = at
    return drawn


def _extent(piece: HeldBox, dim: int | None, edges: dict[int, int]) -> tuple[int, int]:
    if dim is None:
        return edges[0], edges[1]
    return edges[piece.box.offsets[dim]], edges[piece.box.ends[dim]]


def moved_words(after: Moved) -> str:
    """How much a reshard moves."""
    share = after.nbytes / (sum(bytes_held(after.holdings)) or 1)
    return (
        f"{format_size(after.nbytes)} move, {share:.0%} of what the new ranks hold, "
        "if rank n stays where it is"
    )


def piece_cells(piece: HeldBox, held: HeldTensor) -> tuple[str, str, str]:
    """Who holds a piece, its box and its bytes."""
    nbytes = piece.box.numel * held.dtype.itemsize
    return rank_spans(piece.holders) or "?", str(piece.box), f"{nbytes:,}"


def piece_lines(held: HeldTensor, holdings: Holdings) -> Iterator[str]:
    """A table of the pieces of one tensor: who holds each, its box, its bytes and its file."""
    header = (f"{holdings.unit.upper()}S", "BOX", "BYTES", "FILE")
    rows = [
        (*piece_cells(piece, held), "-" if piece.file is None else holdings.files[piece.file])
        for piece in held.pieces
    ]
    yield ""
    yield from render.columns(header, rows, align="llrl", width=None)
