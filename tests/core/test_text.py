"""Sizes, counts and lists as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.text import counted, first_of, format_size, parse_size, rank_spans, some


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("7B", 7),
        ("5GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        (" 500 MB ", 500 * 10**6),
        ("2GiB", 2 * 2**30),
        ("64kib", 64 * 2**10),
        ("1.5TB", 15 * 10**11),
        ("0.1GB", 10**8),
    ],
)
def test_units_are_decimal_unless_they_have_an_i(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "5G", "5 apples", "-1", "1e9", "5GB5", "0", "0.5B", "nan", "five GB", "7"]
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|of what"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (4_984, "4.98 KB"),
        (16_060_522_240, "16.1 GB"),
        (123_456_789, "123 MB"),
        (7 * 10**18, "7000 PB"),
    ],
)
def test_three_digits_are_shown(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(1, 10**17))
def test_what_is_shown_can_be_read_back_within_a_percent(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 tensors"), (1, "1 tensor"), (1234, "1,234 tensors")]
)
def test_only_one_is_singular(number: int, text: str) -> None:
    assert counted(number, "tensor") == text


@pytest.mark.parametrize(
    ("count", "line"),
    [(0, ""), (1, "a"), (2, "a, a"), (3, "a, a and 1 more"), (1236, "a, a and 1,234 more")],
)
def test_a_long_list_says_how_many_are_left_out(count: int, line: str) -> None:
    assert some(["a"] * count, 2) == line


def test_lines_that_are_left_out_are_counted_in_a_line_of_their_own() -> None:
    assert first_of(["a", "b", "c"], 3) == ["a", "b", "c"]
    assert first_of(["a", "b", "c", "d"], 2) == ["a", "b", "and 2 more"]


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2,5,7-8")]
)
def test_ranks_are_told_as_spans(ranks: list[int], text: str) -> None:
    assert rank_spans(ranks) == text
    assert rank_spans(ranks, comma=", ") == text.replace(",", ", ")
