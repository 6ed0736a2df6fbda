"""What a checkpoint has lost is refused by all that reads values, whatever its format."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from running import run

import ckpt_tools
from ckpt_tools.core.index import ByteRange
from ckpt_tools.errors import AnswerNo, IncompleteError
from ckpt_tools.formats.protocol import is_there

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
HF = "hf_sharded_safetensors/ckpt"
SECOND = "model-00002-of-00003.safetensors"
# A folder of each format, and a file that it needs.
NEEDED = [
    (HF, SECOND),
    (HF, "model-00003-of-00003.safetensors"),
    ("dcp_hf_sharded_4r/ckpt", "shard-00002-model-00001-of-00001.safetensors"),
    ("dcp_hf_consolidated_4r/ckpt", "model-00001-of-00002.safetensors"),
    ("fsdp2_dcp_1d_4r/ckpt", "__2_0.distcp"),
    ("dcp_serialization_safetensors_4r/ckpt", "__1_0.distcp"),
    ("fsdp2_torchsave_1d_4r/ckpt", "model_rank2.pt"),
]


def lacking(name: str, file: str, tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / name, folder)
    (folder / file).unlink()
    return folder


def bins(folder: Path, *, lost: str | None = None, index: bool = True) -> Path:
    """A folder of two .bin files, a and b in the first and c in the second."""
    folder.mkdir()
    names = [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    torch.save({"a": torch.arange(3.0), "b": torch.ones(2)}, folder / names[0])
    torch.save({"c": torch.zeros(2, 2)}, folder / names[1])
    if index:
        weight_map = {"a": names[0], "b": names[0], "c": names[1]}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if lost is not None:
        (folder / lost).unlink()
    return folder


def refused(folder: Path | str, out: Path) -> None:
    """Every command that reads values refuses it, and nothing is written."""
    for command in (
        ["export", str(folder), "-o", str(out), "--check"],
        ["export", str(folder), "-o", str(out), "--only", "all"],
        ["export", str(folder), "-o", str(out), "--dry-run"],
        ["reshard", str(folder), "-o", str(out), "--to-mesh", "2", "--check"],
        ["layout", str(folder), "--to-mesh", "2"],
        ["fingerprint", str(folder)],
        ["fingerprint", str(folder), "--only", "model"],
        ["stats", str(folder)],
        ["diff", str(folder), str(folder)],
        ["diff", str(folder), str(folder), "--header-only"],
        ["inspect", str(folder)],
        ["ls", str(folder)],
    ):
        result = run(*command)
        assert result.exit_code == 3, (command, result.output)
        assert "Proven" not in result.output
    assert not out.exists()
    verified = run("verify", str(folder), "--json")
    assert verified.exit_code == 1
    assert not json.loads(verified.stdout)["whole"]


@pytest.mark.parametrize(("name", "file"), NEEDED)
def test_a_lost_file_is_refused_by_all_that_reads(name: str, file: str, tmp_path: Path) -> None:
    refused(lacking(name, file, tmp_path), tmp_path / "out")


@pytest.mark.parametrize("index", [True, False])
def test_a_lost_bin_file_is_refused(tmp_path: Path, *, index: bool) -> None:
    lost = "pytorch_model-00002-of-00002.bin"
    refused(bins(tmp_path / "ckpt", lost=lost, index=index), tmp_path / "out")


def test_all_files_lost_is_no_empty_answer(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / HF, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    refused(folder, tmp_path / "out")


def test_a_name_that_its_file_lacks_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / HF, folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["gone.weight"] = SECOND
    path.write_text(json.dumps(index))
    refused(folder, tmp_path / "out")


@pytest.mark.parametrize("index", [True, False])
def test_one_numbered_file_alone_is_not_all(tmp_path: Path, *, index: bool) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(CHECKPOINTS / HF, folder)
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    refused(folder / SECOND, tmp_path / "out")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(CHECKPOINTS / HF / SECOND, alone)
    refused(alone, tmp_path / "out")
    refused(bins(tmp_path / "bins") / "pytorch_model-00001-of-00002.bin", tmp_path / "out")


def test_bin_files_with_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    for folder in (bins(tmp_path / "one"), bins(tmp_path / "two", index=False)):
        index = ckpt_tools.open_checkpoint(str(folder))
        assert [entry.fqn for entry in index.tensors] == ["a", "b", "c"]
        assert index.problems == ()
        assert index["a"].numpy().tolist() == [0, 1, 2]
    index = ckpt_tools.open_checkpoint(str(tmp_path / "one" / "pytorch_model.bin.index.json"))
    assert len(index.tensors) == 3


def test_what_is_whole_can_be_chosen_by_name_and_what_is_lost_cannot(tmp_path: Path) -> None:
    folder = bins(tmp_path / "ckpt", lost="pytorch_model-00002-of-00002.bin")
    out = tmp_path / "out"
    for lost in (["-i", "c"], ["-i", "*"], ["-x", "a"], ["-i", "re:[bc]"]):
        assert run("export", str(folder), "-o", str(out), *lost).exit_code == 3, lost
    assert run("export", str(folder), "-o", str(out), "-x", "c", "--check").exit_code == 0
    assert run("fingerprint", str(folder), "-i", "a").exit_code == 0


def test_showing_what_is_lost_says_so(tmp_path: Path) -> None:
    folder = bins(tmp_path / "ckpt", lost="pytorch_model-00002-of-00002.bin")
    result = run("show", str(folder), "c")
    assert result.exit_code == 3
    assert "pytorch_model-00002-of-00002.bin does not exist" in result.stderr
    assert run("show", str(folder), "a").exit_code == 0
    assert run("show", str(folder), "none").exit_code == 1
    index = ckpt_tools.open_checkpoint(str(folder))
    with pytest.raises(IncompleteError, match="does not exist"):
        index["c"].numpy()
    with pytest.raises(AnswerNo):
        index["none"].numpy()
    assert index["b"].numpy().tolist() == [1, 1]


def test_verify_names_what_went_with_a_file(tmp_path: Path) -> None:
    folder = bins(tmp_path / "ckpt", lost="pytorch_model-00002-of-00002.bin")
    result = run("verify", str(folder), "--json", "--against", str(folder))
    told = json.loads(result.stdout)
    assert result.exit_code == 1
    assert told["lost"] == ["c"]
    assert not told["against"]["same"]
    assert not any("all the same" in note for note in told["notes"])
    assert "all 2 that exist are complete, 1 missing" in run("verify", str(folder)).stdout


def test_an_empty_range_is_not_in_a_file_that_is_not_there() -> None:
    # An empty tensor may be the first of a safetensors file: it was looked for in lost ones.
    assert is_there(ByteRange("a", 0, 0), {"a": 0})
    assert not is_there(ByteRange("b", 0, 0), {"a": 0})
