"""--check: a result, read back, is proven to be its source, or not given its name."""

import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt_tools import formats
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import IncompleteError, WriteError
from ckpt_tools.proof.check import same_objects, same_tensors
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = DATA / "checkpoints"
BF16 = BY_NAME["bfloat16"]


def real(name: str) -> CheckpointIndex:
    return formats.read_index(str(CHECKPOINTS / name))


def checked(
    source: CheckpointIndex,
    result: CheckpointIndex,
    renamed: Mapping[str, str],
    dtypes: Mapping[str, DType] | None = None,
) -> str:
    """``renamed`` gives the name in the result of each source tensor that was written."""
    named = [replace(e, fqn=renamed[e.fqn]) for e in source.tensors if e.fqn in renamed]
    wanted = replace(source, tensors=tuple(sorted(named, key=lambda e: e.fqn)))
    with Files() as files:
        return same_tensors(wanted, result, files, dtypes=dtypes or {})


def model_names(source: CheckpointIndex) -> dict[str, str]:
    return {e.fqn: e.fqn.removeprefix("model.") for e in source.tensors if e.section == "model"}


def save(path: Path, dtype: str, values: np.ndarray) -> CheckpointIndex:
    told = {"dtype": BY_NAME[dtype].safetensors, "shape": list(values.shape)}
    header = {"w": {**told, "data_offsets": [0, values.nbytes]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values.tobytes())
    return formats.read_index(str(path))


SOURCE = "fsdp2_dcp_hsdp_2x4/ckpt"
RESULT = "dcp_hf_sharded_4r/ckpt"


def test_what_is_the_same_is_said_in_one_line() -> None:
    source = real(SOURCE)
    told = checked(source, real(RESULT), model_names(source))
    assert told.startswith("Proven by comparison: the 13 tensors written")
    assert told.endswith("equal the source: 13 bit for bit.")
    assert "\n" not in told


def test_other_values_are_refused_by_name() -> None:
    source = real("fsdp2_dcp_1d_4r/ckpt")
    renamed = {
        e.fqn: e.fqn.removeprefix("app.model.") for e in source.tensors if e.section == "model"
    }
    with pytest.raises(WriteError, match="read back, are not what the source holds"):
        checked(source, real(RESULT), renamed)


def test_a_tensor_too_few_is_refused() -> None:
    source, result = real(SOURCE), real(RESULT)
    with pytest.raises(WriteError, match="scale is missing"):
        checked(
            source, result.select({e.fqn for e in result.tensors} - {"scale"}), model_names(source)
        )


def test_a_tensor_too_many_is_refused() -> None:
    source = real(SOURCE)
    renamed = {fqn: name for fqn, name in model_names(source).items() if name != "scale"}
    with pytest.raises(WriteError, match="scale has no source"):
        checked(source, real(RESULT), renamed)


def test_another_type_or_shape_is_refused() -> None:
    source, result = real(SOURCE), real(RESULT)
    dtypes = {"scale": BF16}
    with pytest.raises(WriteError, match=r"scale is float32 \[7\], not bfloat16 \[7\]"):
        checked(source, result, model_names(source), dtypes)


def test_names_of_objects_are_left_alone() -> None:
    source = real("fsdp2_dcp_1d_4r/ckpt")
    result = real("fsdp2_dcp_1d_4r/peer_dcp_to_torch.pt")
    renamed = {entry.fqn: entry.fqn for entry in (*source.tensors, *source.objects)}
    assert "48 tensors" in checked(source, result, renamed)


def test_a_hole_proves_nothing() -> None:
    hole = formats.read_index(str(DATA / "cases" / "C33_missing_ranks" / "hole"))
    with pytest.raises(IncompleteError):
        checked(hole, hole, {entry.fqn: entry.fqn for entry in hole.tensors})


def test_a_cast_is_compared_with_the_cast_source(tmp_path: Path) -> None:
    values = np.random.default_rng(3).standard_normal(300_000).astype(np.float32)
    values[:] = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)  # exact in bfloat16
    source = save(tmp_path / "a.safetensors", "float32", values)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    result = save(tmp_path / "b.safetensors", "bfloat16", halves)
    told = checked(source, result, {"w": "w"}, {"w": BF16})
    assert told.endswith("1 cast from float32 to bfloat16.")
    halves[-1] ^= 1
    wrong = save(tmp_path / "c.safetensors", "bfloat16", halves)
    with pytest.raises(WriteError):
        checked(source, wrong, {"w": "w"}, {"w": BF16})


def test_no_tensor_at_all_is_no_fault() -> None:
    empty = CheckpointIndex("a", "torch", ())
    assert "the 0 tensors" in checked(empty, replace(empty, root="b"), {})


# ----------------------------------------------------------------------------------------- objects


@pytest.mark.parametrize(("word", "fault"), [("s", None), ("other", r"l: \[None, 5, 's'\] and ")])
def test_a_list_that_lost_its_tensors_is_compared_as_one_value(
    word: str, fault: str | None, tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(2), "l": [torch.ones(3), 5, "s"]}, tmp_path / "source.pt")
    torch.save({"w": torch.ones(2), "l": [None, 5, word]}, tmp_path / "result.pt")
    source, result = (formats.read_index(str(tmp_path / f"{n}.pt")) for n in ("source", "result"))
    with Files() as files:
        wanted = formats.open_objects(source.select({"w", "l.1", "l.2"}), files)
        result = formats.open_objects(result, files)
        if fault is None:
            assert same_objects(wanted, result, files).startswith(" So are its 1 object ")
        else:
            with pytest.raises(WriteError, match=fault):
                same_objects(wanted, result, files)
