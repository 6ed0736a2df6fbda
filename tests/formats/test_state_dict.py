"""Nested state dicts become flat entries, whatever a pickle makes of them."""

import pytest

from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.formats.pickle import facts, state_dict
from ckpt_tools.formats.pickle.nodes import Opaque
from ckpt_tools.formats.pickle.state_dict import flatten
from ckpt_tools.formats.pickle.stored import (
    StoredStorage,
    StoredTensor,
)

T = StoredTensor(StoredStorage("0", "float32", 4), "float32", 0, (4,), (1,))


def paths(value: object) -> list[tuple[str | int, ...]]:
    state = flatten(value, where="x.pt")
    return [leaf.path for leaf in (*state.tensors, *state.objects)]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"a": {"b": T}}, [("a", "b")]),
        ({"a": [T, 1]}, [("a", 0), ("a", 1)]),
        ({"a": [1, 2]}, [("a",)]),
        ({"a": [{"b": 1}]}, [("a", 0, "b")]),
        ({"a": [[], [[T]]]}, [("a", 1, 0, 0), ("a", 0)]),
        ({"a": (1, {"b": 2})}, [("a",)]),
        ({"a": (1, {"b": T})}, [("a", 1, "b"), ("a", 0)]),
        ({"a": [({"b": 1},)]}, [("a",)]),
        ({"a": {}}, []),
        ({3: T, None: T, 1.5: T, (0, 1): T}, [("3",), ("None",), ("1.5",), ("(0, 1)",)]),
        ({}, []),
        ({b"key": 1}, [("value",)]),
        (T, [("value",)]),
        ([1, 2], [("value",)]),
        ((T,), [(0,)]),
    ],
)
def test_containers_are_walked_as_dcp_walks_them(
    value: object, found: list[tuple[str | int, ...]]
) -> None:
    assert paths(value) == found


@pytest.mark.parametrize(
    ("value", "type_name"),
    [
        (Opaque("numpy.ndarray"), "numpy.ndarray"),
        ((1, [Opaque("numpy.ndarray")]), "numpy.ndarray"),
        ({b"key": 2}, "dict"),
        ([0] * 3_000, "list"),
    ],
    ids=["opaque", "opaque inside", "odd keys", "long"],
)
def test_what_is_not_plain_is_named_only(
    value: object, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "MAX_PLAIN", 2_000)
    (leaf,) = flatten({"a": value}, where="x.pt").objects
    assert (leaf.value, leaf.type_name) == (None, type_name)


def test_the_samples_of_an_epoch_are_a_value() -> None:
    (leaf,) = flatten({"seen": [0] * 1_500_000}, where="x.pt").objects
    assert leaf.value == [0] * 1_500_000


def test_random_states_and_lists_of_names_are_plain() -> None:
    value = (3, tuple(range(625)), None)
    (leaf,) = flatten({"rng": value}, where="x.pt").objects
    assert (leaf.value, leaf.type_name) == (value, None)


def test_tensors_under_a_key_that_is_no_name_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a key of type bytes"):
        flatten({"a": {b"key": T}}, where="x.pt")


@pytest.mark.parametrize("keys", [(1, "1"), ((1, 2), "(1, 2)"), (float("nan"), "nan")])
def test_keys_of_one_text_are_refused_as_torch_refuses_them(keys: tuple[object, ...]) -> None:
    with pytest.raises(UnsupportedError, match="two entries have the name a"):
        flatten({"a": dict.fromkeys(keys, T)}, where="x.pt")


def test_doubling_lists_are_refused_in_time() -> None:
    value: list[object] = [T]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(UnreadableError, match="nested without end"):
        flatten({"a": value}, where="x.pt")


def test_a_state_dict_twice_is_counted_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dict, "MAX_REPEATED", 10)
    weights = {str(n): T for n in range(8)}
    assert len(flatten({"model": weights, "ema": weights}, where="x.pt").tensors) == 16
    with pytest.raises(UnreadableError, match="nested without end"):
        flatten(dict.fromkeys("abc", weights), where="x.pt")


def test_a_large_value_in_many_places_is_looked_through_once() -> None:
    value = list(range(90_000))
    state = flatten({"a": dict.fromkeys(range(20_000), value)}, where="x.pt")
    assert len(state.objects) == 20_000


def test_many_values_that_share_a_large_one_are_looked_through_in_time() -> None:
    value = list(range(90_000))
    state = flatten({"a": {n: [value] for n in range(20_000)}}, where="x.pt")
    assert len(state.objects) == 20_000
