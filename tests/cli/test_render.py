"""Rows into text: nothing is lost in a pipe, and nothing is too wide for a terminal."""

import csv
import io
import json
import sys

import pytest
from builders import index, tensor, value
from click.testing import CliRunner

from ckpt_tools.analysis.summary import mesh_of
from ckpt_tools.cli import entries, render
from ckpt_tools.cli.ls import tree_lines
from ckpt_tools.core.index import Entry
from ckpt_tools.core.layout import Layout, Mesh, Shard

HEADER = ("NAME", "N", "LAST")
ROWS = [("short", "1", "x"), ("a.much.longer.name", "1000", "y" * 90)]


def test_a_pipe_gets_every_row_on_one_line() -> None:
    header, *rows = render.columns(HEADER, ROWS, align="lrc", width=None)
    assert header.split() == list(HEADER)
    assert [row.split() for row in rows] == [list(row) for row in ROWS]


def test_columns_are_aligned() -> None:
    assert list(render.columns(HEADER[:2], [("a", "1"), ("bb", "20")], align="lr", width=None)) == [
        "NAME   N",
        "a      1",
        "bb    20",
    ]


@pytest.mark.parametrize("width", [30, 40, 80, 200])
def test_a_terminal_is_not_overrun_and_names_stay_whole(width: int) -> None:
    shown = list(render.columns(HEADER, ROWS, align="lrc", width=width))
    assert all(len(line) <= width for line in shown)
    assert any(line.startswith("a.much.longer.name") for line in shown)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_row_that_is_too_wide_goes_on_in_the_next_line(width: int) -> None:
    header = ("NAME", "A", "B", "C", "LAST")
    rows = [("n" * 30, "a" * 18, "b" * 18, "c" * 18, "x" * 40)]
    shown = list(render.columns(header, rows, align="lllrc", width=width))
    assert all(len(line) <= width for line in shown)
    text = " ".join(shown)
    assert all(cell in text for cell in rows[0][:-1])


def test_words_of_a_last_column_wrap_below_it() -> None:
    rows = [("model", "12", "float32 50%, bfloat16 25%, int64 25%")]
    _, first, *more = render.columns(("S", "N", "DTYPES"), rows, align="lrw", width=30)
    assert first == "model  12  float32 50%,"
    assert [line.strip() for line in more] == ["bfloat16 25%, int64", "25%"]
    assert all(line.startswith(" " * 11) for line in more)


def test_facts_wrap_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "terminal_width", lambda: 40)
    shown = list(render.facts([("resume", "yes: model and optimizer state are there")]))
    assert shown == ["  resume      yes: model and optimizer", "              state are there"]


def test_a_small_table_folds_its_widest_column_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(render, "terminal_width", lambda: 40)
    rows = [("0:1", "folder/of/a/file/with/a/very/long/name.distcp", "308")]
    shown = list(render.table(("CHUNK", "FILE", "BYTES"), rows, align="llr"))
    assert all(len(line) <= 40 for line in shown)
    assert len(shown) > 2


def test_only_a_last_column_that_may_be_cut_is_cut() -> None:
    *_, last = render.columns(HEADER, ROWS, align="lrl", width=40)
    assert last.endswith("y" * 90)


def test_a_name_cannot_move_the_cursor() -> None:
    with CliRunner().isolation(color=True) as streams:
        render.emit(["a\x1b[2Jb\n\udcffé", "plain"])
        assert streams[0].getvalue().decode() == "a\\x1b[2Jb\\n\\udcffé\nplain\n"


EVIL = "\x1b]0;x\x07\x9b2J\x7f\n\r\u202e"


def test_all_that_is_shown_of_a_name_is_printable() -> None:
    lines = [
        *render.facts([("name", EVIL), ("names", [EVIL, "plain"])]),
        *render.columns(("A", "B"), [(EVIL, EVIL)], align="ll", width=None),
        *render.columns(("A", "B"), [(EVIL, EVIL)], align="lw", width=40),
        *render.table(("A", "B"), [(EVIL, EVIL)], align="ll"),
        render.heading(EVIL).replace("\x1b[1m", "").replace("\x1b[0m", ""),
    ]
    assert all(map(str.isprintable, lines))
    assert len(lines) > 8


def test_a_very_long_name_makes_no_blanks_in_other_rows() -> None:
    rows = [("x" * 100_000, "1"), *((f"n{number}", "2") for number in range(100))]
    lines = list(render.columns(("NAME", "N"), rows, align="lr", width=None))
    assert lines[1] == "x" * 100_000
    assert sum(map(len, lines)) < 200_000


def test_placements_are_short_words() -> None:
    strided = Layout(Mesh((2, 2)), (Shard(0), Shard(0)), (1, 0))
    assert entries.short_placements(strided) == "_S(0),S(0)"


def test_a_scalar_and_a_missing_value_keep_their_columns() -> None:
    rows = [entries.row(entry, None) for entry in (tensor("s", ()), value("v", None))]
    assert [row[2] for row in rows] == ["[]", "-"]
    assert rows[1][4] == "= null"


def test_what_is_not_opened_is_not_shown_as_a_value() -> None:
    assert entries.row(value("v", None, opened=False), None)[4] == "= (not opened)"


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_json_stays_json_where_numbers_are_none(number: float) -> None:
    told = json.dumps(entries.entry_json(value("v", [number]), None), allow_nan=False)
    assert json.loads(told)["value"] == [str(number)]


def test_a_tree_joins_lonely_parts_and_sorts_numbers_as_numbers() -> None:
    whole = index(
        tensor("layers.10.w", (2,), path=("model", "layers.10.w")),
        tensor("layers.2.w", (2,), path=("model", "layers.2.w")),
        value("extra.note", 1),
    )
    shown = list(tree_lines(entries.in_order(whole), mesh_of(whole)))
    assert [line.split("  ")[0] for line in shown[:2]] == ["├─ extra.note", "└─ model.layers"]
    assert shown[1].endswith("2 tensors of 16 B")
    assert [line.split()[1] for line in shown[2:]] == ["2.w", "10.w"]


def _csv(*listed: Entry) -> str:
    rows = [entries.csv_row(entry, None) for entry in entries.in_order(index(*listed))]
    with CliRunner().isolation() as streams:
        render.emit_csv(entries.CSV_HEADER, rows)
        sys.stdout.flush()
        return streams[0].getvalue().decode()


ODD_NAMES = ["a\nb", "\x1b[31mred", "=1+1", "-x", "@y", 'q",\r', "r\r", "\x7f\u202e\x9b"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_csv_has_names_exactly_in_a_pipe(name: str) -> None:
    text = _csv(tensor(name, (2, 3)), tensor("plain", (1,)))
    read = csv.DictReader(io.StringIO(text, newline=""))
    assert {row["fqn"] for row in read} == {name, "plain"}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_csv_is_printable_on_a_terminal(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", shown)
    rows = [entries.csv_row(tensor(name, (2, 3)), None)]
    render.emit_csv(entries.CSV_HEADER, rows)
    assert shown.getvalue().replace("\n", "").isprintable()
    assert shown.getvalue().count("\n") == 2


@pytest.mark.parametrize("name", ODD_NAMES)
def test_json_is_exact_and_has_no_control_character(name: str) -> None:
    with CliRunner().isolation() as streams:
        render.print_json(name)
        text = streams[0].getvalue().decode()
    assert json.loads(text) == name
    assert text.rstrip("\n").isprintable()


def test_csv_is_read_back_as_it_was() -> None:
    text = _csv(tensor('odd,"name', (2, 3)), value("v", {"a": [1, 2]}))
    read = list(csv.DictReader(io.StringIO(text)))
    assert [row["fqn"] for row in read] == ['odd,"name', "v"]
    assert (read[0]["shape"], read[0]["nbytes"]) == ("[2,3]", "24")
    assert json.loads(read[1]["value"]) == {"a": [1, 2]}
