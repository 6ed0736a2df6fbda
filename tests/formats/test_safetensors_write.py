"""The safetensors planner: what its plans say, carried out by hand, must load with safetensors."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_writer import told
from safetensors import safe_open

from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk, TensorEntry
from ckpt_tools.core.plan import FilePlan, Target
from ckpt_tools.errors import IncompleteError, UnsupportedError, UsageError
from ckpt_tools.formats.protocol import PlanOptions
from ckpt_tools.formats.safetensors import read as safetensors
from ckpt_tools.formats.safetensors.write import plan_files

SINGLE = [dtype for dtype in BY_NAME.values() if dtype.packed == 1]  # others: test_packed_floats
HELD = [one for one in SINGLE if one.safetensors is not None and hasattr(torch, one.name)]
NOT_HELD = [dtype for dtype in SINGLE if dtype.safetensors is None]


def target(fqn: str, shape: tuple[int, ...], dtype: DType = BY_NAME["float32"]) -> Target:
    """A tensor whose one chunk is nowhere: values are made up when the plan is carried out."""
    box = Box.whole(shape)
    chunk = Chunk(box, ByteRange("nowhere", 0, box.numel * dtype.itemsize))
    return Target(fqn, (fqn,), TensorEntry(fqn, (fqn,), "model", dtype, shape, (chunk,)), dtype)


def plan(
    targets: Sequence[Target], *, max_shard_size: int = 10**9, **metadata: str
) -> list[FilePlan]:
    options = PlanOptions(max_shard_size=max_shard_size, metadata=metadata)
    return plan_files(targets, options=options)


def values(fqn: str, nbytes: int) -> bytes:
    """Bytes that depend on the name; 0 and 1 only, so that they are good bools too."""
    seed = int.from_bytes(fqn.encode()[-4:], "little")
    return np.random.default_rng(seed).integers(0, 2, nbytes, np.uint8).tobytes()


def carry_out(plans: Iterable[FilePlan], folder: Path) -> None:
    """Write the files, byte by byte as planned; no byte may be planned twice or not at all."""
    for file in plans:
        pieces = dict(file.literals)
        for item in file.items:
            assert item.path == file.path
            assert item.offset not in pieces
            pieces[item.offset] = values(item.fqn, item.box.numel * item.target.itemsize)
        written = b""
        for offset, data in sorted(pieces.items()):
            assert offset == len(written)
            written += data
        assert len(written) == file.length
        (folder / file.path).write_bytes(written)


def assert_loads(targets: Sequence[Target], folder: Path, *, files: int) -> None:
    """safetensors itself finds exactly these tensors, with these bytes."""
    found = {}
    paths = sorted(folder.glob("*.safetensors"))
    assert len(paths) == files
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for fqn in file.keys():  # noqa: SIM118 - it is no mapping
                assert fqn not in found
                found[fqn] = file.get_tensor(fqn)
    assert found.keys() == {target.fqn for target in targets}
    for wanted in targets:
        tensor = found[wanted.fqn]
        assert tensor.dtype == getattr(torch, wanted.dtype.name)
        assert tuple(tensor.shape) == wanted.entry.shape
        if tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw == values(wanted.fqn, len(raw))


@pytest.mark.parametrize("dtype", HELD, ids=lambda dtype: dtype.name)
def test_every_type_that_we_write_is_loaded_by_safetensors(tmp_path: Path, dtype: DType) -> None:
    targets = [target("w", (3, 5), dtype), target("scalar", (), dtype), target("e", (0, 4), dtype)]
    carry_out(plan(targets), tmp_path)
    assert_loads(targets, tmp_path, files=1)


def test_all_types_live_in_one_file(tmp_path: Path) -> None:
    targets = [target(dtype.name, (3,), dtype) for dtype in HELD]
    carry_out(plan(targets), tmp_path)
    assert_loads(targets, tmp_path, files=1)


def test_names_of_any_script_are_kept(tmp_path: Path) -> None:
    names = ["", " ", "a b[0]", 'quote"d', "back\\slash", "Gewicht.größe", "权重", "tab\t", "🙂"]
    targets = [target(name, (2,)) for name in names]
    carry_out(plan(targets), tmp_path)
    assert_loads(targets, tmp_path, files=1)


@given(
    shapes=st.dictionaries(
        st.text("abc.", min_size=1, max_size=5),
        st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from(HELD)),
        max_size=12,
    ),
    limit=st.integers(1, 200),
)
def test_any_plan_loads_and_keeps_to_its_limit(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: dict[str, tuple[list[int], DType]],
    limit: int,
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    targets = [target(fqn, tuple(shape), dtype) for fqn, (shape, dtype) in shapes.items()]
    plans = plan(targets, max_shard_size=limit)
    carry_out(plans, folder)
    shards = [file for file in plans if file.path.endswith(".safetensors")]
    assert_loads(targets, folder, files=len(shards))
    for shard in shards:
        sizes = [item.box.numel * item.target.itemsize for item in shard.items]
        assert sum(sizes) <= limit or len(sizes) == 1


def test_our_own_reader_finds_shards_and_index_whole(tmp_path: Path) -> None:
    targets = [target(f"w{n}", (4, 2)) for n in range(5)]
    carry_out(plan(targets, max_shard_size=64), tmp_path)
    index = safetensors.read_index(str(tmp_path))
    assert [entry.fqn for entry in index.tensors] == [f"w{n}" for n in range(5)]
    assert (index.problems, index.notes) == ((), ())


def test_one_shard_needs_no_number_and_no_index() -> None:
    assert [file.path for file in plan([target("w", (2,))])] == ["model.safetensors"]


def test_shards_are_numbered_and_listed() -> None:
    plans = plan([target("b", (2,)), target("a", (2,))], max_shard_size=8)
    assert [file.path for file in plans] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert json.loads(list(plans)[-1].literals[0][1]) == {
        "metadata": {"total_size": 16},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        },
    }


def test_a_tensor_over_the_limit_has_a_shard_of_its_own() -> None:
    targets = [target("a", (1,)), target("b", (100,)), target("c", (1,)), target("d", (1,))]
    *shards, _index = plan(targets, max_shard_size=8)
    assert [[item.fqn for item in shard.items] for shard in shards] == [["a"], ["b"], ["c", "d"]]


def test_the_order_of_the_targets_does_not_change_a_byte() -> None:
    targets = [target(name, (2,)) for name in "abcde"]
    there = plan(targets, max_shard_size=16, z="1", a="2")
    back = plan(targets[::-1], max_shard_size=16, a="2", z="1")
    assert told(there) == told(back)


def test_the_header_tells_the_format_and_the_provenance(tmp_path: Path) -> None:
    carry_out(plan([target("w", (2,))], source_format="dcp"), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "source_format": "dcp"}


def test_every_tensor_is_aligned_to_its_element() -> None:
    targets = [target(f"{n}{dtype.name}", (3,), dtype) for n in range(3) for dtype in HELD]
    (file,) = plan(targets)
    assert all(item.offset % item.target.itemsize == 0 for item in file.items)


def test_nothing_at_all_is_still_a_file(tmp_path: Path) -> None:
    carry_out(plan([]), tmp_path)
    assert_loads([], tmp_path, files=1)


def test_a_cast_takes_the_size_of_its_target() -> None:
    wide = target("w", (4,))
    (file,) = plan([wide._replace(dtype=BY_NAME["bfloat16"])])
    (item,) = file.items
    assert (item.source.name, item.target.name) == ("float32", "bfloat16")
    assert file.length - item.offset == 8


def test_types_that_safetensors_lacks_are_refused_all_at_once() -> None:
    targets = [target(dtype.name, (2,), dtype) for dtype in NOT_HELD]
    with pytest.raises(UnsupportedError) as caught:
        plan([*targets, target("w", (2,))])
    assert all(f"{dtype.name} ({dtype.name})" in caught.value.message for dtype in NOT_HELD)
    assert "w (" not in caught.value.message


def test_two_tensors_of_one_name_are_refused_with_both_sources() -> None:
    first, second = target("module.w", (2,)), target("_orig_mod.w", (2,))
    with pytest.raises(UsageError, match=r"module\.w and _orig_mod\.w .* as w"):
        plan([first._replace(fqn="w"), second._replace(fqn="w")])


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_the_format_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="cannot be named"):
        plan([target(name, (2,))])


def test_a_tensor_with_a_hole_is_refused_before_anything_is_planned() -> None:
    whole = target("w", (4,))
    half = Chunk(Box((0,), (2,)), ByteRange("nowhere", 0, 8))
    entry = TensorEntry("w", ("w",), "model", whole.dtype, (4,), (half,))
    with pytest.raises(IncompleteError):
        plan([whole._replace(entry=entry)])


@pytest.mark.parametrize(("limit", "basename"), [(0, "model"), (1, ""), (1, "a/b")])
def test_shards_that_cannot_be_meant_are_refused(limit: int, basename: str) -> None:
    with pytest.raises(UsageError):
        plan_files([], options=PlanOptions(max_shard_size=limit, basename=basename))
