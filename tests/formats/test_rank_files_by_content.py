"""Rank files under names that tell no rank, and replica groups without the others."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from builders import tensor
from reader_contract import DATA, whole

from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.layout import Layout, Mesh, Replicate, Shard
from ckpt_tools.errors import (
    CheckpointError,
    CkptError,
    IncompleteError,
    UnsupportedError,
)
from ckpt_tools.formats.rank_files import checks, numbered
from ckpt_tools.formats.rank_files.file_names import RankFile
from ckpt_tools.formats.torch_file.open import open_saved
from ckpt_tools.proof.verify import verify
from ckpt_tools.storage.reader import Files

FLAT = DATA / "checkpoints" / "fsdp2_torchsave_1d_4r" / "ckpt"
HSDP = DATA / "checkpoints" / "fsdp2_torchsave_hsdp_2x4" / "ckpt"


def _values(index: CheckpointIndex) -> dict[str, bytes]:
    index.require_whole()
    with Files() as files:
        located = formats.locate(index, files)
        return {entry.fqn: whole(entry, files) for entry in located.tensors}


def _renamed(folder: Path, names: Sequence[str]) -> Path:
    """The files of ranks 0, 1, … under these names."""
    folder.mkdir()
    for rank, name in enumerate(names):
        shutil.copy(FLAT / f"model_rank{rank}.pt", folder / name)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "ckpt_{}.pth",
        "shard-{:05}.pt",
        "{}.pt",
        "step100_{}.bin",
        "a.{}.of.pt",
        "part{}of4.pt",
        "x_{}_step100.pt",
        "model-{:05}-of-00004.bin",
    ],
)
def test_numbered_files_of_a_mesh_of_as_many_ranks_are_rank_files(
    name: str, tmp_path: Path
) -> None:
    folder = _renamed(tmp_path / "saved", [name.format(rank) for rank in range(4)])
    index = formats.read_index(str(folder))
    assert _values(index) == _values(formats.read_index(str(FLAT)))
    assert any("taken from the meshes in the files" in note for note in index.notes)


def test_each_file_is_unpickled_once_to_learn_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def counted(path: str, *args: object, **more: object) -> object:
        opened.append(path)
        return open_saved(path, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(numbered, "open_saved", counted)
    folder = _renamed(tmp_path / "saved", [f"ckpt_{rank}.pt" for rank in range(4)])
    paths = [str(path) for path in folder.iterdir()]
    (family,) = numbered.families(paths, formats.ReadOptions())
    assert [file.rank for file in family] == [0, 1, 2, 3]
    assert sorted(opened) == sorted(paths)


def test_the_rank_is_the_one_in_the_file_and_not_the_number(tmp_path: Path) -> None:
    folder = _renamed(tmp_path / "saved", ["c_12.pt", "c_9.pt", "c_1.pt", "c_100.pt"])
    assert _values(formats.read_index(str(folder))) == _values(formats.read_index(str(FLAT)))


def test_a_glob_of_numbered_files_is_read(tmp_path: Path) -> None:
    folder = _renamed(tmp_path / "saved", [f"ckpt_{rank}.pth" for rank in range(4)])
    (folder / "rank_notes.pt").write_bytes(b"")
    found = formats.read_index(str(folder / "ckpt_*.pth"))
    assert _values(found) == _values(formats.read_index(str(FLAT)))


def test_of_two_steps_in_one_folder_each_has_its_glob(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    for step in (10, 20):
        for rank in range(4):
            shutil.copy(FLAT / f"model_rank{rank}.pt", folder / f"r{rank}_s{step}.pt")
    with pytest.raises(CkptError, match="several families") as caught:
        formats.read_index(str(folder))
    for step in (10, 20):
        assert f"{folder}/r*_s{step}.pt" in str(caught.value.hint)
        found = formats.read_index(str(folder / f"r*_s{step}.pt"))
        assert _values(found) == _values(formats.read_index(str(FLAT)))


def test_rank_files_in_a_folder_of_their_own_each_are_told_by_their_glob(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank{rank}").mkdir()
        shutil.copy(FLAT / f"model_rank{rank}.pt", tmp_path / f"rank{rank}" / "model.pt")
    glob = str(tmp_path / "rank*" / "model.pt")
    with pytest.raises(CkptError, match="4 are inside") as caught:
        formats.read_index(str(tmp_path))
    assert glob in str(caught.value.hint)
    assert _values(formats.read_index(glob)) == _values(formats.read_index(str(FLAT)))
    (tmp_path / "rank2" / "model.pt").unlink()
    with pytest.raises(IncompleteError, match="4 ranks"):
        formats.read_index(glob)


@pytest.mark.parametrize("name", ["model_world_size_4_rank_{}", "__{}", "model.{}", "m{}.pkl"])
def test_rank_files_without_a_usual_suffix_are_read_after_what_the_hint_says(
    name: str, tmp_path: Path
) -> None:
    names = [name.format(rank) for rank in range(4)]
    folder = _renamed(tmp_path / "saved", names)
    with pytest.raises(IncompleteError, match="not whole tensors") as caught:
        formats.read_index(str(folder / names[0])).require_whole()
    assert f"files, {names[0]} to {names[0]}.pt, and give their folder" in str(caught.value.hint)
    for one in names:
        (folder / one).rename(folder / f"{one}.pt")
    assert _values(formats.read_index(str(folder))) == _values(formats.read_index(str(FLAT)))


def test_a_numbered_file_that_is_lost_is_missed(tmp_path: Path) -> None:
    folder = _renamed(tmp_path / "saved", [f"ckpt_{rank}.pth" for rank in range(4)])
    (folder / "ckpt_2.pth").unlink()
    with pytest.raises(IncompleteError, match=r"3 files ckpt_\*.pth hold .* 4 ranks"):
        formats.read_index(str(folder))


def test_the_saves_of_one_rank_at_several_steps_are_not_joined(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    for step in range(4):
        shutil.copy(FLAT / "model_rank0.pt", tmp_path / "saved" / f"ckpt_{step}.pth")
    with pytest.raises(UnsupportedError, match="both saved by rank 0"):
        formats.read_index(str(tmp_path / "saved"))


def _without(tmp_path: Path, gone: Sequence[int]) -> Path:
    folder = shutil.copytree(HSDP, tmp_path / "hsdp")
    for rank in gone:
        (folder / f"model_rank{rank}.pt").unlink()
    return folder


@pytest.mark.parametrize("gone", [[4, 5, 6, 7], [0, 1, 2, 3]])
def test_one_whole_replica_group_is_a_whole_checkpoint(gone: list[int], tmp_path: Path) -> None:
    index = formats.read_index(str(_without(tmp_path, gone)))
    assert _values(index) == _values(formats.read_index(str(HSDP)))
    assert any("replicas of ranks" in note for note in index.notes)
    with Files() as files:
        assert verify(index, files).whole


@pytest.mark.parametrize("gone", [[7], [3, 4, 5, 6, 7], [3, 5, 6, 7], [4, 5, 6]])
def test_half_a_replica_group_is_missed(gone: list[int], tmp_path: Path) -> None:
    index = formats.read_index(str(_without(tmp_path, gone)))
    with pytest.raises(CheckpointError, match="missing: rank"):
        index.require_whole()


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        (("dp_replicate", "dp_shard"), [[0, 1, 2, 3]]),  # FSDP2 keeps norms off the dimension of TP
        (("dp_shard", "tp"), []),  # nothing says that the other group held no other tensor
        (("ep", "dp_shard"), []),
    ],
)
def test_a_group_is_whole_with_tensors_on_some_dimensions(
    names: tuple[str, ...], groups: list[list[int]]
) -> None:
    mesh = Mesh((2, 2, 2), ("dp_replicate", "dp_shard", "tp"))
    cut = Layout(mesh, (Replicate(), Shard(0), Shard(1)))
    w = replace(tensor("w", (8, 2)), layout=cut)
    norm = replace(w, layout=Layout(Mesh((2, 2), names), (Replicate(), Shard(0))))
    family = tuple(RankFile(f"rank{r}.pt", r, None, "rank", "rank*.pt") for r in range(4))
    assert checks.whole_groups(family, 8, [w, norm]) == groups


@pytest.mark.parametrize("size", range(1, 9))  # of a set's order, which is another for each
def test_a_dimension_of_size_one_is_one_more(size: int) -> None:
    full = Mesh((2, size, 1), ("dp_replicate", "dp_shard", "tp"))
    w = replace(tensor("w", (8, 2)), layout=Layout(full, (Replicate(), Shard(0), Shard(1))))
    some = Mesh((2, size), ("dp_replicate", "dp_shard"))
    norm = replace(w, layout=Layout(some, (Replicate(), Shard(0))))
    family = tuple(RankFile(f"rank{r}.pt", r, None, "rank", "rank*.pt") for r in range(size))
    assert checks.whole_groups(family, 2 * size, [w, norm]) == [[*range(size)]]


def test_of_a_lost_file_it_is_said_which_ranks_hold_all_of_it(tmp_path: Path) -> None:
    index = formats.read_index(str(_without(tmp_path, [5])))
    with pytest.raises(CheckpointError) as raised:
        index.require_whole()
    assert "only those of ranks 0-3" in str(raised.value.hint)
    index = formats.read_index(str(_without(tmp_path / "other", [1, 5])))
    with pytest.raises(CheckpointError) as raised:
        index.require_whole()
    assert "keep only" not in str(raised.value.hint)


@pytest.mark.parametrize("name", ["rank_{}.pt", "ckpt_{}.pth"])
def test_hidden_files_beside_rank_files_are_not_read(name: str, tmp_path: Path) -> None:
    folder = _renamed(tmp_path / "saved", [name.format(rank) for rank in range(4)])
    for rank in range(4):  # macOS's, on a disk of another system
        (folder / f"._{name.format(rank)}").write_bytes(b"\0\5\x16\7" + bytes(60))
    index = formats.read_index(str(folder))
    assert _values(index) == _values(formats.read_index(str(FLAT)))


@pytest.mark.parametrize("steps", [("",), ("step_100", "step_200")])
def test_rank_files_in_folders_of_their_own_are_one_checkpoint_and_no_run(
    steps: Sequence[str], tmp_path: Path
) -> None:
    for step in steps:
        for rank in range(4):
            folder = tmp_path / step / f"rank_{rank}"
            folder.mkdir(parents=True)
            shutil.copy(FLAT / f"model_rank{rank}.pt", folder / "model.pt")
    assert formats.run_of(str(tmp_path)) == []
    with pytest.raises(CheckpointError) as caught:
        formats.read_index(str(tmp_path))
    globs = [str(tmp_path / step / "rank_*" / "model.pt") for step in steps]
    assert all(f"ckpt-tools inspect {glob!r}" in str(caught.value.hint) for glob in globs)
    index = formats.read_index(globs[0])
    assert _values(index) == _values(formats.read_index(str(FLAT)))
    assert any("rank_3/model.pt is of rank 3" in note for note in index.notes)


def test_a_rank_file_in_a_folder_without_the_others_is_not_sent_to_that_folder(
    tmp_path: Path,
) -> None:
    folder = _renamed(tmp_path / "saved", ["rank_0.pt", "rank_1.pt"])
    for names, told in (["rank_0.pt", "rank_1.pt"], True), (["rank_0.pt"], False):
        for path in folder.iterdir():
            if path.name not in names:
                path.unlink()
        with pytest.raises(IncompleteError, match="not whole tensors") as caught:
            formats.read_index(str(folder / "rank_0.pt")).require_whole()
        assert (f"ckpt-tools inspect {folder}" in str(caught.value.hint)) == told


@pytest.mark.parametrize("name", ["rank_{}.pt", "shard{}.pt"])
def test_nodes_that_count_their_own_ranks_are_one_checkpoint(name: str, tmp_path: Path) -> None:
    for rank in range(4):
        node = tmp_path / f"node{rank // 2}"
        node.mkdir(exist_ok=True)
        shutil.copy(FLAT / f"model_rank{rank}.pt", node / name.format(rank % 2))
    every = str(tmp_path / "node*" / name.format("*"))
    index = formats.read_index(every)
    assert _values(index) == _values(formats.read_index(str(FLAT)))
    assert any(f"node1/{name.format(0)} is of rank 2" in note for note in index.notes)
    (tmp_path / "node1" / name.format(1)).unlink()
    with pytest.raises(IncompleteError, match="a mesh of 4 ranks"):
        formats.read_index(every)
