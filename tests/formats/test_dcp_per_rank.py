"""What ranks wrote each for itself (use_collectives=False) is one checkpoint, or is refused."""

import inspect
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from launching import job

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.errors import IncompleteError, UnsupportedError
from ckpt_tools.proof.verify import verify
from ckpt_tools.storage.reader import Files

pytestmark = pytest.mark.torchrun


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves by three ranks: "same", "differing" in tensors of the model, and in the "step"."""
    if "use_collectives" not in inspect.signature(dcp.save).parameters:
        pytest.skip("torch 2.6 saves with collectives only")
    folder = tmp_path_factory.mktemp("per_rank")
    job(3, "save_per_rank.py", folder / "same", "nothing")
    job(3, "save_per_rank.py", folder / "differing", "buffer")
    job(3, "save_per_rank.py", folder / "step", "step")
    return folder


def test_what_all_ranks_hold_alike_is_taken_once(saved: Path) -> None:
    index = ckpt_tools.open_checkpoint(str(saved / "same"))
    index.require_whole()
    assert index["model.w"].numpy().tolist() == torch.arange(30.0).view(10, 3).tolist()
    assert index["model.buffer"].numpy().tolist() == [0, 1, 2, 3, 4]
    assert len(index["model.large"].entry.chunks[0].replicas) == 2
    assert index.value("step") == 7
    assert ckpt_tools.verify(index).whole


def test_other_state_that_differs_is_kept_once_per_rank(saved: Path) -> None:
    index = ckpt_tools.open_checkpoint(str(saved / "same"))
    assert [index.value(f"dataloader.seen.rank_{rank}") for rank in range(3)] == [
        100,
        101,
        102,
    ]
    assert index["rng_state.rank_2"].numpy().tolist() == [2, 3, 4, 5, 6, 7]
    assert "Kept once per rank, as ….rank_N: dataloader.seen, rng_state." in index.notes
    tree = formats.read_index(str(saved / "same")).nesting
    assert tree.keys == ("model", "rng_state", "step", "dataloader")  # where they were


def test_tensors_that_differ_between_ranks_are_refused_by_name(saved: Path, tmp_path: Path) -> None:
    index = ckpt_tools.open_checkpoint(str(saved / "differing"))
    match = r"model.buffer, model.large: tensors that differ .* rank 1 is the first"
    with pytest.raises(UnsupportedError, match=match) as caught:
        ckpt_tools.export(index, str(tmp_path / "out"), write=WriteOptions(check=True))
    assert "the program that saved them joins them" in str(caught.value.hint)
    assert not ckpt_tools.verify(index).whole
    options = ExportOptions(include=("model.w",))
    ckpt_tools.export(index, str(tmp_path / "out"), options=options, write=WriteOptions(check=True))


def test_files_of_several_saves_are_refused(saved: Path) -> None:
    index = ckpt_tools.open_checkpoint(str(saved / "step"))
    match = r"of several saves: step is not the same on ranks 0 and 1\."
    with pytest.raises(UnsupportedError, match=match):
        index.select({"model.w"}).require_whole()


@pytest.mark.parametrize("lost", [["__2.metadata"], ["__1.metadata", "__1_0.distcp"]])
def test_a_rank_without_its_metadata_is_named(saved: Path, tmp_path: Path, lost: list[str]) -> None:
    shutil.copytree(saved / "same", tmp_path / "ckpt")
    for name in lost:
        (tmp_path / "ckpt" / name).unlink()
    index = ckpt_tools.open_checkpoint(str(tmp_path / "ckpt"))
    with pytest.raises(IncompleteError, match=f"1 of 3 ranks' own metadata .*{lost[0]}"):
        index.require_whole()


def test_a_lost_file_names_what_replicas_still_hold(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "same", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__0_0.distcp").unlink()
    index = ckpt_tools.open_checkpoint(str(tmp_path / "ckpt"))
    report = ckpt_tools.verify(index)
    assert "model.buffer" in {rescue.fqn for rescue in report.rescued}
    assert [hurt.fqn for hurt in report.damaged if hurt.lost] == ["model.w"]
    with pytest.raises(IncompleteError, match=r"__0_0\.distcp"):
        index.select({"model.buffer"}).require_whole()


def test_a_damaged_replica_is_found(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "same", tmp_path / "ckpt")
    index = formats.read_index(str(tmp_path / "ckpt"))
    path, offset, length = index.tensor("model.large").chunks[0].replicas[1]
    with open(path, "r+b") as file:
        file.seek(offset + length // 2)
        file.write(os.urandom(8))
    with Files() as files:
        report = verify(formats.read_index(str(tmp_path / "ckpt")), files)
    assert not report.whole
    assert [hurt.fqn for hurt in report.damaged] == ["model.large"]
