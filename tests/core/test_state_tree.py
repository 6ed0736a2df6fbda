"""The tree of a state dict: containers keep their kind, their keys and their places."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core.state_tree import MAX_DEPTH, Branch, Tree, dict_of, list_of, merge, of_paths
from ckpt_tools.errors import UnsupportedError


def _dict(*pairs: tuple[object, object], kind: str = "dict") -> Branch[str]:
    return Branch(kind, tuple(key for key, _ in pairs), tuple(item for _, item in pairs))  # type: ignore[arg-type]


TREE = _dict(
    ("groups", list_of([_dict(("betas", Branch("tuple", None, ("b0", "b1")))), "plain"])),
    (0, "zero"),
    ("empty", _dict()),
)
PLACES = [
    (("groups", 0, "betas", 0), "b0"),
    (("groups", 0, "betas", 1), "b1"),
    (("groups", 1), "plain"),
    (("0",), "zero"),
]


def _trees(leaves: st.SearchStrategy[str]) -> st.SearchStrategy[Tree[str]]:
    keys = st.text("abc01", min_size=1, max_size=2)

    def containers(inner: st.SearchStrategy[Tree[str]]) -> st.SearchStrategy[Tree[str]]:
        listed = st.lists(inner, min_size=1, max_size=3)
        return st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3).map(dict_of), listed.map(list_of)
        )

    return st.recursive(leaves, containers, max_leaves=12)


STR_TREES = st.dictionaries(
    st.text("abc", min_size=1, max_size=2), _trees(st.text("xyz", min_size=1)), min_size=1
).map(dict_of)


def test_a_path_has_the_text_of_keys_and_places_as_ints() -> None:
    assert list(TREE.walk()) == PLACES
    assert list(TREE.leaves()) == ["b0", "b1", "plain", "zero"]
    assert [path for path, _ in TREE.branches()] == [
        (),
        ("groups",),
        ("groups", 0),
        ("groups", 0, "betas"),
        ("empty",),
    ]


def test_an_item_is_found_by_its_path() -> None:
    for path, leaf in PLACES:
        assert TREE.get(*path) == leaf
    assert TREE.get("groups", 7) is None
    assert TREE.get("0", "deeper") is None
    assert TREE.get() is TREE


@given(STR_TREES)
def test_a_tree_without_odd_containers_is_what_its_paths_tell(tree: Branch[str]) -> None:
    assert of_paths(tree.walk()) == tree


def test_ints_that_are_not_all_of_a_container_stay_keys() -> None:
    assert of_paths([(("a", 0), "x"), (("a", "b"), "y")]).get("a") == _dict((0, "x"), ("b", "y"))
    huge = of_paths([(("a", 10**12), "x")]).get("a")
    assert isinstance(huge, Branch)
    assert huge.kind == "dict"
    assert of_paths([(("a", 2), "x")]).get("a") == list_of([None, None, "x"])


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a",), ("a",)],
        [("a", "0"), ("a", 0)],
        [("a",) * (MAX_DEPTH + 1)],
    ],
)
def test_paths_that_no_state_dict_has_are_refused(paths: list[tuple[str | int, ...]]) -> None:
    with pytest.raises(UnsupportedError):
        of_paths((path, "x") for path in paths)


def test_an_item_that_goes_leaves_its_place_in_a_list_and_takes_its_key_from_a_dict() -> None:
    left = TREE.filter(lambda leaf: leaf not in ("b0", "zero"))
    assert left.get("groups", 0, "betas") == Branch("tuple", None, (None, "b1"))
    assert left.parts() == ["groups", "empty"]
    gone = TREE.filter(lambda leaf: leaf == "plain")
    assert gone.get("groups") == list_of([None, "plain"])


def test_a_container_that_loses_all_its_leaves_goes_and_an_empty_one_stays() -> None:
    tree = _dict(("a", _dict(("x", "1"), ("e", _dict()))), ("e", _dict()), ("b", "2"))
    assert tree.filter(lambda leaf: leaf == "2") == _dict(("e", _dict()), ("b", "2"))
    assert tree.filter(lambda leaf: leaf == "1") == _dict(
        ("a", _dict(("x", "1"), ("e", _dict()))), ("e", _dict())
    )
    assert tree.filter(lambda _: False) == _dict()


def test_a_leaf_may_become_a_container_or_nothing() -> None:
    made = TREE.map_places(
        lambda path, leaf: None if leaf in ("b0", "zero") else list_of([f"{path[0]} {leaf}"])
    )
    assert made.get("groups", 0, "betas") == Branch("tuple", None, (None, list_of(["groups b1"])))
    assert made.parts() == ["groups", "empty"]


def test_merged_lists_go_place_by_place_and_dicts_by_the_text_of_their_keys() -> None:
    one = _dict((0, list_of(["a", None])), ("only", "b"))
    other = _dict(("0", list_of(["A", "c", "d"])), ("new", "e"))
    assert merge(one, other) == _dict((0, list_of(["a", "c", "d"])), ("only", "b"), ("new", "e"))


@pytest.mark.parametrize("other", ["leaf", Branch("tuple", None, ("a",))])
def test_trees_that_contradict_each_other_are_not_merged(other: Tree[str]) -> None:
    with pytest.raises(UnsupportedError):
        merge(_dict(("k", list_of(["a"]))), _dict(("k", other)))


@given(STR_TREES, STR_TREES)
def test_a_merged_tree_has_the_leaves_of_both(one: Branch[str], other: Branch[str]) -> None:
    try:
        merged = merge(one, other)
    except UnsupportedError:
        return
    assert dict(merged.walk()) == {**dict(other.walk()), **dict(one.walk())}


def test_a_tree_as_deep_as_readers_allow_is_walked_mapped_and_filtered() -> None:
    tree: Tree[str] = "leaf"
    for _ in range(MAX_DEPTH):
        tree = dict_of({"a": tree})
    assert isinstance(tree, Branch)
    assert [len(path) for path, _ in tree.walk()] == [MAX_DEPTH]
    assert list(tree.map(str.upper).leaves()) == ["LEAF"]
    assert tree.filter(lambda _: False) == _dict()


def test_a_tree_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(TREE)) == TREE  # noqa: S301 (our own)


def test_keys_that_do_not_go_with_a_container_are_refused() -> None:
    with pytest.raises(ValueError, match="2 keys for 1 items"):
        Branch("dict", ("a", "b"), ("x",))
    with pytest.raises(ValueError, match="a list with keys"):
        Branch("list", ("a",), ("x",))
