"""Pictures: one self-contained file each, true at any size, and a browser opens them."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import browser
import builders
import pytest

from ckpt_tools._version import __version__
from ckpt_tools.analysis.inspection import inspect
from ckpt_tools.analysis.ownership import (
    HeldBox,
    HeldTensor,
    Holdings,
    after,
    holdings_of,
    moved,
)
from ckpt_tools.analysis.summary import mesh_of
from ckpt_tools.cli.pictures import colors, fold, shapes, text
from ckpt_tools.cli.pictures.pages import layout_page
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


def _page(found: Holdings, *, root: str = "run", target: Holdings | None = None) -> str:
    told = inspect(replace(builders.index(), root=root), step=None, saved=0.0)
    after = None if target is None else moved(found, target)
    return layout_page(told, found, after)


def _ranks(count: int, *, layers: int = 1) -> Holdings:
    return _holdings(layers, layout=Layout(Mesh((count,)), (Shard(0),)))


def test_layers_that_are_held_alike_are_one_row() -> None:
    rows = fold.rows(_holdings(32))
    assert {(row.label, len(row.tensors)) for row in rows} == {
        ("model.layers.{0-31}.wq.weight", 32),
        ("model.layers.{0-31}.wk.weight", 32),
    }


def test_numbers_inside_of_a_word_are_not_folded() -> None:
    found = _holdings(0, extra=("ffn.w1.weight", "ffn.w2.weight"))
    assert [row.label for row in fold.rows(found)] == ["ffn.w1.weight", "ffn.w2.weight"]


def test_rectangles_of_a_grid_tile_the_unit_square() -> None:
    held = _holdings(1, layout=GRID).tensors[0]
    found = shapes.rects(held.pieces, held.shape)
    assert sum(rect.width * rect.height for rect in found) == pytest.approx(1)
    assert {(rect.x, rect.y) for rect in found} == {(0, 0), (0.5, 0), (0, 0.5), (0.5, 0.5)}


def test_replicas_share_their_rectangle() -> None:
    held = _holdings(1).tensors[0]
    found = [rect for rect in shapes.rects(held.pieces, held.shape) if rect.x == 0]
    assert [(rect.y, rect.height, rect.holder) for rect in found] == [(0, 0.5, 0), (0.5, 0.5, 4)]


@pytest.mark.parametrize(
    ("holders", "label"), [(range(8), "0-7"), (range(0, 32, 4), "0+7"), ((3,), "3")]
)
def test_many_holders_have_one_label(holders: Sequence[int], label: str) -> None:
    found = shapes.rects([HeldBox(Box((0,), (4,)), tuple(holders))], (4,))
    assert [rect.label for rect in found] == [label]


def test_a_bar_has_exactly_its_width_and_every_holder() -> None:
    held = _holdings(1, layout=Layout(Mesh((4,)), (Shard(0),))).tensors[0]
    bar = text.bar_of(held, text.plain, size=40)
    assert bar == "│0        │1        │2        │3        │"


def test_more_pieces_than_fit_are_counted() -> None:
    pieces = tuple(HeldBox(Box((n,), (1,)), (n,)) for n in range(512))
    from ckpt_tools.core.dtypes import dtype_named

    held = HeldTensor("w", dtype_named("int8"), (512,), (), pieces)
    assert "512 pieces of 0-511" in text.bar_of(held, text.plain, size=40)


def test_neighbouring_ranks_have_different_colours_and_readable_letters() -> None:
    assert len(set(colors.HEX)) == 8
    assert all(_contrast(colors.HEX[n], colors.ink(n)) >= 4.5 for n in range(8))


def _contrast(first: str, second: str) -> float:
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    """As WCAG 2 defines it."""
    digits = color[1:] if len(color) == 7 else "".join(c * 2 for c in color[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", "a&b", '"><img src=x>', "\x1b[2J"]
)
def test_names_cannot_become_markup(hostile: str) -> None:
    found = _holdings(0, extra=(hostile,))
    page = _page(found, root=hostile)
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "\x1b" not in page


def test_a_page_needs_no_network() -> None:
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", _page(_holdings(2)))


def test_the_banner_says_the_verdict_the_format_and_the_date() -> None:
    banner = _page(_holdings(2)).split("</header>")[0]
    assert "complete by its headers" in banner
    assert "DCP directory (torch.distributed.checkpoint) · files of 1970-01-01 00:00 UTC" in banner
    assert f"read by ckpt-tools {__version__}" in banner


def test_without_a_script_a_page_has_every_name_piece_and_file() -> None:
    page = re.sub(r"<script>.*?</script>", "", _page(_holdings(100)), flags=re.DOTALL)
    assert page.count("<details class=row>") == 2
    assert all(f"model.layers.{n}.wq.weight\n" in page for n in range(99))
    for fact in ("0,4", "[4:8, 0:8]", "rank3"):
        assert f"<td>{fact}</td>" in page


def test_the_same_holdings_give_the_same_bytes() -> None:
    assert _page(_holdings(3)) == _page(_holdings(3))


def test_before_and_after_are_drawn_on_one_scale() -> None:
    before, target = _ranks(4), _ranks(2)
    page = _page(before, target=target)
    columns = re.findall(r'<b class="[^"]*" style="height:(\d+)px">', page)
    assert columns == ["24"] * 4 + ["48"] * 2


@pytest.mark.parametrize(("ranks", "lines"), [(32, 1), (64, 2)])
def test_32_ranks_stand_in_a_row(ranks: int, lines: int) -> None:
    drawn = _page(_ranks(ranks)).split('<div class="ranks">')[1].split("</div>")[0]
    assert drawn.count("<p>") == lines
    assert all(f"</b>{n}</i>" in drawn for n in range(ranks))


def test_colours_do_not_repeat_without_a_word() -> None:
    assert len({colors.classes(n) for n in range(32)}) == 32
    assert "repeat after 32" not in _page(_ranks(32))
    assert "repeat after 32" in _page(_ranks(33))


def test_a_piece_says_who_holds_it() -> None:
    many = _holdings(1, layout=Layout(Mesh((64, 2)), (Replicate(), Shard(0))))
    assert ">0+63</i>" in _page(many)
    assert all(f">{n}</i>" in _page(_holdings(1)).split("<details class=row>")[1] for n in range(8))


def test_a_piece_in_a_missing_file_is_drawn_as_lost() -> None:
    found = _ranks(4)
    page = _page(replace(found, missing=frozenset({2})))
    assert page.count(' lost"') == 2  # of two kinds of tensor
    assert "rank2 (missing)" in page


def test_rows_that_no_rank_holds_are_drawn_as_a_hole() -> None:
    found = _ranks(4)
    assert "holed" not in _page(found).split("</style>")[1]
    held = found.tensors[0]
    hole = held._replace(pieces=held.pieces[:2] + held.pieces[3:])
    assert '<span class="bar holed"' in _page(replace(found, tensors=(hole,)))
    nothing = held._replace(pieces=())
    assert "all of it is missing" in _page(replace(found, tensors=(nothing,)))


def test_tensors_that_lie_otherwise_after_a_reshard_are_rows_of_their_own() -> None:
    before = _ranks(2, layers=2)
    layouts = {held.fqn: Layout(Mesh((2,)), (Shard(0),)) for held in before.tensors}
    layouts["model.layers.1.wq.weight"] = Layout(Mesh((2,)), (Shard(1),))
    target = after(before, Mesh((2,)), layouts)
    assert [row.label for row in fold.rows(before, target)] == [
        "model.layers.{0-1}.wk.weight",
        "model.layers.0.wq.weight",
        "model.layers.1.wq.weight",
    ]


@pytest.mark.slow
def test_what_a_page_draws_is_bounded() -> None:
    layout = Layout(Mesh((256,)), (Shard(0),))
    names = [f"a{number}" for number in range(2_000)]
    tensors = [builders.tensor(name, (256, 2), layout=layout) for name in names]
    found = builders.index(*tensors, world_size=256)
    page = _page(holdings_of(found, mesh_of(found)))
    assert len(page) < 30_000_000
    assert "256 pieces of ranks 0-255" in page


@needs_browser
@pytest.mark.slow
def test_a_browser_opens_a_page_without_a_word_on_the_console(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(_page(_holdings(2)))
    opened = browser.open_page(tmp_path / "page.html")
    assert opened.console == []
    assert "data-ready" in opened.html
    assert "4 of 4 tensors" in opened.html


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "count", "nothing"),
    [("layers.1%20WQ", "11 of 40", 'id="nothing" hidden=""'), ("wv", "0 of 40", 'id="nothing">')],
)
def test_the_filter_chooses_by_all_of_its_words(
    tmp_path: Path, words: str, count: str, nothing: str
) -> None:
    (tmp_path / "page.html").write_text(_page(_holdings(20)))
    opened = browser.open_page(tmp_path / "page.html", fragment=f"q={words}")
    assert f"{count} tensors" in opened.html
    assert nothing in opened.html
    assert opened.console == []


@needs_browser
@pytest.mark.slow
def test_finding_a_name_in_the_page_opens_its_row(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(_page(_holdings(20)))
    text = ":~:text=model.layers.7.wk.weight"

    def opened() -> int:
        found = browser.open_page(tmp_path / "page.html", fragment=text)
        return found.html.count('<details class="row" open="">')

    # It looks for the text once the page is there; what it shows may have been taken before.
    assert any(opened() == 1 for _ in range(5))


@needs_browser
@pytest.mark.slow
def test_a_phone_shows_all_that_a_wide_screen_shows(tmp_path: Path) -> None:
    before, target = _ranks(4, layers=3), _ranks(32, layers=3)
    assert browser.lost_on_a_phone(_page(before, target=target), tmp_path) == ""


@needs_browser
@pytest.mark.slow
def test_a_hundred_thousand_tensors_open_in_three_seconds(tmp_path: Path) -> None:
    held = _holdings(1).tensors[0]
    names = sorted(f"model.layers.{n // 9}.part{n % 9}.weight" for n in range(100_000))
    tensors = tuple(held._replace(fqn=name) for name in names)
    found = Holdings("rank", 8, HSDP.mesh, "inferred", ("a",) * 8, tensors)
    (tmp_path / "page.html").write_text(_page(found))
    opened = browser.open_page(tmp_path / "page.html")
    ready = re.search(r'data-ready="(\d+)"', opened.html)
    assert ready is not None
    assert int(ready[1]) < 3000
    assert opened.html.count('class="row"') == 9
