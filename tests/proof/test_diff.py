"""Diff: what differs between two checkpoints, by how much, and what could not be compared."""

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpt_tools import formats
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.index import ByteRange, CheckpointIndex, ObjectEntry
from ckpt_tools.core.plain_values import PlainValue, Size
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import IncompleteError, UsageError
from ckpt_tools.proof.diff import (
    Diff,
    diff,
    diff_headers,
)
from ckpt_tools.proof.diff_options import DiffOptions, parse_rename
from ckpt_tools.proof.pairs import EntryDiff, compare_objects
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = DATA / "checkpoints"

Values = Mapping[str, tuple[str, list[int], bytes]]


def f32(*values: float) -> tuple[str, list[int], bytes]:
    return "float32", [len(values)], struct.pack(f"<{len(values)}f", *values)


def save(path: Path, tensors: Values) -> CheckpointIndex:
    """The index of a safetensors file of these tensors."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        span = [len(data), len(data) + len(raw)]
        told = BY_NAME[dtype].safetensors
        header[name] = {"dtype": told, "shape": shape, "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return formats.read_index(str(path))


def compared(a: CheckpointIndex, b: CheckpointIndex, options: DiffOptions = DiffOptions()) -> Diff:
    with Files() as files:
        return diff(a, b, files, options=options)


def between(tmp_path: Path, a: Values, b: Values, options: DiffOptions = DiffOptions()) -> Diff:
    here = save(tmp_path / "a.safetensors", a)
    there = save(tmp_path / "b.safetensors", b)
    return compared(here, there, options)


def only_one(found: Diff) -> EntryDiff:
    (entry,) = found.entries
    return entry


def real(name: str) -> CheckpointIndex:
    return formats.read_index(str(CHECKPOINTS / name))


# --------------------------------------------------------------------------------- real checkpoints


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("fsdp2_dcp_hsdp_2x4/ckpt", "dcp_zstd_4r/ckpt"),
        ("fsdp2_dcp_1d_4r/ckpt", "fsdp2_dcp_1d_4r/peer_dcp_to_torch.pt"),
        ("fsdp2_tp_dcp_2x2/ckpt", "fsdp2_tp_dcp_2x2/peer_dcp_to_torch.pt"),
        ("fsdp2_torchsave_1d_4r/ckpt", "fsdp2_torchsave_legacy_4r/ckpt"),
        ("torch-2.11-cuda-fsdp2-1x2/ranks", "torch-2.11-cuda-fsdp2-2/ranks"),
    ],
)
def test_twins_do_not_differ_in_tensors(a: str, b: str) -> None:
    found = compared(real(a), real(b))
    assert [e for e in found.entries if e.status not in ("same", "unknown")] == []
    assert found.tensors > 10


def test_twins_with_plain_objects_are_equal() -> None:
    found = compared(real("fsdp2_dcp_hsdp_2x4/ckpt"), real("dcp_zstd_4r/ckpt"))
    assert found.equal
    assert found.objects > 10


def test_clean_names_match_across_containers() -> None:
    a = real("fsdp1_sharded_mesh1d_dcp/ckpt")
    model = a.select({entry.fqn for entry in a.tensors if entry.section == "model"})
    b = real("fsdp1_full_torchsave/ckpt/model.pt")
    assert compared(model, b, DiffOptions(clean=True)).equal
    assert compared(model, b).equal  # implied: no name is on both sides
    other = DiffOptions(renames=(parse_rename("b:^=other."),))
    assert compared(model, b, other).same == 0


def test_every_difference_of_another_run_is_told() -> None:
    found = compared(real("fsdp2_dcp_1d_4r/ckpt"), real("fsdp2_dcp_1d_8r/ckpt"))
    told = {entry.name for entry in found.entries if entry.status == "values"}
    truth = [
        json.loads((CHECKPOINTS / name / "truth.json").read_text())["entries"]
        for name in ("fsdp2_dcp_1d_4r", "fsdp2_dcp_1d_8r")
    ]
    expected = {
        fqn
        for fqn, facts in truth[0].items()
        if facts["kind"] == "tensor" and facts["sha256"] != truth[1][fqn]["sha256"]
    }
    assert expected
    assert {name for name in told if truth[0][name]["kind"] == "tensor"} == expected


def test_an_incomplete_side_is_refused() -> None:
    a = formats.read_index(str(DATA / "cases" / "C33_missing_ranks" / "hole"))
    with pytest.raises(IncompleteError):
        compared(a, a)


# ------------------------------------------------------------------------------------------ headers


def test_headers_are_compared_without_values(tmp_path: Path) -> None:
    a = save(tmp_path / "a.safetensors", {"w": f32(1.0, 2.0)})
    b = save(tmp_path / "b.safetensors", {"w": f32(3.0, 4.0)})
    found = diff_headers(a, b, options=DiffOptions())
    assert found.equal
    assert not found.values_compared


def test_what_is_on_one_side_only_is_a_difference(tmp_path: Path) -> None:
    found = between(tmp_path, {"v": f32(1), "w": f32(1)}, {"w": f32(1), "x": f32(1)})
    assert [(e.name, e.status) for e in found.entries if e.status != "same"] == [
        ("v", "only a"),
        ("x", "only b"),
    ]


def test_shapes_are_compared_before_values(tmp_path: Path) -> None:
    raw = f32(1, 2, 3, 4)[2]
    found = between(tmp_path, {"w": ("float32", [2, 2], raw)}, {"w": ("float32", [4], raw)})
    assert only_one(found).status == "shape"


def test_types_differ_even_when_values_do_not(tmp_path: Path) -> None:
    half = "float16", [2], struct.pack("<2e", 1, 2)
    found = between(tmp_path, {"w": f32(1, 2)}, {"w": half})
    entry = only_one(found)
    assert entry.status == "dtype"
    assert entry.delta is not None
    assert entry.delta.differing == 0


def test_equal_values_of_different_types_may_be_called_the_same(tmp_path: Path) -> None:
    half = "float16", [2], struct.pack("<2e", 1, 2)
    assert between(tmp_path, {"w": f32(1, 2)}, {"w": half}, DiffOptions(ignore_dtypes=True)).equal


def test_nothing_in_common_is_not_equal() -> None:
    empty = CheckpointIndex("a", "torch", ())
    assert not compared(empty, empty).equal


# ------------------------------------------------------------------------------------------- values


def test_a_difference_is_measured_and_placed(tmp_path: Path) -> None:
    shape = [2, 3]
    a = "float32", shape, struct.pack("<6f", 3, 0, 0, 0, 4, 0)
    b = "float32", shape, struct.pack("<6f", 3, 1, 0, 0, 4, -2)
    delta = only_one(between(tmp_path, {"w": a}, {"w": b})).delta
    assert delta is not None
    assert (delta.differing, delta.max_abs, delta.at, delta.first) == (2, 2.0, (1, 2), (0, 1))
    assert delta.relative_l2 == pytest.approx(math.sqrt(5) / 5)


def test_the_place_of_a_difference_is_global(sizes: Sizes, tmp_path: Path) -> None:
    """Beyond the first slab, too."""
    values = np.zeros((7, sizes.slab // 20), np.float32)
    other = values.copy()
    other[6, 9] = 1
    a, b = (("float32", [*values.shape], array.tobytes()) for array in (values, other))
    delta = only_one(between(tmp_path, {"w": a}, {"w": b})).delta
    assert delta is not None
    assert (delta.at, delta.differing) == ((6, 9), 1)


def test_bits_are_compared_by_default(tmp_path: Path) -> None:
    delta = only_one(between(tmp_path, {"w": f32(0.0)}, {"w": f32(-0.0)})).delta
    assert delta is not None
    assert (delta.differing, delta.max_abs) == (1, 0.0)


def test_nans_with_the_same_bits_are_the_same(tmp_path: Path) -> None:
    assert between(tmp_path, {"w": f32(math.nan)}, {"w": f32(math.nan)}).equal


def test_nans_with_other_bits_differ_without_a_distance(tmp_path: Path) -> None:
    other = "float32", [1], (0x7FC00001).to_bytes(4, "little")
    delta = only_one(between(tmp_path, {"w": f32(math.nan)}, {"w": other})).delta
    assert delta is not None
    assert (delta.differing, delta.nan, delta.max_abs) == (1, 0, 0.0)


def test_a_nan_on_one_side_is_counted_and_no_maximum(tmp_path: Path) -> None:
    delta = only_one(between(tmp_path, {"w": f32(1, 2)}, {"w": f32(math.nan, 3)})).delta
    assert delta is not None
    assert (delta.differing, delta.nan, delta.max_abs) == (2, 1, 1.0)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1.0, 1.1, False),
        (1.0, 1.05, True),
        (1.0, math.nan, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.inf, -math.inf, False),
        (0.0, -0.0, True),
    ],
)
def test_tolerances_decide_what_is_the_same(
    a: float, b: float, *, same: bool, tmp_path: Path
) -> None:
    options = DiffOptions(rtol=0.02, atol=0.04)
    assert between(tmp_path, {"w": f32(a)}, {"w": f32(b)}, options).equal is same


def test_large_integers_are_compared_exactly(tmp_path: Path) -> None:
    a = "int64", [1], (2**60).to_bytes(8, "little")
    b = "int64", [1], (2**60 + 1).to_bytes(8, "little")
    delta = only_one(between(tmp_path, {"w": a}, {"w": b})).delta
    assert delta is not None
    assert delta.differing == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64", "uint16"])
def test_every_kind_of_type_has_distances(dtype: str, tmp_path: Path) -> None:
    size = BY_NAME[dtype].itemsize
    a, b = (dtype, [1], bytes(size)), (dtype, [1], bytes(size - 1) + b"\1")
    delta = only_one(between(tmp_path, {"w": a}, {"w": b})).delta
    assert delta is not None
    assert delta.differing == 1
    assert delta.max_abs > 0


def test_packed_types_are_compared_by_bits() -> None:
    index = real("hf_sharded_safetensors/ckpt")
    entry = index.tensors[0]
    packed = BY_NAME["float4_e2m1fn_x2"]
    shape = (entry.nbytes,)
    chunk = entry.chunks[0]._replace(box=entry.chunks[0].box.__class__((0,), shape))
    one = replace(entry, dtype=packed, shape=shape, chunks=(chunk,))
    moved = chunk.data._replace(offset=chunk.data.offset - entry.dtype.itemsize)
    other = replace(one, chunks=(chunk._replace(data=moved),))
    a, b = (replace(index, tensors=(x,)) for x in (one, other))
    delta = only_one(compared(a, b)).delta
    assert delta is not None
    assert 0 < delta.differing <= entry.nbytes


def test_empty_and_zero_dimensional_tensors_are_compared() -> None:
    index = real("dtensor_dtypes_dcp_4r/ckpt")
    found = compared(index, real("dtensor_dtypes_torchsave_4r/ckpt"))
    assert found.equal
    assert any(entry.shape == () for entry in index.tensors)
    assert any(entry.numel == 0 for entry in index.tensors)


# ------------------------------------------------------------------------------------------ renames


def test_a_rename_may_be_for_one_side(tmp_path: Path) -> None:
    options = DiffOptions(renames=(parse_rename("a:^old[.]=new."),))
    assert between(tmp_path, {"old.w": f32(1)}, {"new.w": f32(1)}, options).equal
    assert not between(tmp_path, {"new.w": f32(1)}, {"old.w": f32(1)}, options).equal


def test_a_rename_may_be_for_both_sides(tmp_path: Path) -> None:
    options = DiffOptions(renames=(parse_rename(r"^(old|new)\.="),))
    assert between(tmp_path, {"old.w": f32(1)}, {"new.w": f32(1)}, options).equal


def test_two_names_that_become_one_are_refused(tmp_path: Path) -> None:
    options = DiffOptions(renames=(parse_rename("[vw]=x"),))
    with pytest.raises(UsageError, match="both be called x"):
        between(tmp_path, {"v": f32(1), "w": f32(1)}, {"x": f32(1)}, options)


@pytest.mark.parametrize("text", ["", "=x", "a:=x", "w", "(=x", r"w=\1", "w=(?"])
def test_a_rename_that_cannot_be_read_is_refused(text: str) -> None:
    if text == "w=(?":
        parse_rename(text)  # a replacement is no pattern
        return
    with pytest.raises(UsageError):
        parse_rename(text)


# ------------------------------------------------------------------------------------------ objects


def plain(value: PlainValue) -> ObjectEntry:
    return ObjectEntry("o", ("o",), "other", ByteRange("f", 0, 0), value=value, opened=True)


def verdict(a: ObjectEntry, b: ObjectEntry) -> bool | None:
    with Files() as files:
        return compare_objects(a, b, files)[0]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1, 1, True),
        (1, 1.0, False),
        (1, True, False),
        ([1, 2], (1, 2), False),
        ((1, 2), Size((1, 2)), False),
        ({1: 2}, {"1": 2}, False),
        ({1: 2}, {True: 2}, False),
        ({"a": 1}, OrderedDict(a=1), True),
        ({1, 2}, {2, 1}, True),
        (b"a", "a", False),
        ({"a": [1]}, {"a": [1]}, True),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {}, False),
        (math.nan, math.nan, True),
        (None, None, True),
        ([1], [1, 2], False),
    ],
)
def test_plain_objects_are_compared_by_value(a: PlainValue, b: PlainValue, *, same: bool) -> None:
    assert verdict(plain(a), plain(b)) is same


def test_an_object_without_bytes_or_value_cannot_be_told() -> None:
    closed = replace(plain(None), opened=False, type_name="x.Y")
    assert verdict(closed, closed) is None


def test_what_cannot_be_told_is_not_equal() -> None:
    closed = replace(plain(None), opened=False, type_name="x.Y")
    index = CheckpointIndex("a", "torch", (), objects=(closed,))
    found = compared(index, index)
    assert only_one(found).status == "unknown"
    assert not found.equal


def test_closed_objects_with_equal_pickles_are_the_same() -> None:
    index = real("composer-0.32.1-fsdp_sharded/ep0-ba1")
    closed = [entry for entry in index.objects if not entry.opened]
    assert closed
    assert verdict(closed[0], closed[0])
