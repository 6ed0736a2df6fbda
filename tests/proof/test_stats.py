"""Statistics against numpy and torch, and the anomalies that point at a lost rank."""

import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools import formats
from ckpt_tools.copying.cast import numbers
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.errors import IncompleteError
from ckpt_tools.proof.scan import Moments, moments_of
from ckpt_tools.proof.stats import Statistics, TensorStats, stats
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = DATA / "checkpoints"


def of(index: CheckpointIndex) -> Statistics:
    with Files() as files:
        return stats(index, files)


def chunked(
    path: Path, array: np.ndarray, pieces: int, *, section: str = "model"
) -> CheckpointIndex:
    """A float32 tensor cut by rows into pieces of one file each, of rank 0, 1, …"""
    chunks, start = [], 0
    for rank, part in enumerate(np.array_split(array.astype(np.float32), pieces)):
        file = path / f"{path.name}_{rank}"
        file.write_bytes(part.tobytes())
        box = Box((start, *(0 for _ in part.shape[1:])), part.shape)
        chunks.append(Chunk(box, ByteRange(str(file), 0, part.nbytes), rank=rank))
        start += len(part)
    entry = TensorEntry("w", ("w",), section, BY_NAME["float32"], array.shape, tuple(chunks))  # type: ignore[arg-type]
    return CheckpointIndex(str(path), "dcp", (entry,))


def kinds(found: Statistics) -> list[tuple[str, str, int | None]]:
    return [(odd.fqn, odd.kind, odd.rank) for odd in found.anomalies]


# ------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "name", [name for name, row in BY_NAME.items() if row.kind in ("float", "int", "uint", "bool")]
)
def test_elements_are_what_torch_says_they_are(name: str) -> None:
    torch = pytest.importorskip("torch")
    data = bytes(range(256)) * 8 if name != "bool" else bytes([0, 1]) * 8
    found = numbers(memoryview(data), BY_NAME[name])
    if name == "float8_e8m0fnu":
        expected = np.array([2.0 ** (b - 127) for b in range(255)] + [math.nan] * 1)
        assert np.array_equal(found[:256], expected, equal_nan=True)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(getattr(torch, name))
    expected = tensor.to(torch.float64).numpy()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("name", ["complex32", "complex64", "complex128"])
def test_complex_elements_are_pairs(name: str) -> None:
    half = BY_NAME[name].itemsize // 2
    real = {2: np.float16, 4: np.float32, 8: np.float64}[half]
    data = np.array([1, 2, -3, 0.5], real).tobytes()
    assert numbers(memoryview(data), BY_NAME[name]).tolist() == [1 + 2j, -3 + 0.5j]


# ------------------------------------------------------------------------------------------ moments

finite = st.floats(-1e6, 1e6, width=32)


@given(st.lists(st.lists(finite, min_size=1, max_size=20), min_size=1, max_size=5))
def test_joined_moments_are_those_of_all_values(parts: list[list[float]]) -> None:
    total = Moments()
    for part in parts:
        data = np.array(part, np.float32).tobytes()
        total.join(moments_of(memoryview(data), BY_NAME["float32"], at_once=1 << 16))
    values = np.array([v for part in parts for v in part], np.float32).astype(np.float64)
    assert total.numel == len(values)
    assert total.mean == pytest.approx(values.mean(), rel=1e-9, abs=1e-6)
    assert total.std == pytest.approx(values.std(), rel=1e-6, abs=1e-4)
    assert (total.least, total.greatest) == (values.min(), values.max())
    assert total.l2 == pytest.approx(np.linalg.norm(values), rel=1e-9)


def moments(*values: float, dtype: str = "float32") -> Moments:
    words = {"float32": np.float32, "float16": np.float16, "int64": np.int64, "uint64": np.uint64}
    data = np.array(values, words[dtype]).tobytes()
    return moments_of(memoryview(data), BY_NAME[dtype], at_once=1 << 16)


def test_odd_values_are_counted_and_left_out() -> None:
    found = moments(1, math.nan, math.inf, -math.inf, 0, 3)
    assert (found.nan, found.inf, found.zeros, found.finite) == (1, 2, 1, 3)
    assert (found.mean, found.least, found.greatest) == (pytest.approx(4 / 3), 0, 3)


def test_nothing_finite_has_no_numbers() -> None:
    found = moments(math.nan, math.inf)
    assert (found.std, found.l2, found.least) == (None, None, None)


def test_a_negative_zero_is_a_zero() -> None:
    assert moments(-0.0).zeros == 1


def test_half_precision_does_not_overflow() -> None:
    found = moments(*[60000.0] * 3000, dtype="float16")
    assert found.mean == 60000.0 - 60000.0 % 32
    assert found.std == 0


def test_a_small_spread_around_a_large_mean_is_kept() -> None:
    values = np.full(1 << 20, 1e4, np.float32)
    values[::2] += 1
    found = moments_of(memoryview(values.tobytes()), BY_NAME["float32"], at_once=1 << 16)
    assert found.std == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize(("dtype", "value"), [("int64", -(2**60) - 1), ("uint64", 2**64 - 1)])
def test_extremes_of_large_integers_are_exact(dtype: str, value: int) -> None:
    assert moments(value, dtype=dtype).least == value


def test_extremes_of_complex_numbers_are_magnitudes() -> None:
    data = np.array([3 + 4j, 0], np.complex64).tobytes()
    found = moments_of(memoryview(data), BY_NAME["complex64"], at_once=1 << 16)
    assert (found.least, found.greatest, found.l2, found.mean) == (0, 5, 5, 1.5 + 2j)


# --------------------------------------------------------------------------------- real checkpoints


def test_sharding_changes_no_statistics() -> None:
    sharded = of(formats.read_index(str(CHECKPOINTS / "fsdp2_shard1_dcp_4r" / "ckpt")))
    truth = of(formats.read_index(str(CHECKPOINTS / "fsdp2_shard1_dcp_4r" / "truth.safetensors")))
    expected = {tensor.fqn: tensor for tensor in truth.tensors}
    for found in sharded.tensors:
        assert found.l2 == pytest.approx(expected[found.fqn].l2, rel=1e-12)
        assert found.std == pytest.approx(expected[found.fqn].std, rel=1e-9, abs=1e-15)
        assert (found.min, found.max) == (expected[found.fqn].min, expected[found.fqn].max)


def test_every_type_has_statistics() -> None:
    found = of(formats.read_index(str(CHECKPOINTS / "dtensor_dtypes_dcp_4r" / "ckpt")))
    without = [t.fqn for t in found.tensors if t.numel and t.mean is None and not t.nan + t.inf]
    assert without == []
    assert found.nonfinite == 3


def test_an_empty_tensor_has_none() -> None:
    found = of(formats.read_index(str(CHECKPOINTS / "dtensor_dtypes_dcp_4r" / "ckpt")))
    empty: TensorStats = next(t for t in found.tensors if t.numel == 0)
    assert (empty.mean, empty.min, empty.l2, empty.zeros) == (None, None, None, 0)


def test_a_replicated_chunk_counts_once() -> None:
    found = of(formats.read_index(str(CHECKPOINTS / "fsdp2_torchsave_hsdp_2x4" / "ckpt")))
    index = formats.read_index(str(CHECKPOINTS / "dcp_hf_sharded_4r" / "ckpt"))
    l2 = {tensor.fqn: tensor.l2 for tensor in of(index).tensors}
    clean = {tensor.fqn.removeprefix("model."): tensor.l2 for tensor in found.tensors}
    assert clean == pytest.approx(l2)


def test_a_hole_has_no_statistics() -> None:
    with pytest.raises(IncompleteError):
        of(formats.read_index(str(DATA / "cases" / "C33_missing_ranks" / "hole")))


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_dcp_1d_4r/ckpt",
        "fsdp2_torchsave_hsdp_2x4/ckpt",
        "hf_sharded_safetensors/ckpt",
        "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
        "peft_fsdp2_dcp_4r/ckpt",
        "torch-2.11-cpu-fsdp2-4x8/dcp",
    ],
)
def test_nothing_is_odd_about_real_checkpoints(name: str) -> None:
    assert of(formats.read_index(str(CHECKPOINTS / name))).anomalies == ()


# ---------------------------------------------------------------------------------------- anomalies

WEIGHTS = np.random.default_rng(7).standard_normal((16, 8))


@pytest.mark.parametrize(("value", "kind"), [(0.0, "zero"), (1.5, "constant"), (math.nan, "nan")])
def test_a_chunk_unlike_the_rest_is_named_with_its_rank(
    value: float, kind: str, tmp_path: Path
) -> None:
    array = WEIGHTS.copy()
    array[4:8] = value
    assert kinds(of(chunked(tmp_path, array, 4))) == [("w", kind, 1)]


def test_a_repeated_chunk_is_named_with_its_rank(tmp_path: Path) -> None:
    array = WEIGHTS.copy()
    array[12:16] = array[0:4]
    found = of(chunked(tmp_path, array, 4))
    assert kinds(found) == [("w", "repeated", 3)]
    assert "of rank 0" in found.anomalies[0].detail


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_tensor_that_is_all_alike_is_not_odd(value: float, tmp_path: Path) -> None:
    assert kinds(of(chunked(tmp_path, np.full((16, 8), value), 4))) == []


def test_zeros_that_end_inside_a_chunk_are_not_odd(tmp_path: Path) -> None:
    array = WEIGHTS.copy()
    array[5:8] = 0
    assert kinds(of(chunked(tmp_path, array, 4))) == []


def test_chunks_of_a_few_elements_are_not_odd(tmp_path: Path) -> None:
    assert kinds(of(chunked(tmp_path, np.array([0.0, 1, 2, 3]), 4))) == []


def whole(
    folder: Path, arrays: dict[str, np.ndarray], *, section: str = "model"
) -> CheckpointIndex:
    """Tensors in one piece each."""
    entries = []
    for name, array in sorted(arrays.items()):
        (folder / name).mkdir()
        (entry,) = chunked(folder / name, array, 1, section=section).tensors
        entries.append(replace(entry, fqn=name, path=(name,)))
    return CheckpointIndex(str(folder), "torch", tuple(entries))


def lost_rows(rows: int, start: int, end: int) -> np.ndarray:
    array = np.random.default_rng(rows).standard_normal((rows, 8))
    array[start:end] = 0
    return array


def test_the_share_of_a_lost_rank_shows_in_a_full_file(tmp_path: Path) -> None:
    arrays = {"a": lost_rows(16, 4, 8), "b": lost_rows(10, 3, 6), "c": lost_rows(9, 0, 0)}
    found = of(whole(tmp_path, arrays))
    assert kinds(found) == [("a", "zero rows", 1), ("b", "zero rows", 1)]
    assert "rank 1 of 4" in found.anomalies[0].detail


def test_zero_rows_of_one_tensor_alone_are_not_odd(tmp_path: Path) -> None:
    assert kinds(of(whole(tmp_path, {"a": lost_rows(16, 4, 8), "c": WEIGHTS}))) == []


def test_zero_rows_that_are_no_ranks_share_are_not_odd(tmp_path: Path) -> None:
    arrays = {"a": lost_rows(16, 5, 8), "b": lost_rows(16, 5, 8)}
    assert kinds(of(whole(tmp_path, arrays))) == []


def test_padding_rows_of_tied_embeddings_are_not_odd(tmp_path: Path) -> None:
    arrays = {"emb": lost_rows(16, 3, 4), "head": lost_rows(16, 3, 4)}
    assert kinds(of(whole(tmp_path, arrays))) == []


def test_zero_rows_of_optimizer_state_are_not_odd(tmp_path: Path) -> None:
    arrays = {"a": lost_rows(16, 4, 8), "b": lost_rows(10, 3, 6)}
    assert kinds(of(whole(tmp_path, arrays, section="optim"))) == []


def test_rows_longer_than_a_slab_are_looked_at_too(sizes: Sizes, tmp_path: Path) -> None:
    """A row comes in two pieces."""
    arrays = {}
    for name, rows in (("a", 8), ("b", 8)):
        array = np.ones((rows, sizes.slab * 3 // 10), np.float32)
        array[rows // 4 : rows // 2] = 0
        arrays[name] = array
    assert kinds(of(whole(tmp_path, arrays))) == [("a", "zero rows", 1), ("b", "zero rows", 1)]


def test_one_ranks_zeros_in_a_real_directory_are_found(tmp_path: Path) -> None:
    """All that rank 2 saved is zero, with checksums that do not fit any more."""
    path = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / "fsdp2_dcp_1d_4r" / "ckpt", path)
    with Files() as files:
        index = formats.locate(formats.read_index(str(path)), files)
    file = path / "__2_0.distcp"
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    for entry in index.tensors:
        for chunk in entry.chunks:
            if chunk.data.path == str(file):
                content[chunk.data.offset : chunk.data.offset + chunk.data.length] = bytes(
                    chunk.data.length
                )
    file.write_bytes(content)
    odd = of(formats.read_index(str(path))).anomalies
    assert {(one.kind, one.rank) for one in odd} == {("zero", 2)}
    assert len(odd) > 5
