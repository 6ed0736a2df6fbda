"""Who holds what as one SVG picture: light or dark as its reader is, with its facts on hovering.

It stands alone: no script, no font, no network. It knows nothing of options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import islice

from ckpt_tools.analysis.ownership import (
    Held,
    Holdings,
    Moved,
    bytes_held,
    skew_of,
)
from ckpt_tools.cli.entries import short_shape
from ckpt_tools.cli.pictures import colors, fold
from ckpt_tools.cli.pictures.shapes import Rect, rects
from ckpt_tools.cli.render import cut_to, printable
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.text import counted, format_size, rank_spans

_WIDTH, _MARGIN = 1080, 24
_ROW, _BAR_HEIGHT, _BAR_LEFT = 24, 16, 640
_NAME, _SHAPE = 44, 24  # letters
_MAX_ROWS, _MAX_CELLS, _MAX_LOADS = 64, 256, 64
_CELL, _LOAD_HEIGHT = 26, 64

_STYLE = """
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#1f2328}
.h{font-weight:600}.q{fill:#59636e}.t{font-size:16px;font-weight:600}
.page{fill:#fff}.box{stroke:#fff;stroke-width:1}.in{font-size:10px;text-anchor:middle}
.r{text-anchor:end}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}.q{fill:#9198a1}.page{fill:#0d1117}.box{stroke:#0d1117}}
.ink0{fill:#111}.ink1{fill:#fff}
"""


def svg(
    root: str, before: Holdings, *, target: Holdings | None = None, change: Moved | None = None
) -> str:
    """The picture of a checkpoint, and of the same after a reshard when there is a target."""
    parts: list[str] = [_text(_MARGIN, 36, root, style="t")]
    sides = [before] if target is None else [before, target]
    width = (_WIDTH - 2 * _MARGIN) // len(sides)
    bottom = 48
    for place, side in enumerate(sides):
        lines = list(_head(side, left=_MARGIN + place * width, width=width - 24))
        parts += [text for _, text in lines]
        bottom = max([bottom, *(low for low, _ in lines)])
    if change is not None and target is not None:
        parts.append(_text(_MARGIN, bottom + 28, _moved_words(target, change), style="h"))
        bottom += 28
    drawn, height = _rows(before, target, top=bottom + 36)
    return _document([*parts, *drawn], height=height + _MARGIN)


def _document(parts: Sequence[str], *, height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">'
    )
    page = f'<rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", page, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, style: str = "") -> str:
    known = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}"{known}>{escape(printable(text))}</text>'


def _moved_words(target: Holdings, change: Moved) -> str:
    share = change.nbytes / (sum(bytes_held(target)) or 1)
    return (
        f"{format_size(change.nbytes)} move, {share:.0%} of what the new ranks hold, "
        "if rank n stays where it is"
    )


def _head(side: Holdings, *, left: int, width: int) -> Iterator[tuple[int, str]]:
    """The mesh and the bytes of each holder: bottom edges and elements."""
    top = 64
    if side.mesh is not None:
        how = {"confirmed": ", confirmed", "inferred": ", inferred"}.get(side.status or "", "")
        yield top, _text(left, top, f"mesh {side.mesh}{how}", style="h")
        for low, element in _mesh(side.mesh, left=left, top=top + 12, width=width):
            yield low, element
            top = max(top, low)
        top += 28
    yield from _loads(side, left=left, top=top, width=width)


def _mesh(mesh: Mesh, *, left: int, top: int, width: int) -> Iterator[tuple[int, str]]:
    """The ranks of a mesh as squares in rows of its last dimension."""
    if mesh.size > _MAX_CELLS:
        yield top + 16, _text(left, top + 14, counted(mesh.size, "rank"), style="q")
        return
    across = min(mesh.shape[-1] if mesh.shape else 1, width // _CELL)
    for rank in range(mesh.size):
        x = left + rank % across * _CELL
        y = top + rank // across * _CELL
        yield y + _CELL, _square(x, y, rank, hover=f"rank {rank}: {_place(mesh, rank)}")


def _place(mesh: Mesh, rank: int) -> str:
    names = mesh.dim_names or tuple(f"dim{dim}" for dim in range(len(mesh.shape)))
    pairs = zip(names, mesh.coordinate(rank), strict=True)
    return ", ".join(f"{name}={index}" for name, index in pairs)


def _square(x: float, y: float, rank: int, *, hover: str) -> str:
    ink = "ink1" if colors.ink(rank) == "#fff" else "ink0"
    return (
        f'<g><title>{escape(hover)}</title><rect class="box" x="{x:g}" y="{y:g}" width="{_CELL}" '
        f'height="{_CELL}" fill="{colors.fill(rank)}"/>'
        f'<text class="in {ink}" x="{x + _CELL / 2:g}" y="{y + 17:g}">{rank}</text></g>'
    )


def _loads(side: Holdings, *, left: int, top: int, width: int) -> Iterator[tuple[int, str]]:
    """A column of bytes for each holder, and the skew."""
    totals = bytes_held(side)
    skew = skew_of(totals)
    average = "" if skew is None or len(totals) < 2 else f", {skew:.2f} × the average"
    fullest = format_size(max(totals, default=0))
    yield top, _text(left, top, f"bytes per {side.unit}: {fullest} the most{average}", style="h")
    shown = totals[:_MAX_LOADS]
    most = max(totals, default=0) or 1
    step = min(_CELL, width // max(1, len(shown)))
    base = top + 14 + _LOAD_HEIGHT
    for holder, nbytes in enumerate(shown):
        height = max(1.0, _LOAD_HEIGHT * nbytes / most)
        name = f"rank {holder}" if side.unit == "rank" else side.files[holder]
        yield (
            base,
            _column(
                left + holder * step,
                base,
                size=(step, height),
                holder=holder,
                words=f"{name}: {nbytes:,}",
            ),
        )
    if len(totals) > len(shown):
        rest = f"and {len(totals) - len(shown):,} more"
        yield base + 18, _text(left, base + 16, rest, style="q")


def _column(x: int, base: int, *, size: tuple[int, float], holder: int, words: str) -> str:
    width, height = size
    return (
        f'<rect class="box" x="{x}" y="{base - height:g}" width="{width}" height="{height:g}" '
        f'fill="{colors.fill(holder)}"><title>{escape(printable(words))} bytes</title></rect>'
    )


def _rows(before: Holdings, target: Holdings | None, *, top: int) -> tuple[list[str], int]:
    """A bar for each row of tensors, or two; and where the last one ends."""
    rows = fold.rows(before.tensors)
    later = {} if target is None else {held.fqn: held for held in target.tensors}
    room = _WIDTH - _MARGIN - _BAR_LEFT
    bar = room if target is None else (room - 16) // 2
    parts: list[str] = []
    if target is not None:
        parts.append(_text(_BAR_LEFT, top, "before", style="q"))
        parts.append(_text(_BAR_LEFT + bar + 16, top, "after", style="q"))
        top += 10
    for row in islice(rows, _MAX_ROWS):
        parts += _row_texts(row, top=top)
        parts += _bar(row.first, before, left=_BAR_LEFT, top=top, width=bar)
        if target is not None and row.first.fqn in later:
            then = later[row.first.fqn]
            parts += _bar(then, target, left=_BAR_LEFT + bar + 16, top=top, width=bar)
        top += _ROW
    if len(rows) > _MAX_ROWS:
        rest = f"and {len(rows) - _MAX_ROWS:,} more rows; layout --html has all"
        parts.append(_text(_MARGIN, top + 14, rest, style="q"))
        top += _ROW
    return parts, top


def _row_texts(row: fold.Row, *, top: int) -> list[str]:
    times = f" ×{row.tensors:,}" if row.tensors > 1 else ""
    label = _middle_out(printable(row.label), _NAME - len(times)) + times
    shape = f"{short_shape(row.first.shape)} {row.first.dtype.name}"
    y = top + 13
    return [
        f"<g><title>{escape(printable(row.label))}</title>{_text(_MARGIN, y, label)}</g>",
        _text(_MARGIN + 356, y, cut_to(shape, _SHAPE), style="q"),
        _text(_BAR_LEFT - 8, y, format_size(row.nbytes), style="q r"),
    ]


def _middle_out(text: str, size: int) -> str:
    """A name of at most ``size`` letters: its end tells more than its middle."""
    if len(text) <= size:
        return text
    head = size // 3
    return f"{text[:head]}…{text[len(text) - (size - head - 1) :]}"


def _bar(held: Held, side: Holdings, *, left: int, top: int, width: int) -> Iterator[str]:
    found = rects(held.pieces, held.shape)
    if len(found) > width:
        words = counted(len(held.pieces), "piece")
        yield _text(left, top + 13, words, style="q")
        return
    for rect in found:
        yield _piece(rect, held, side=side, place=(left, top, width))


def _piece(rect: Rect, held: Held, *, side: Holdings, place: tuple[int, int, int]) -> str:
    left, top, width = place
    x, wide = left + rect.x * width, rect.width * width
    y, high = top + rect.y * _BAR_HEIGHT, rect.height * _BAR_HEIGHT
    color = colors.NOBODY if rect.holder is None else colors.fill(rect.holder)
    number = ""
    if rect.holder is not None and wide > 9 * len(str(rect.holder)) and high > 10:
        ink = "ink1" if colors.ink(rect.holder) == "#fff" else "ink0"
        middle = f'x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}"'
        number = f'<text class="in {ink}" {middle}>{rect.holder}</text>'
    return (
        f"<g><title>{escape(_facts(rect, held, side=side))}</title>"
        f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
        f'fill="{color}"/>{number}</g>'
    )


def _facts(rect: Rect, held: Held, *, side: Holdings) -> str:
    """What hovering over a piece says."""
    piece = rect.piece
    lines = [f"{printable(held.fqn)} {piece.box}"]
    if side.unit == "rank":
        lines.append(f"rank {rank_spans(piece.holders) or 'unknown'}")
    lines.append(f"{piece.box.numel * held.dtype.itemsize:,} bytes")
    if piece.file is not None:
        lines.append(printable(side.files[piece.file]))
    return "\n".join(lines)
