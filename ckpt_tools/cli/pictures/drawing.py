"""Who holds what as one SVG picture: light or dark as its reader is, with its facts on hovering.

It stands alone: no script, no font, no network. It knows nothing of options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import islice

from ckpt_tools.analysis.ownership import HeldTensor, Holdings, bytes_held, skew_of
from ckpt_tools.cli.entries import short_shape
from ckpt_tools.cli.pictures import colors, fold
from ckpt_tools.cli.pictures.shapes import Rect, rects
from ckpt_tools.cli.pictures.text import After, moved_words, place_words
from ckpt_tools.cli.render import cut_to
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.text import counted, format_size, rank_spans
from ckpt_tools.errors import printable

_WIDTH, _MARGIN = 1080, 24
_ROW, _BAR_HEIGHT, _BAR_LEFT = 30, 22, 640
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
.ink0{fill:#111}.ink1{fill:#fff}.lost{fill:none;stroke:#d1242f;stroke-dasharray:3}
"""


def svg(root: str, before: Holdings, after: After | None = None) -> str:
    """The picture of a checkpoint, and of the same after a reshard if there is one."""
    parts: list[str] = [_text(_MARGIN, 36, root, style="t")]
    sides = [before] if after is None else [before, after.holdings]
    width = (_WIDTH - 2 * _MARGIN) // len(sides)
    most = max((load for side in sides for load in bytes_held(side)), default=0)
    bottom = 48
    for place, side in enumerate(sides):
        lines = list(_head(side, left=_MARGIN + place * width, width=width - 24, most=most))
        parts += [text for _, text in lines]
        bottom = max([bottom, *(low for low, _ in lines)])
    if after is not None:
        parts.append(_text(_MARGIN, bottom + 28, moved_words(after), style="h"))
        bottom += 28
    words = colors.repeated(max(side.holders for side in sides))
    if words is not None:
        parts.append(_text(_MARGIN, bottom + 28, words, style="q"))
        bottom += 28
    drawn, height = _rows(*sides, top=bottom + 36)
    return _document([*parts, *drawn], height=height + _MARGIN)


def _document(parts: Sequence[str], *, height: int) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">'
    )
    drawn = "".join(parts)
    patterns = [pattern for pattern in dict.fromkeys(_patterns()) if pattern.split('"')[1] in drawn]
    page = f'<rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>'
    return "\n".join([head, f"<style>{_STYLE}</style>", *patterns, page, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, *, style: str = "") -> str:
    known = f' class="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}"{known}>{escape(printable(text))}</text>'


def _head(side: Holdings, *, left: int, width: int, most: int) -> Iterator[tuple[int, str]]:
    """The mesh and the bytes of each holder: bottom edges and elements."""
    top = 64
    if side.mesh is not None:
        how = {"confirmed": ", confirmed", "inferred": ", inferred"}.get(side.status or "", "")
        yield top, _text(left, top, f"mesh {side.mesh}{how}", style="h")
        for low, element in _mesh(side.mesh, left=left, top=top + 12, width=width):
            yield low, element
            top = max(top, low)
        top += 28
    yield from _loads(side, (left, top, width), most=most)


def _mesh(mesh: Mesh, *, left: int, top: int, width: int) -> Iterator[tuple[int, str]]:
    """The ranks of a mesh as squares in rows of its last dimension."""
    if mesh.size > _MAX_CELLS:
        yield top + 16, _text(left, top + 14, counted(mesh.size, "rank"), style="q")
        return
    across = min(mesh.shape[-1] if mesh.shape else 1, width // _CELL)
    for rank in range(mesh.size):
        x = left + rank % across * _CELL
        y = top + rank // across * _CELL
        yield y + _CELL, _square(x, y, rank, hover=f"rank {rank}: {place_words(mesh, rank)}")


def _square(x: float, y: float, rank: int, *, hover: str) -> str:
    ink = "ink1" if colors.ink(rank) == "#fff" else "ink0"
    return (
        f"<g><title>{escape(hover)}</title>{_box((x, y, _CELL, _CELL), rank)}"
        f'<text class="in {ink}" x="{x + _CELL / 2:g}" y="{y + 17:g}">{rank}</text></g>'
    )


def _box(place: tuple[float, float, float, float], holder: int | None) -> str:
    """A rectangle in the colour and the stripes of a holder."""
    where = _where(place)
    color = colors.NOBODY if holder is None else colors.fill(holder)
    drawn = f'<rect class="box" {where} fill="{color}"/>'
    if holder is None or not colors.stripe(holder):
        return drawn
    return f'{drawn}<rect {where} fill="url(#{_stripes(holder)})"/>'


def _where(place: tuple[float, float, float, float]) -> str:
    sides = zip(("x", "y", "width", "height"), place, strict=True)
    return " ".join(f'{side}="{round(value, 1):g}"' for side, value in sides)


def _stripes(holder: int) -> str:
    return f"s{colors.stripe(holder)}{colors.away(holder)[1]}"


def _patterns() -> Iterator[str]:
    """The stripes of every kind, in the colours that they have on dark and on light ones."""
    for holder in range(len(colors.HEX), colors.DISTINCT):
        degrees = colors.STRIPES[colors.stripe(holder) - 1]
        yield (
            f'<pattern id="{_stripes(holder)}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({degrees})"><rect width="6" height="2" '
            f'fill="{colors.away(holder)}"/></pattern>'
        )


def _loads(side: Holdings, place: tuple[int, int, int], *, most: int) -> Iterator[tuple[int, str]]:
    """A column of bytes for each holder, and the skew; ``most`` bytes are a full column."""
    left, top, width = place
    totals = bytes_held(side)
    skew = skew_of(totals)
    average = "" if skew is None or len(totals) < 2 else f", {skew:.2f} × the average"
    fullest = format_size(max(totals, default=0))
    yield top, _text(left, top, f"bytes per {side.unit}: {fullest} the most{average}", style="h")
    shown = totals[:_MAX_LOADS]
    step = min(_CELL, width // max(1, len(shown)))
    base = top + 14 + _LOAD_HEIGHT
    for holder, nbytes in enumerate(shown):
        height = max(1.0, _LOAD_HEIGHT * nbytes / (most or 1))
        name = f"rank {holder}" if side.unit == "rank" else side.files[holder]
        column = _box((left + holder * step, base - height, step, height), holder)
        hover = escape(printable(f"{name}: {nbytes:,}"))
        yield base, f"<g><title>{hover} bytes</title>{column}</g>"
    if len(totals) > len(shown):
        rest = f"and {len(totals) - len(shown):,} more"
        yield base + 18, _text(left, base + 16, rest, style="q")


def _rows(before: Holdings, target: Holdings | None = None, *, top: int) -> tuple[list[str], int]:
    """A bar for each row of tensors, or two; and where the last one ends."""
    rows = fold.rows(before, target)
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
    label = _middle_out(printable(row.label), _NAME - len(row.times)) + row.times
    shape = f"{short_shape(row.first.shape)} {row.first.dtype.name}"
    y = top + 16
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


def _bar(held: HeldTensor, side: Holdings, *, left: int, top: int, width: int) -> Iterator[str]:
    drawn = rects(held.pieces, held.shape)
    if len(drawn) > width:
        words = counted(len(held.pieces), "piece")
        yield _text(left, top + 16, words, style="q")
        return
    for rect in drawn:
        yield _piece(rect, held, side=side, place=(left, top, width))


def _piece(rect: Rect, held: HeldTensor, *, side: Holdings, place: tuple[int, int, int]) -> str:
    left, top, width = place
    x, wide = left + rect.x * width, rect.width * width
    y, high = top + rect.y * _BAR_HEIGHT, rect.height * _BAR_HEIGHT
    number, ink, drawn = "", "ink0", _box((x, y, wide, high), rect.holder)
    if rect.piece.file in side.missing:
        ink, drawn = "", f'<rect class="lost" {_where((x, y, wide, high))}/>'
    elif rect.holder is not None and colors.ink(rect.holder) == "#fff":
        ink = "ink1"
    if wide > 9 * len(rect.label) and high > 9:
        middle = f'x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}"'
        number = f'<text class="in {ink}" {middle}>{rect.label}</text>'
    return f"<g><title>{escape(_facts(rect, held, side=side))}</title>{drawn}{number}</g>"


def _facts(rect: Rect, held: HeldTensor, *, side: Holdings) -> str:
    """What hovering over a piece says."""
    piece = rect.piece
    lines = [f"{printable(held.fqn)} {piece.box}"]
    if side.unit == "rank":
        lines.append(f"rank {rank_spans(piece.holders) or 'unknown'}")
    lines.append(f"{piece.box.numel * held.dtype.itemsize:,} bytes")
    if piece.file is not None:
        lost = " (missing)" if piece.file in side.missing else ""
        lines.append(printable(side.files[piece.file]) + lost)
    return "\n".join(lines)
