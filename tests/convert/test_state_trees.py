"""The containers of a state dict come through every conversion as torch itself has them.

For any dict that torch.save takes: our DCP has the names, paths and kinds of items of torch's own
`dcp.save` of that dict, torch's `dcp.load` fills a template from it, and as a .pt file it is equal
again, container kinds and key types included.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from alone import ALONE
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from running import run
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from ckpt_tools import (
    DiffOptions,
    ExportOptions,
    ReshardOptions,
    WriteOptions,
    api,
    open_checkpoint,
)
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.state_tree import Branch, nested
from ckpt_tools.errors import CkptError, UnsupportedError, WriteError
from ckpt_tools.formats.zip import read as zip_read

T = torch.arange(6.0)
SETTINGS = settings(
    max_examples=settings.default.max_examples * 3 // 5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def spelled(value: object, *, ordered: bool = True) -> object:
    """A value with every container as its kind and its keys with theirs, to be compared."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, dict):
        items = [(type(k), k, spelled(item, ordered=ordered)) for k, item in value.items()]
        return type(value), items if ordered else sorted(items, key=repr)
    if isinstance(value, list | tuple):
        return type(value), [spelled(item, ordered=ordered) for item in value]
    return type(value), repr(value)


def emptied(value: object) -> object:
    """A template of a state dict: the same containers with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, -1)
    if isinstance(value, dict):
        return type(value)((key, emptied(item)) for key, item in value.items())
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return value if isinstance(value, tuple) else None


def torchs_own(state: object, folder: Path, **options: object) -> Metadata:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, **ALONE, **options)
    return metadata(folder)


def metadata(folder: Path) -> Metadata:
    found = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (our own)
    assert isinstance(found, Metadata)
    return found


def loaded(state: object, folder: Path) -> object:
    template = emptied(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(template, checkpoint_id=folder, **ALONE)
    return template


def said(found: Metadata) -> list[tuple[str, tuple[str | int, ...], bool]]:
    """Each name with its path and whether it is an object, in the order of planner_data."""
    kinds = found.state_dict_metadata
    assert kinds.keys() == found.planner_data.keys()
    return [
        (fqn, path, isinstance(kinds[fqn], BytesStorageMetadata))
        for fqn, path in found.planner_data.items()
    ]


def to_dcp(source: Path, out: Path, *, ranks: int = 1) -> Path:
    options = ReshardOptions(Mesh((ranks,)))
    api.reshard(open_checkpoint(str(source)), str(out), options=options, write=WriteOptions())
    return out


def to_torch(source: Path, out: Path) -> Path:
    options = ExportOptions(format="torch", keep_names=True, only=None, keep_rank_states=True)
    api.export(open_checkpoint(str(source)), str(out), options=options, write=WriteOptions())
    return out


KEYS = st.one_of(
    st.text("ab.é", min_size=1, max_size=3),
    st.integers(-1, 3),
    st.sampled_from([True, None, 1.5, (1, 2), ("a", None)]),
)
PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-300, 1 << 40),
    st.floats(allow_nan=False, width=32),
    st.sampled_from(["s", b"ab", b"", 1 + 2j, torch.Size([2, 3]), {1, 2}, [], (), [1, [2]], {}]),
    st.sampled_from([torch.bfloat16, torch.device("cuda", 1), torch.device("cpu"), torch.strided]),
    st.sampled_from([(1, (2,)), ({"a": 1},), (OrderedDict(b=1),), [("x",), 1]]),
)
TENSORS = st.sampled_from([T, T[:0], T.to(torch.bfloat16).reshape(2, 3), torch.tensor(3)])


def dicts(values: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    plain = st.dictionaries(KEYS, values, max_size=4)
    return st.one_of(plain, plain.map(OrderedDict))


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    listed = st.lists(inner, max_size=4)
    return st.one_of(dicts(inner), listed, listed.map(tuple))


STATES = st.dictionaries(
    st.text("abcde", min_size=1, max_size=2),
    st.recursive(st.one_of(TENSORS, PLAIN), containers, max_leaves=12),
    min_size=1,
    max_size=5,
).map(lambda state: {"w": T, **state})


def _texts_differ(value: object) -> bool:
    if isinstance(value, dict):
        return len(set(map(str, value))) == len(value) and all(map(_texts_differ, value.values()))
    return not isinstance(value, list | tuple) or all(map(_texts_differ, value))


@given(state=STATES, ranks=st.sampled_from([1, 2]))
@SETTINGS
def test_our_dcp_has_the_names_and_paths_of_torchs_own(
    state: dict[str, object], ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assume(_texts_differ(state))
    folder = tmp_path_factory.mktemp("t")
    try:
        theirs = torchs_own(state, folder / "theirs")
    except CheckpointException:
        reject()  # two names that are one
    torch.save(state, folder / "a.pt")
    ours = to_dcp(folder / "a.pt", folder / "ours", ranks=ranks)
    assert said(metadata(ours)) == said(theirs)
    try:
        filled = loaded(state, folder / "theirs")
    except CheckpointException:  # torch cannot load its own: an empty dict in a list
        return
    # torch adds the texts of keys that are no text while it reads, and it reads file by file.
    ordered = ranks == 1
    assert spelled(loaded(state, ours), ordered=ordered) == spelled(filled, ordered=ordered)


@given(state=STATES)
@SETTINGS
def test_a_torch_file_comes_back_equal_with_container_kinds_and_key_types(
    state: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")
    torch.save(state, folder / "a.pt")
    try:
        source = open_checkpoint(str(folder / "a.pt"))
    except CkptError:
        reject()  # two names that are one
    assert len(source.tensors) > 0
    out = to_torch(folder / "a.pt", folder / "b.pt")
    assert spelled(torch.load(out, weights_only=True)) == spelled(state)


@given(state=STATES)
@SETTINGS
def test_rank_files_come_back_equal_with_container_kinds_and_key_types(
    state: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("t")
    torch.save(state, folder / "a.pt")
    options = ReshardOptions(Mesh((2,)), format="ranks", device_type="cpu")
    try:
        index = open_checkpoint(str(folder / "a.pt"))
    except CkptError:
        reject()  # two names that are one
    api.reshard(index, str(folder / "ranks"), options=options, write=WriteOptions())
    out = to_torch(folder / "ranks", folder / "b.pt")
    assert spelled(torch.load(out, weights_only=True)) == spelled(state)


class _Mine:
    """A class of a user."""


TABLE: dict[str, Callable[[], object]] = {
    "str keys": lambda: {"a": T, "b": 1},
    "int keys": lambda: {0: 100, 1: 120},
    "int keys with a tensor": lambda: {0: T, 1: 2},
    "other keys": lambda: {1.5: T, True: 2, None: 3, (1, 2): 4},
    "keys with dots": lambda: {"a.b": T, "c.d": 1},
    "list of plain values": lambda: [1, "x", None],
    "list of tensors": lambda: [T, T],
    "list of tensor and plain": lambda: [T, 5, "s"],
    "list of dicts": lambda: [{"lr": 1}, {"lr": 2}],
    "list with an empty dict": lambda: [{}, 1],
    "list of empty lists": lambda: [[], []],
    "nested list with tensor": lambda: [[T], [3, 4]],
    "list of tuple of tensors": lambda: [(T, T), 1],
    "list of tuple and tensor": lambda: [(T, T), T],
    "list of list of tuple": lambda: [[(T,)], 1],
    "tuple of tensors": lambda: (T, T),
    "tuple of dicts": lambda: ({"a": 1}, {"a": T}),
    "empty dict": dict,
    "empty list": list,
    "empty tuple": tuple,
    "dict with empty dict": lambda: {"x": {}, "y": 1},
    "OrderedDict": lambda: OrderedDict(a=T, b=1),
    "defaultdict": lambda: defaultdict(int, a=T),
    "set": lambda: {1, 2},
    "bytes": lambda: b"ab",
    "torch.Size": lambda: torch.Size([2, 3]),
    "None": lambda: None,
    "list of None and tensor": lambda: [None, T],
    "a list under `state`": lambda: {"state": [1, {"x": T}]},
}


@pytest.mark.parametrize("case", TABLE)
def test_each_kind_of_container_becomes_the_items_of_torchs_own_save(
    case: str, tmp_path: Path
) -> None:
    state = {"model": {"w": T}, "c": TABLE[case](), "end": 1}
    torch.save(state, tmp_path / "a.pt")
    theirs = torchs_own(state, tmp_path / "theirs")
    assert said(metadata(to_dcp(tmp_path / "a.pt", tmp_path / "ours"))) == said(theirs)
    again = to_dcp(tmp_path / "theirs", tmp_path / "again", ranks=2)
    assert said(metadata(again)) == said(theirs)


def test_an_empty_dict_makes_no_item_so_that_torch_does_not_take_it_for_an_old_save(
    tmp_path: Path,
) -> None:
    state = {"model": {"w": T}, "x": {}, "y": {"z": 1}}
    torch.save(state, tmp_path / "a.pt")
    assert spelled(loaded(state, to_dcp(tmp_path / "a.pt", tmp_path / "o"))) == spelled(state)


def test_a_tuple_with_tensors_in_a_dcp_item_is_opened(tmp_path: Path) -> None:
    state = {"w": T, "pair": (T[:2], [T[2:], 5], {"k": 0.5})}
    torchs_own(state, tmp_path / "dcp")
    out = to_torch(tmp_path / "dcp", tmp_path / "b.pt")
    assert spelled(torch.load(out, weights_only=True)) == spelled(state)


def test_dtypes_devices_layouts_and_sizes_are_values_in_every_format(tmp_path: Path) -> None:
    group = {"momentum_dtype": torch.bfloat16, "device": torch.device("cuda", 1), "params": ["w"]}
    state = {
        "model": {"w": T},
        "optim": {"state": {}, "param_groups": [group | {"layout": torch.sparse_coo}]},
        "other": [torch.Size([2]), (torch.device("cpu"), "torch.float32", torch.float32), {"x": T}],
    }
    torch.save(state, tmp_path / "a.pt")
    out = to_dcp(tmp_path / "a.pt", tmp_path / "dcp")
    assert spelled(loaded(state, out)) == spelled(state)
    options = ReshardOptions(Mesh((1,)), format="ranks")
    index = open_checkpoint(str(tmp_path / "a.pt"))
    api.reshard(index, str(tmp_path / "ranks"), options=options, write=WriteOptions())
    for source in ("dcp", "ranks"):
        found = torch.load(to_torch(tmp_path / source, tmp_path / f"{source}.pt"))
        assert spelled(found) == spelled(state)
    assert index.value("optim.param_groups.0.momentum_dtype") == "torch.bfloat16"


CONTAINERS = {
    "tuple of tensors": {"w": T, "pair": (T[:2], T[2:])},
    "tuple of all kinds": {"w": T, "pair": (T[:2], [T[2:], 5], {"k": (T[3:], 0.5)})},
    "only tuples": {"pair": (T, 2), "other": ({"x": T},)},
    "the model is a tuple": {"model": (T, {"b": T[1:]}), "optim": {"state": {"x": T[2:]}}},
    "a class beside a tensor": {"w": T, "pair": (T, np.arange(3))},
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_every_command_sees_the_tensors_inside_of_a_dcp_item(case: str, tmp_path: Path) -> None:
    torchs_own(CONTAINERS[case], tmp_path / "dcp")
    torch.save(CONTAINERS[case], tmp_path / "a.pt")
    a, b = (open_checkpoint(str(tmp_path / name)) for name in ("a.pt", "dcp"))
    assert [(e.fqn, e.section) for e in b.tensors] == [(e.fqn, e.section) for e in a.tensors]
    assert [(e.fqn, e.section) for e in b.objects] == [(e.fqn, e.section) for e in a.objects]
    assert api.fingerprint(b).sections == api.fingerprint(a).sections
    assert {one.fqn for one in api.stats(b).tensors} == {entry.fqn for entry in a.tensors}
    assert all(one.whole for one in (api.verify(b), api.verify_quick(b)))
    out = tmp_path / "out.safetensors"
    done = run("export", tmp_path / "dcp", "-o", out, "--only", "all", "--check")
    assert done.exit_code == 0, done.stderr
    assert "equal the source" in done.stderr
    assert load_file(out).keys() == {entry.fqn for entry in a.tensors}
    assert api.fingerprint(str(out)).sections == api.fingerprint(a).sections


def test_patterns_and_new_names_are_of_the_tensors_inside_of_a_dcp_item(tmp_path: Path) -> None:
    torchs_own({"w": T, "pair": (T[:2], {"k": T[2:]})}, tmp_path / "dcp")
    for options, wanted in (
        (["-i", "pair.*"], {"pair.0", "pair.1.k"}),
        (["-x", "pair.0"], {"w", "pair.1.k"}),
        (["--rename", r"pair\.1=inner"], {"w", "pair.0", "inner.k"}),
    ):
        out = tmp_path / "out.safetensors"
        words = ["export", str(tmp_path / "dcp"), "-o", str(out), "--force", *options]
        done = run(*words)
        assert done.exit_code == 0, done.stderr
        assert load_file(out).keys() == wanted
    out = to_dcp(tmp_path / "dcp", tmp_path / "all")
    options = ReshardOptions(Mesh((1,)), include=("pair.*",), exclude=("pair.0",))
    index = open_checkpoint(str(tmp_path / "dcp"))
    api.reshard(index, str(tmp_path / "some"), options=options, write=WriteOptions())
    found = torch.load(to_torch(tmp_path / "some", tmp_path / "b.pt"), weights_only=True)
    assert spelled(found) == spelled({"pair": (None, {"k": T[2:]})})


def test_a_reshard_copies_a_dcp_item_with_tensors_byte_for_byte(tmp_path: Path) -> None:
    state = {"w": T, "pair": (T, np.arange(3)), "z": 1}
    before = torchs_own(state, tmp_path / "dcp")
    after = metadata(to_dcp(tmp_path / "dcp", tmp_path / "out", ranks=2))
    assert said(after) == said(before)
    assert item("pair", tmp_path / "out") == item("pair", tmp_path / "dcp")


def item(fqn: str, folder: Path) -> bytes:
    storage = metadata(folder).storage_data
    place = next(place for key, place in storage.items() if key.fqn == fqn)
    content = (folder / place.relative_path).read_bytes()
    return content[place.offset : place.offset + place.length]


def test_a_hurt_dcp_item_with_tensors_is_refused_and_not_left_out(tmp_path: Path) -> None:
    torchs_own({"w": T, "pair": (T, T)}, tmp_path / "dcp")
    data = next((tmp_path / "dcp").glob("*.distcp"))
    content, hurt = data.read_bytes(), item("pair", tmp_path / "dcp")
    place = content.index(hurt)
    data.write_bytes(content.replace(hurt, hurt[:-200] + bytes(200)))
    assert place >= 0
    words = ["export", str(tmp_path / "dcp"), "-o", str(tmp_path / "o.safetensors")]
    done = run(*words, "--only", "all")
    assert done.exit_code == 3
    assert "pair" in done.stderr
    assert not api.verify(str(tmp_path / "dcp")).whole
    done = run(*words, "-i", "w")
    assert done.exit_code == 0, done.stderr


def test_verify_checks_the_checksums_of_tensors_inside_of_a_dcp_item(tmp_path: Path) -> None:
    torchs_own({"w": T, "pair": (T + 7, 1)}, tmp_path / "dcp")
    data = next((tmp_path / "dcp").glob("*.distcp"))
    content, inside = data.read_bytes(), (T + 7).numpy().tobytes()
    assert content.count(inside) == 1
    data.write_bytes(content.replace(inside, bytes(len(inside))))
    found = api.verify(str(tmp_path / "dcp"))
    assert [hurt.fqn for hurt in found.damaged] == ["pair.0"]


def test_what_could_run_code_stays_one_object_and_is_named(tmp_path: Path) -> None:
    torchs_own({"w": T, "model": {"_extra_state": (T, _Runs())}}, tmp_path / "dcp")
    words = ["export", str(tmp_path / "dcp"), "-o", str(tmp_path / "o.safetensors")]
    done = run(*words, "--only", "all")
    assert done.exit_code == 0, done.stderr
    assert "model._extra_state" in done.stderr
    assert load_file(tmp_path / "o.safetensors").keys() == {"w"}


class _Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_a_list_item_that_is_left_out_does_not_move_the_others(tmp_path: Path) -> None:
    torch.save({"w": T, "c": [T, deque([T]), 5], "t": (deque([T]), T)}, tmp_path / "a.pt")
    index = open_checkpoint(str(tmp_path / "a.pt"))
    options = ReshardOptions(Mesh((1,)))
    plan = api.reshard(index, str(tmp_path / "o"), options=options, write=WriteOptions())
    assert any("c.1" in note and "t.0" in note for note in plan.notes)
    assert said(metadata(tmp_path / "o"))[:3] == [
        ("w", ("w",), False),
        ("c.0", ("c", 0), False),
        ("c.2", ("c", 2), True),
    ]
    out = to_torch(tmp_path / "o", tmp_path / "b.pt")
    found = torch.load(out, weights_only=True)
    assert spelled(found) == spelled({"w": T, "c": [T, None, 5], "t": (None, T)})


def test_what_is_excluded_leaves_its_place_in_a_list_and_takes_its_key_from_a_dict(
    tmp_path: Path,
) -> None:
    state = {"m": {"a": T, "b": T}, "c": [T, 1, {"x": T}], "only": {"y": T}}
    torch.save(state, tmp_path / "a.pt")
    options = ExportOptions(
        format="torch", keep_names=True, only=None, exclude=("c.0", "m.b", "only.*")
    )
    index = open_checkpoint(str(tmp_path / "a.pt"))
    out = tmp_path / "b.pt"
    api.export(index, str(out), options=options, write=WriteOptions())
    left = {"m": {"a": T}, "c": [None, 1, {"x": T}]}
    assert spelled(torch.load(out, weights_only=True)) == spelled(left)


@pytest.mark.parametrize("top", [[T, [1, T]], (T, {"a": T})])
def test_a_file_of_a_list_or_a_tuple_stays_one(top: object, tmp_path: Path) -> None:
    torch.save(top, tmp_path / "a.pt")
    out = to_torch(tmp_path / "a.pt", tmp_path / "b.pt")
    assert spelled(torch.load(out, weights_only=True)) == spelled(top)


def compressed(folder: Path) -> None:
    """Turn each item of a DCP directory into one that torch's ZStandard extension wrote."""
    zstandard = pytest.importorskip("zstandard")
    found = metadata(folder)
    data = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
    packed = b""
    for info in found.storage_data.values():
        span = slice(info.offset, info.offset + info.length)
        item = zstandard.compress(data[info.relative_path][span])
        info.relative_path, info.offset, info.length = "__0_0.distcp", len(packed), len(item)
        info.transform_descriptors = ["stream.zstd/1"]
        packed += item
    for path in folder.glob("*.distcp"):
        path.unlink()
    (folder / "__0_0.distcp").write_bytes(packed)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def test_what_is_no_plain_value_goes_along_from_a_compressed_directory(tmp_path: Path) -> None:
    state = {"w": T, "bytes": b"ab", "set": {1, 2}, "mine": _Mine(), "pair": (T, 1)}
    theirs = torchs_own(state, tmp_path / "dcp")
    compressed(tmp_path / "dcp")
    out = to_dcp(tmp_path / "dcp", tmp_path / "out", ranks=2)
    assert said(metadata(out)) == said(theirs)
    back = loaded({**state, "mine": None}, out)
    assert isinstance(back, dict)
    assert isinstance(back.pop("mine"), _Mine)
    assert spelled(back) == spelled({key: state[key] for key in back})


def test_tensors_that_nothing_here_can_inflate_are_no_empty_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    torchs_own({"model": {"w": T}}, tmp_path / "dcp", planner=planner)
    compressed(tmp_path / "dcp")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedError, match="zstandard package is not installed"):
        open_checkpoint(str(tmp_path / "dcp"))


def test_a_name_that_is_nested_without_end_is_refused_in_one_line(tmp_path: Path) -> None:
    found = torchs_own({"w": T}, tmp_path / "dcp")
    found.planner_data["w"] = ("a",) * 800
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(UnsupportedError, match=r"nested 800 deep; up to 100 is supported"):
        open_checkpoint(str(tmp_path / "dcp"))


def changed(state: dict[str, object], folder: Path) -> tuple[Path, Path]:
    """A torch file with int keys, a list and a tuple, and one with these changed."""
    torch.save({"w": T, "c": {0: T, 1: 1}, "l": [T, 1], "e": {}}, folder / "a.pt")
    torch.save({"w": T, **state}, folder / "b.pt")
    return folder / "a.pt", folder / "b.pt"


@pytest.mark.parametrize(
    ("state", "differing"),
    [
        ({"c": {0: T, 1: 1}, "l": [T, 1], "e": {}}, {}),
        ({"c": OrderedDict({0: T, 1: 1}), "l": [T, 1], "e": {}}, {}),
        ({"c": [T, 1], "l": [T, 1], "e": {}}, {"c": ("dict of 2", "list of 2")}),
        ({"c": {0: T, 1: 1}, "l": (T, 1), "e": {}}, {"l": ("list of 2", "tuple of 2")}),
        ({"c": {"0": T, 1: 1}, "l": [T, 1], "e": {}}, {"c": ("dict with 0", "dict with '0'")}),
        ({"c": {0: T, 1: 1}, "l": [T, 1]}, {"e": ("empty dict", None)}),
    ],
)
def test_diff_tells_containers_that_are_not_the_same(
    state: dict[str, object], differing: dict[str, tuple[str, str | None]], tmp_path: Path
) -> None:
    sides = [open_checkpoint(str(path)) for path in changed(state, tmp_path)]
    for found in (api.diff(*sides), api.diff_headers(*sides)):
        told = {e.name: (e.a, e.b) for e in found.entries if e.status == "container"}
        assert told == differing
        assert found.equal is not bool(differing)
        assert found.containers is not None


def test_diff_takes_both_sides_as_dcp_has_them_where_one_is_dcp(tmp_path: Path) -> None:
    state = {"w": T, "c": {0: T, 1: 1}, "l": [T, {}, (T, 1)], "e": {}, "o": OrderedDict(a=T)}
    torch.save(state, tmp_path / "a.pt")
    a = open_checkpoint(str(tmp_path / "a.pt"))
    b = open_checkpoint(str(to_dcp(tmp_path / "a.pt", tmp_path / "b")))
    found = api.diff(a, b)
    assert [entry for entry in found.entries if entry.status != "same"] == []
    torch.save({**state, "c": [T, 1]}, tmp_path / "c.pt")
    found = api.diff(open_checkpoint(str(tmp_path / "c.pt")), b)
    assert [(e.name, e.a, e.b) for e in found.entries if e.status != "same"] == [
        ("c", "list of 2", "dict of 2")
    ]


def test_containers_are_not_compared_where_names_were_changed_or_one_side_has_none(
    tmp_path: Path,
) -> None:
    torch.save({"model": {"a": T}}, tmp_path / "a.pt")
    a = open_checkpoint(str(tmp_path / "a.pt"))
    assert api.diff_headers(a, a, options=DiffOptions(clean=True)).containers is None
    options = ExportOptions(keep_names=True)
    api.export(a, str(tmp_path / "out"), options=options, write=WriteOptions())
    found = api.diff(a, open_checkpoint(str(tmp_path / "out")))
    assert (found.containers, found.equal) == (None, True)


def test_check_refuses_an_output_with_another_object_or_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"w": T, "c": {0: T, 1: 1}, "pair": (T, 2)}, tmp_path / "a.pt")
    index = open_checkpoint(str(tmp_path / "a.pt"))
    options = ExportOptions(format="torch", keep_names=True, only=None, keep_rank_states=True)
    write = WriteOptions(check=True)
    plan = api.export(index, str(tmp_path / "b.pt"), options=options, write=write)
    assert "So are its 2 objects and 3 containers, by value." in plan.notes[-1]

    real = nested

    def as_list(tree: Branch[str], node_of: Callable[[str], object]) -> object:
        node = real(tree, node_of)
        return {**node, "c": list(node["c"].values()), "pair": (node["pair"][0], 3)}

    monkeypatch.setattr("ckpt_tools.formats.torch_file.write.nested", as_list)
    with pytest.raises(WriteError, match=r"pair\.1: 2 and 3, c is list of 2, not dict of 2"):
        api.export(index, str(tmp_path / "c.pt"), options=options, write=write)
    assert not (tmp_path / "c.pt").exists()


@pytest.mark.parametrize("source", ["dcp", "pt"])
def test_check_reads_objects_back_that_were_not_opened(source: str, tmp_path: Path) -> None:
    state = {"w": T, "n": {"x": 1}, "pair": (T, 2), "list": [(T,), 1]}
    torchs_own(state, tmp_path / "dcp")
    torch.save(state, tmp_path / "pt")
    options, write = ReshardOptions(Mesh((2,))), WriteOptions(check=True)
    index = open_checkpoint(str(tmp_path / source))
    plan = api.reshard(index, str(tmp_path / "out"), options=options, write=write)
    assert "the 4 tensors written" in plan.notes[-1] or "the 3 tensors written" in plan.notes[-1]
    assert "So are its 3 objects and 5 containers, by value." in plan.notes[-1]


class Unknown:
    """A class that no reader of ours opens."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


def carried(item: object, folder: Path) -> str:
    """What --check says of a reshard of a DCP item."""
    torchs_own({"w": T, "extra": item}, folder / "dcp")
    options, write = ReshardOptions(Mesh((2,))), WriteOptions(check=True)
    index = open_checkpoint(str(folder / "dcp"))
    return api.reshard(index, str(folder / "out"), options=options, write=write).notes[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "item",
    [(T, partial(int, base=2)), (torch.zeros(17 << 20), Unknown(T))],
    ids=["runs code", "more than 64 MiB"],
)
def test_check_proves_by_its_bytes_an_item_that_is_not_opened(item: object, tmp_path: Path) -> None:
    assert "So are its 1 object, by value." in carried(item, tmp_path)


def test_an_item_that_is_not_opened_and_has_other_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_place(archive: zip_read.Archive, _name: str) -> bytes:
        return archive.where.partition(", ")[0].encode()

    monkeypatch.setattr(zip_read.Archive, "digest", of_place)
    with pytest.raises(WriteError, match="extra: not opened; the pickled bytes differ"):
        carried((T, Unknown(T)), tmp_path)
    assert not (tmp_path / "out").exists()


def test_times_and_versions_of_a_trainers_progress_are_kept(tmp_path: Path) -> None:
    progress = {"wct": timedelta(-1, 5, 7), "all": [timedelta(3)], "torch": torch.__version__}
    torch.save({"w": T, "progress": progress}, tmp_path / "a.pt")
    options, write = ReshardOptions(Mesh((2,))), WriteOptions(check=True)
    index = open_checkpoint(str(tmp_path / "a.pt"))
    api.reshard(index, str(tmp_path / "out"), options=options, write=write)
    found = {"w": T.clone(), "progress": {"wct": None, "all": [None], "torch": None}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path / "out", **ALONE)
    assert found["progress"] == progress
    assert type(found["progress"]["torch"]) is type(torch.__version__)


SCALARS = [
    *(np.dtype(code).type(1) for code in ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")),
    *(np.dtype(code).type(value) for code in ("f2", "f4", "f8") for value in (0.1, -0.0, -np.inf)),
    *(np.int64(-(2**63)), np.uint64(2**64 - 1), np.float64(5e-324), np.float64("nan")),
]


@pytest.mark.parametrize("protocol", [2, 5])
def test_scalars_of_numpy_are_kept_bit_for_bit(tmp_path: Path, protocol: int) -> None:
    """A ``lr`` that a schedule made is a numpy.float64: no optimizer loads without it."""
    state = {"w": T, "lr": SCALARS, "step": np.int64(7)}
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    index = open_checkpoint(str(tmp_path / "a.pt"))
    assert api.inspect(index).step.value == 7
    write = WriteOptions(check=True)
    api.reshard(index, str(tmp_path / "out"), options=ReshardOptions(Mesh((2,))), write=write)
    options = ExportOptions(format="torch", keep_names=True, only=None)
    copy = open_checkpoint(str(tmp_path / "out"))
    api.export(copy, str(tmp_path / "b.pt"), options=options, write=write)
    found = torch.load(tmp_path / "b.pt", weights_only=False)
    kinds = [(type(value), value.tobytes()) for value in [*found["lr"], found["step"]]]
    assert kinds == [(type(value), value.tobytes()) for value in [*SCALARS, np.int64(7)]]
    # As NumPy 2 names it: a loader that allows its scalars by name finds them.
    assert b"cnumpy._core.multiarray\nscalar" in (tmp_path / "b.pt").read_bytes()


def test_where_nothing_can_be_written_nothing_is(tmp_path: Path) -> None:
    torch.save({"odd": deque([T])}, tmp_path / "a.pt")
    words = ["reshard", str(tmp_path / "a.pt"), "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    told = run(*words)
    assert told.exit_code == 3
    assert "nothing of it can be written. Left out 1 object" in told.stderr
    assert not (tmp_path / "out").exists()


def test_equal_scalars_of_numpy_are_one_value_of_all_ranks(tmp_path: Path) -> None:
    states = ({"w": T, "loss": np.float64(0.5)}, {"w": T, "loss": np.float64(0.5)})
    index = open_checkpoint(str(rank_files(tmp_path / "ranks", *states)))
    assert [entry.fqn for entry in index.objects] == ["loss"]


def test_a_tensor_of_a_tuple_in_a_dcp_item_is_shown_and_fingerprinted(tmp_path: Path) -> None:
    state = {"w": T, "pair": (T, 2)}
    torch.save(state, tmp_path / "a.pt")
    torchs_own(state, tmp_path / "dcp")
    a, b = (open_checkpoint(str(tmp_path / name)) for name in ("a.pt", "dcp"))
    assert api.fingerprint(a).digest == api.fingerprint(b).digest
    shown = run("show", tmp_path / "dcp", "pair.0", "--json")
    assert json.loads(shown.stdout)["shape"] == [6]
    assert b["pair.0"].torch().equal(T)
    assert b.value("pair.1") == 2


def rank_files(folder: Path, *states: object) -> Path:
    folder.mkdir()
    for rank, state in enumerate(states):
        torch.save(state, folder / f"model_world_size_{len(states)}_rank_{rank}.pt")
    return folder


def test_the_trees_of_ranks_are_one_and_each_ranks_own_value_stays_in_its_place(
    tmp_path: Path,
) -> None:
    first = {"model": {"w": T}, "extra": [{"rng": 1, "same": (1,)}, {}], "late": OrderedDict()}
    second = {"model": {"w": T, "v": T}, "extra": [{"rng": 2, "same": (1,)}, {}, {"more": 3}]}
    out = to_torch(rank_files(tmp_path / "ranks", first, second), tmp_path / "b.pt")
    found = torch.load(out, weights_only=True)
    own = {"rng": {"rank_0": 1, "rank_1": 2}, "same": (1,)}
    wanted = {
        "model": {"w": T, "v": T},
        "extra": [own, {}, {"more": 3}],
        "late": OrderedDict(),
    }
    assert spelled(found) == spelled(wanted)


def test_a_value_where_another_rank_has_a_container_is_a_problem_of_those_names(
    tmp_path: Path,
) -> None:
    folder = rank_files(tmp_path / "ranks", {"w": T, "s": None}, {"w": T, "s": {"a": 1}})
    index = open_checkpoint(str(folder))
    (problem,) = index.problems
    assert problem.about == {"s.a"}
    assert "is nested differently from the files of lower ranks" in problem.message
    options = ExportOptions(format="torch", keep_names=True, only=None, exclude=("s.a",))
    out = tmp_path / "b.pt"
    api.export(index, str(out), options=options, write=WriteOptions())
    assert spelled(torch.load(out, weights_only=True)) == spelled({"w": T, "s": None})


def test_a_file_of_a_list_under_a_family_keeps_it(tmp_path: Path) -> None:
    state = {"model": {"w": T}, "extra_state": [{"a": 1}, (T, 2)]}
    torch.save(state, tmp_path / "a.pt")
    options = ReshardOptions(Mesh((2,)), format="ranks", device_type="cpu")
    index = open_checkpoint(str(tmp_path / "a.pt"))
    api.reshard(index, str(tmp_path / "r"), options=options, write=WriteOptions(check=True))
    assert len(list((tmp_path / "r").glob("extra_state_*.pt"))) == 2
    out = to_torch(tmp_path / "r", tmp_path / "b.pt")
    assert spelled(torch.load(out, weights_only=True)) == spelled(state)


@pytest.mark.parametrize("form", ["pt", "ranks", "dcp"])
def test_check_takes_a_list_that_lost_its_tensors_for_the_one_value_that_it_is(
    form: str, tmp_path: Path
) -> None:
    state = {"w": T, "c": [T, 5], "t": ({"a": 1}, [2, T]), "e": [{}, 1], "h": [T, {"a": T}]}
    torch.save(state, tmp_path / "a.pt")
    index, write = open_checkpoint(str(tmp_path / "a.pt")), WriteOptions(check=True)
    gone = ("c.0", "t.1.1", "h.0")
    if form == "pt":
        options = ExportOptions(format="torch", keep_names=True, only=None, exclude=gone)
        plan = api.export(index, str(tmp_path / "b.pt"), options=options, write=write)
        found = torch.load(tmp_path / "b.pt", weights_only=True)
        left = {"w": T, "c": [None, 5], "t": ({"a": 1}, [2, None]), "e": [{}, 1]}
        left["h"] = [None, {"a": T}]
        assert spelled(found) == spelled(left)
    else:
        target = ReshardOptions(Mesh((2,)), format=form, device_type="cpu", exclude=gone)  # type: ignore[arg-type]
        plan = api.reshard(index, str(tmp_path / "out"), options=target, write=write)
    assert "read back, equal the source" in plan.notes[-1]


def test_check_takes_a_list_of_which_dcp_keeps_a_part_for_one_value(tmp_path: Path) -> None:
    torchs_own({"w": T, "c": [{}, 1]}, tmp_path / "dcp")
    options = ExportOptions(format="torch", keep_names=True, only=None)
    index = open_checkpoint(str(tmp_path / "dcp"))
    write = WriteOptions(check=True)
    api.export(index, str(tmp_path / "b.pt"), options=options, write=write)
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert spelled(found) == spelled({"w": T, "c": [None, 1]})


@pytest.mark.parametrize("form", ["dcp", "ranks"])
def test_an_element_that_is_spread_over_a_tensor_is_copied_to_each_place(
    form: str, tmp_path: Path
) -> None:
    spread = torch.tensor([3.0, 4.0])[1:].expand(5)
    torch.save({"w": spread}, tmp_path / "a.pt")
    options = ReshardOptions(Mesh((2,)), format=form, device_type="cpu")  # type: ignore[arg-type]
    index = open_checkpoint(str(tmp_path / "a.pt"))
    api.reshard(index, str(tmp_path / "out"), options=options, write=WriteOptions())
    out = to_torch(tmp_path / "out", tmp_path / "b.pt")
    assert spelled(torch.load(out, weights_only=True)) == spelled({"w": spread.clone()})
