"""Faults that scripts/fuzz found, each by its law."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools import open_checkpoint, reshard, verify
from ckpt_tools.errors import CheckpointError, UnreadableError
from ckpt_tools.formats import read_index
from ckpt_tools.storage.paths import inside

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_replicas_in_one_range_of_bytes_are_compared_by_their_own_strides(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    views = {
        "w": base.as_strided((2, 1, 4), (16, 4, 1), 4),
        "layers": base.as_strided((3, 1, 4), (8, 4, 1), 4),
    }
    for rank in range(2):
        other = base.clone()
        other[8:12] += rank  # no element of either view
        torch.save(
            {name: other.as_strided(v.shape, v.stride(), 4) for name, v in views.items()},
            tmp_path / f"rank_{rank}.pt",
        )
    assert not read_index(str(tmp_path)).problems


def test_an_empty_view_may_have_an_offset(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)[1:1], "v": torch.ones(2)}, checkpoint_id=tmp_path / "ckpt")
    assert verify(str(tmp_path / "ckpt")).whole
    assert open_checkpoint(str(tmp_path / "ckpt"))["w"].numpy().shape == (0,)


def test_a_name_with_a_zero_byte_is_no_file() -> None:
    with pytest.raises(UnreadableError, match="not possible"):
        inside("__0_0\0.distcp")


def test_names_that_differ_from_their_places_are_a_problem(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    dcp.save({"layers": {"a": torch.ones(2), "b": torch.ones(2)}}, checkpoint_id=ckpt)
    metadata = pickle.loads((ckpt / ".metadata").read_bytes())  # noqa: S301 (our own)
    metadata.planner_data["layers.a"] = ("layers", "c")
    (ckpt / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnreadableError, match=r"differ for layers\.a"):
        reshard(str(ckpt), str(tmp_path / "out"), to_mesh="2")
    assert not (tmp_path / "out").exists()


def test_an_object_that_nobody_could_open_is_not_copied(tmp_path: Path) -> None:
    ckpt = tmp_path / "ckpt"
    dcp.save({"w": torch.ones(2), "o": {1, 2}}, checkpoint_id=ckpt)
    place = next(entry.data for entry in read_index(str(ckpt)).objects if entry.fqn == "o")
    with open(place.path, "r+b") as file:
        file.seek(place.offset)
        data = file.read(place.length)
        file.seek(place.offset + data.index(b"PK\x01\x02"))
        file.write(b"XX")
    with pytest.raises(CheckpointError):
        reshard(str(ckpt), str(tmp_path / "out"), to_mesh="2")
    assert not (tmp_path / "out").exists()
