"""Pictures: one self-contained file each, true at any size, and a browser opens them."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import browser
import builders
import pytest

from ckpt_tools.analysis.ownership import (
    Held,
    Holdings,
    Piece,
    after,
    holdings_of,
    moved,
)
from ckpt_tools.analysis.summary import mesh_of
from ckpt_tools.cli.pictures import colors, drawing, fold, shapes, text
from ckpt_tools.cli.pictures.page import layout_page
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.layout import Layout, Mesh, Replicate, Shard

HSDP = Layout(Mesh((2, 4)), (Replicate(), Shard(0)))
GRID = Layout(Mesh((2, 2)), (Shard(0), Shard(1)))
needs_browser = pytest.mark.skipif(browser.BROWSER is None, reason="needs chromium")


def _holdings(layers: int, *, layout: Layout = HSDP, extra: tuple[str, ...] = ()) -> Holdings:
    names = [f"model.layers.{n}.{part}.weight" for n in range(layers) for part in ("wq", "wk")]
    tensors = [builders.tensor(name, (16, 8), layout=layout) for name in (*names, *extra)]
    index = builders.index(*tensors, world_size=layout.mesh.size)
    return holdings_of(index, mesh_of(index))


def _data(page: str) -> dict[str, object]:
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    value = json.loads(found[1])
    assert isinstance(value, dict)
    return value


def test_layers_that_are_held_alike_are_one_row() -> None:
    rows = fold.rows(_holdings(32).tensors)
    assert {(row.label, row.tensors) for row in rows} == {
        ("model.layers.{0-31}.wq.weight", 32),
        ("model.layers.{0-31}.wk.weight", 32),
    }


def test_numbers_inside_of_a_word_are_not_folded() -> None:
    tensors = _holdings(0, extra=("ffn.w1.weight", "ffn.w2.weight")).tensors
    assert [row.label for row in fold.rows(tensors)] == ["ffn.w1.weight", "ffn.w2.weight"]


def test_rectangles_of_a_grid_tile_the_unit_square() -> None:
    held = _holdings(1, layout=GRID).tensors[0]
    found = shapes.rects(held.pieces, held.shape)
    assert sum(rect.width * rect.height for rect in found) == pytest.approx(1)
    assert {(rect.x, rect.y) for rect in found} == {(0, 0), (0.5, 0), (0, 0.5), (0.5, 0.5)}


def test_replicas_share_their_rectangle() -> None:
    held = _holdings(1).tensors[0]
    found = [rect for rect in shapes.rects(held.pieces, held.shape) if rect.x == 0]
    assert [(rect.y, rect.height, rect.holder) for rect in found] == [(0, 0.5, 0), (0.5, 0.5, 4)]


def test_a_bar_has_exactly_its_width_and_every_holder() -> None:
    held = _holdings(1, layout=Layout(Mesh((4,)), (Shard(0),))).tensors[0]
    bar = text.bar_of(held, text.plain, size=40)
    assert bar == "│0        │1        │2        │3        │"


def test_more_pieces_than_fit_are_counted() -> None:
    pieces = tuple(Piece(Box((n,), (1,)), (n,)) for n in range(512))
    from ckpt_tools.core.dtypes import dtype_named

    held = Held("w", dtype_named("int8"), (512,), pieces)
    assert "512 pieces of 0-511" in text.bar_of(held, text.plain, size=40)


def test_neighbouring_ranks_have_different_colours_and_readable_letters() -> None:
    assert len(set(colors.HEX)) == 8
    assert all(_contrast(colors.fill(n), colors.ink(n)) >= 4.5 for n in range(8))


def _contrast(first: str, second: str) -> float:
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    digits = color[1:] if len(color) == 7 else "".join(c * 2 for c in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_an_svg_is_well_formed_and_says_who_holds_what() -> None:
    root = ET.fromstring(drawing.svg("run", _holdings(2)))  # noqa: S314 - our own
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any("[0:4, 0:8]" in title and "rank 0,4" in title for title in titles)


def test_an_svg_of_many_layers_is_no_longer_than_one_of_few() -> None:
    assert len(drawing.svg("run", _holdings(500))) < 30_000


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "a&b", '"><img src=x>', "\x1b[2J"]
)
def test_names_cannot_become_markup(hostile: str) -> None:
    found = _holdings(0, extra=(hostile,))
    ET.fromstring(drawing.svg(hostile, found))  # noqa: S314 - our own
    page = layout_page(hostile, found)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "\x1b" not in page


def test_a_page_needs_no_network() -> None:
    page = layout_page("run", _holdings(2))
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", page)


def test_a_page_lists_each_way_of_being_cut_once() -> None:
    data = _data(layout_page("run", _holdings(100)))
    sides = data["sides"]
    assert isinstance(sides, list)
    assert len(sides[0]["kinds"]) == 1
    assert len(sides[0]["kind"]) == 200


def test_the_same_holdings_give_the_same_bytes() -> None:
    assert layout_page("run", _holdings(3)) == layout_page("run", _holdings(3))


@needs_browser
@pytest.mark.slow
def test_a_browser_opens_a_page_without_a_word_on_the_console(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(layout_page("run", _holdings(2)))
    opened = browser.open_page(tmp_path / "page.html")
    assert opened.console == []
    assert "data-ready" in opened.html
    assert opened.html.count('class="row"') == 4


@needs_browser
@pytest.mark.slow
def test_the_search_field_chooses_by_all_of_its_words(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(layout_page("run", _holdings(20)))
    opened = browser.open_page(tmp_path / "page.html", fragment="q=layers.1%20WQ")
    assert "11 of 40 tensors" in opened.html  # 1 and 10 to 19
    assert opened.console == []


@needs_browser
@pytest.mark.slow
def test_a_page_before_and_after_shows_both_and_what_moves(tmp_path: Path) -> None:
    before = _holdings(2)
    target = after(before, Mesh((2,)), {held.fqn: None for held in before.tensors})
    change = moved(before, target)
    (tmp_path / "page.html").write_text(layout_page("run", before, target=target, change=change))
    opened = browser.open_page(tmp_path / "page.html", fragment="tensor=model.layers.1.wq.weight")
    assert opened.console == []
    assert opened.html.count('class="mesh"') == 2
    assert "3.07 KB move" in opened.html


@needs_browser
@pytest.mark.slow
def test_a_hundred_thousand_tensors_open_in_three_seconds(tmp_path: Path) -> None:
    held = _holdings(1).tensors[0]
    names = sorted(f"model.layers.{n // 9}.part{n % 9}.weight" for n in range(100_000))
    tensors = tuple(held._replace(fqn=name) for name in names)
    found = Holdings("rank", 8, HSDP.mesh, "inferred", ("a",) * 8, tensors)
    (tmp_path / "page.html").write_text(layout_page("run", found))
    opened = browser.open_page(tmp_path / "page.html")
    ready = re.search(r'data-ready="(\d+)"', opened.html)
    assert ready is not None
    assert int(ready[1]) < 3000
    assert opened.html.count('class="row') < 200
