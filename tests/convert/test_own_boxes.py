"""A reshard without a mesh: the boxes stay those of the source, and less is written."""

from pathlib import Path

import pytest
from running import ran, run

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.core.geometry import Box

REAL = Path(__file__).parents[1] / "data" / "checkpoints"


def _boxes(ckpt: Path) -> dict[str, set[Box]]:
    index = formats.read_index(str(ckpt))
    return {
        entry.fqn: {box for box in entry.boxes if box.numel}
        for entry in index.tensors
        if entry.section == "model"
    }


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2_tp_dcp_2x2",  # strided shards
        "fsdp2_torchsave_hsdp_2x4",  # replicas, in rank files
        "megatron-fsdp-0.6.1-uneven_2r",  # cut where no mesh cuts
        "torch-2.15.0-orders_4r",
    ],
)
@pytest.mark.parametrize("more", [("--only", "model"), ("--only", "model", "--dtype", "bf16")])
def test_the_boxes_of_the_source_stay(name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    source, out = REAL / name / "ckpt", tmp_path / "out"
    ran("reshard", source, "-o", out, "--check", *more)
    assert _boxes(out) == _boxes(source)
    before, after = (formats.read_index(str(path)) for path in (source, out))
    saved = {chunk.data.path[-12:] for entry in after.tensors for chunk in entry.chunks}
    assert len(saved) > 1
    assert after.world_size == before.world_size
    assert not [entry for entry in after.tensors if entry.section == "optim"]


def test_names_change_and_boxes_do_not(tmp_path: Path) -> None:
    source, out = REAL / "fsdp2_torchsave_hsdp_2x4" / "ckpt", tmp_path / "out"
    ran("reshard", source, "-o", out, "--rename", "emb=embedding")
    assert _boxes(out)["embedding.weight"] == _boxes(source)["emb.weight"]


def test_the_same_from_python(tmp_path: Path) -> None:
    source = REAL / "fsdp2_tp_dcp_2x2" / "ckpt"
    ckpt_tools.reshard(source, tmp_path / "out", only="model", dtype="bf16")
    assert _boxes(tmp_path / "out") == _boxes(source)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing option '--to-mesh'"),
        (("--only", "model", "--placements", "R"), "--placements needs --to-mesh"),
        (("--only", "model", "--layout", "accelerate"), "--layout needs --to-mesh"),
        (("--only", "model", "--format", "ranks"), "--format ranks needs --to-mesh"),
    ],
)
def test_what_only_a_mesh_gives_a_meaning_is_refused(
    words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    result = run("reshard", REAL / "fsdp2_tp_dcp_2x2" / "ckpt", "-o", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_whole_tensors_are_for_export(tmp_path: Path) -> None:
    source = REAL / "hf_sharded_safetensors" / "ckpt"
    result = run("reshard", source, "-o", tmp_path / "out", "--dtype", "fp32")
    assert result.exit_code == 2
    assert "ckpt-tools export" in result.stderr
