"""Values that are no tensors."""

import math

import pytest

from ckpt_tools.core.plain_values import PlainValue, are_same

VALUES = [b"ab", "ab", 1, 1.0, True, None, [1, "a"], {"a": (1,)}, math.nan]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_is_the_same_as_an_equal_one_of_its_type(value: PlainValue) -> None:
    again = {"a": (1,)} if isinstance(value, dict) else value
    assert are_same(value, again)


@pytest.mark.parametrize(
    ("one", "other"),
    [(b"ab", b"aB"), (b"ab", "ab"), (1, True), (1, 1.0), ([1], (1,)), (0.0, -0.0), (None, b"")],
)
def test_values_that_differ_in_type_alone_are_not_the_same(
    one: PlainValue, other: PlainValue
) -> None:
    assert not are_same(one, other)
    assert not are_same(other, one)
