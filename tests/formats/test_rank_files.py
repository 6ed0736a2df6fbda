"""Folders of per-rank files: real ones, families, replicas, ranks that are missing or disagree."""

import os
import re
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from dtensor_files import HYBRID, ROWS, dtensor, mesh_of, read_by_ranks, save_ranks, shard
from reader_contract import DATA, ReaderContract, RealCheckpoint, truth_of, whole
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

from ckpt_tools.core import layout
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import (
    IncompleteError,
    UnreadableError,
    UnsupportedError,
    UsageError,
)
from ckpt_tools.formats import read_index
from ckpt_tools.formats.rank_files import read as rank_files
from ckpt_tools.storage.reader import Files

REAL = DATA / "checkpoints"


def by_name_or_id(fqn: str) -> str | None:
    """The truth has the optimizer by name; entries by id or of other state are looked at apart."""
    return None if re.match(r"(optim\.)?state\.\d+\.|extra_state\.", fqn) else fqn


class TestRankFiles(ReaderContract):
    checkpoints: ClassVar[tuple[RealCheckpoint, ...]] = (
        *(
            RealCheckpoint(f"checkpoints/{folder}/ckpt", f"checkpoints/{folder}")
            for folder in (
                "dtensor_dtypes_torchsave_4r",
                "fsdp1_sharded_hsdp2x2_torchsave",
                "fsdp1_sharded_mesh1d_torchsave",
                "fsdp2_ep_torchsave_2x2",
                "fsdp2_tied_torchsave_4r",
                "fsdp2_torchsave_1d_4r",
                "fsdp2_torchsave_hsdp_2x4",
                "fsdp2_torchsave_legacy_4r",
                "fsdp2_tp_torchsave_2x2",
                "fsdp2_wrapped_torchsave_2r",
                "peft_fsdp2_adapter_torchsave_4r",
            )
        ),
        *(
            RealCheckpoint(
                f"checkpoints/{folder}/ranks",
                f"checkpoints/{folder}",
                by_name_or_id,
                lambda name: name.startswith("optim."),
            )
            for folder in (
                "torch-2.11-cpu-fsdp2-4x8",
                "torch-2.11-cuda-fsdp2-2x1",
                "torch-2.11-cuda-fsdp2bf16-2",
            )
        ),
        RealCheckpoint(
            "checkpoints/torch-2.15.0-fsdp2_1d_4r/ranks",
            "checkpoints/torch-2.15.0-fsdp2_1d_4r",
            "model.{}".format,
            lambda name: name.startswith("optim."),
        ),
        *(
            RealCheckpoint(f"checkpoints/{folder}/ranks", f"checkpoints/{folder}")
            for folder in (
                "torch-2.15.0-checkpointable_4r",
                "torch-2.15.0-checkpointable-equal_2r",
                "torch-2.15.0-orders_4r",
                "torch-2.15.0-strides_4r",
            )
        ),
        RealCheckpoint(
            "checkpoints/torch-2.9.1-e3_fsdp1_tp/ranks",
            "checkpoints/torch-2.9.1-e3_fsdp1_tp",
            lambda fqn: fqn.replace("optimizer.", "optim.", 1),
        ),
        RealCheckpoint(
            "checkpoints/torch-2.9.1-c3_fsdp1_get_state_dict/ranks",
            "checkpoints/torch-2.9.1-c3_fsdp1_get_state_dict",
        ),
        RealCheckpoint(
            "checkpoints/verl_fsdp2_4r/ckpt/global_step_1/actor",
            "checkpoints/verl_fsdp2_4r",
            lambda fqn: None if fqn.startswith("extra_state") else fqn,
        ),
    )

    def read(self, path: Path) -> CheckpointIndex:
        assert rank_files.matches(str(path))
        return rank_files.read_index(str(path))


def read(folder: Path) -> CheckpointIndex:
    return rank_files.read_index(str(folder))


def values(index: CheckpointIndex, fqn: str) -> bytes:
    entry = index.tensor(fqn)
    assert entry is not None
    with Files() as files:
        return whole(entry, files)


def glob(folder: Path, pattern: str) -> list[str]:
    return sorted(str(path) for path in folder.glob(pattern))


W = torch.arange(44, dtype=torch.float32).view(11, 4)
V = torch.arange(60, dtype=torch.bfloat16).view(6, 10)
BUFFER = torch.arange(5)


# ---------------------------------------------------------------------- meshes, boxes and replicas


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((1,), ROWS),
        ((3,), ROWS),
        ((3,), (Shard(1),)),
        ((16,), ROWS),
        ((2, 3), HYBRID),
        ((2, 3), (Shard(0), Shard(1))),
        ((2, 3), (Shard(0), Shard(0))),
        ((2, 2, 2), (*HYBRID, Shard(1))),
    ],
)
def test_shards_on_any_mesh_make_the_whole_tensor(
    tmp_path: Path, mesh: tuple[int, ...], placements: tuple[object, ...]
) -> None:
    save_ranks(tmp_path, {"w": (W, placements), "v": (V, placements)}, mesh)
    index = read(tmp_path)
    index.require_whole()
    assert values(index, "w") == W.numpy().tobytes()
    assert values(index, "v") == V.view(torch.uint8).numpy().tobytes()
    assert (index.mesh.shape, index.world_size) == (mesh, layout.Mesh(mesh).size)


def test_replicas_are_listed_beside_the_lowest_ranks_bytes(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, {"w": (W, HYBRID)}, (2, 2))
    first, second = read(tmp_path).tensors[0].chunks
    assert [c.data.path for c in (first, second)] == [str(paths[0]), str(paths[1])]
    assert [r.path for c in (first, second) for r in c.replicas] == [str(paths[2]), str(paths[3])]


def test_the_stated_layout_is_kept(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, HYBRID)}, (2, 2))
    entry = read(tmp_path).tensors[0]
    assert entry.layout.placements == (layout.Replicate(), layout.Shard(0))
    assert entry.layout.mesh.dim_names == ("dim0", "dim1")


def test_fsdp_over_tensor_parallel_is_cut_by_tp_first() -> None:
    entry = read(REAL / "fsdp2_tp_torchsave_2x2/ckpt").tensor("blocks.0.fc1.weight")
    assert entry.layout.order == (1, 0)


def test_tensors_of_one_file_may_be_on_different_meshes() -> None:
    index = read(REAL / "fsdp2_tp_torchsave_2x2/ckpt")
    meshes = {entry.layout.mesh.dim_names for entry in index.tensors if entry.layout is not None}
    assert meshes == {("dp",), ("dp", "tp")}
    assert index.mesh.dim_names == ("dp", "tp")


@pytest.mark.parametrize("engine", ["copy", "gather"])
def test_replicas_that_differ_are_refused_by_every_engine(tmp_path: Path, engine: str) -> None:
    save_ranks(tmp_path, {"w": (W, HYBRID)}, (2, 2))
    mesh = mesh_of((2, 2), 3)
    local = shard(W, HYBRID, mesh) + 1
    state = {"w": dtensor(local, W.shape, HYBRID, mesh)}
    torch.save(state, tmp_path / "model_world_size_4_rank_3.pt")
    with pytest.raises(UnsupportedError, match=r"different ones, .* right: w \[6:11, 0:4\]"):
        (read if engine == "copy" else read_by_ranks)(tmp_path).require_whole()


@pytest.mark.parametrize("engine", ["copy", "gather"])
def test_a_name_in_two_families_is_refused_by_every_engine(tmp_path: Path, engine: str) -> None:
    model, optim = {"x": W}, {"optim": {"m": W}}
    for rank, states in enumerate([(model, optim), ({"y": W}, optim | {"model": model})]):
        for name, state in zip(("model", "optim"), states, strict=True):
            torch.save(state, tmp_path / f"{name}_world_size_2_rank_{rank}.pt")
    with pytest.raises(UnsupportedError, match=r"model\.x is in the files "):
        (read if engine == "copy" else read_by_ranks)(tmp_path)


def test_what_is_a_tensor_on_one_rank_alone_is_refused(tmp_path: Path) -> None:
    for rank, state in enumerate([{"w": W, "n": W}, {"w": W, "n": 7}]):
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    index = read(tmp_path)
    text = r"n: it is a tensor on rank 0, and on rank 1 it is a plain value\."
    with pytest.raises(UnsupportedError, match=text):
        index.require_whole()
    assert [entry.fqn for entry in index.entries] == ["n", "w"]


def test_a_ranks_own_state_may_be_a_tensor_or_none(tmp_path: Path) -> None:
    for rank, own in enumerate([None, W, 2 * W]):
        state = {"model": {"w": W}, "rng": {"cuda": own}}
        torch.save(state, tmp_path / f"model_world_size_3_rank_{rank}.pt")
    index = read(tmp_path)
    index.require_whole()
    assert "Kept once per rank, as ….rank_N: rng.cuda." in index.notes
    assert [entry.fqn for entry in index.objects] == ["rng.cuda.rank_0"]
    assert [entry.fqn for entry in index.tensors] == [
        "model.w",
        "rng.cuda.rank_1",
        "rng.cuda.rank_2",
    ]


def test_one_name_at_two_places_is_refused(tmp_path: Path) -> None:
    for rank, state in enumerate([{"a.b": W}, {"a": {"b": 3}}]):
        torch.save(state, tmp_path / f"rank{rank}.pt")
    text = r"a\.b: it is \['a\.b'\] on some ranks, and \['a', 'b'\] on others\."
    with pytest.raises(UnsupportedError, match=text):
        read(tmp_path).require_whole()


def test_partial_sums_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        mesh = mesh_of((2,), rank)
        state = {"w": dtensor(W, W.shape, (Partial(),), mesh), "b": BUFFER}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    index = read(tmp_path)
    with pytest.raises(UnsupportedError, match=r"w: it is Partial\(sum\)"):
        index.require_whole()
    index.select({"b"}).require_whole()


def test_partial_sums_of_a_real_job_are_refused() -> None:
    index = read(REAL / "torch-2.15.0-partial_4r" / "ranks")
    with pytest.raises(UnsupportedError, match=r"^p: it is Partial\(sum\)"):
        index.require_whole()
    truth = truth_of(REAL / "torch-2.15.0-partial_4r")
    assert values(index.select({"q"}), "q") == truth["q"].data
    lone = read_index(str(REAL / "torch-2.15.0-partial_4r" / "ranks" / "rank_2.pt"))
    assert [entry.chunks[0].rank for entry in lone.tensors] == [2, 2]


def test_a_strided_shard_that_nothing_cuts_first_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        mesh, strided = mesh_of((2,), rank), (_StridedShard(0, split_factor=2),)
        state = {"w": dtensor(shard(W, ROWS, mesh), W.shape, strided, mesh)}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    with pytest.raises(UnsupportedError, match=r"into that many pieces\.$"):
        read(tmp_path).require_whole()


def test_a_local_tensor_of_another_shape_than_its_layout_gives_is_refused(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"w": dtensor(W[:5], W.shape, ROWS, mesh_of((2,), rank))}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    with pytest.raises(UnsupportedError, match=r"local tensor is \[5, 4\], but .* gives \[6, 4\]"):
        read(tmp_path).require_whole()


def test_ties_hold_in_every_ranks_file() -> None:
    index = read(REAL / "fsdp2_tied_torchsave_4r/ckpt")
    assert index.ties == (("emb.weight", "lm.weight"),)


def test_a_tie_that_one_rank_does_not_have_is_none(tmp_path: Path) -> None:
    for rank in range(2):
        mesh = mesh_of((2,), rank)
        local = shard(W, ROWS, mesh)
        other = local.clone() if rank else local
        state = {name: dtensor(t, W.shape, ROWS, mesh) for name, t in (("a", local), ("b", other))}
        torch.save(state, tmp_path / f"rank{rank}.pt")
    assert read(tmp_path).ties == ()


# ------------------------------------------------------------------------ plain tensors and objects


def test_plain_tensors_are_taken_once(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, {"w": (W, ROWS)}, (3,), plain={"buffer": BUFFER})
    entry = read(tmp_path).tensor("buffer")
    (chunk,) = entry.chunks
    assert (entry.shape, chunk.box, chunk.data.path) == ((5,), Box((0,), (5,)), str(paths[0]))
    assert len(chunk.replicas) == 2


def differing(folder: Path, *values: object, key: str = "buffer") -> CheckpointIndex:
    for rank, value in enumerate(values):
        mesh = mesh_of((len(values),), rank)
        state = {"w": dtensor(shard(W, ROWS, mesh), W.shape, ROWS, mesh), key: value}
        torch.save(state, folder / f"rank{rank}.pt")
    return read(folder)


@pytest.mark.parametrize("other", [BUFFER + 1, BUFFER[:4], torch.cat([BUFFER, BUFFER])])
def test_plain_tensors_that_differ_are_refused_by_name(tmp_path: Path, other: torch.Tensor) -> None:
    index = differing(tmp_path, BUFFER, BUFFER, other)
    with pytest.raises(UnsupportedError, match=r"buffer: plain tensors .* rank 2 is the first"):
        index.require_whole()


def test_what_does_not_differ_can_still_be_taken(tmp_path: Path) -> None:
    index = differing(tmp_path, BUFFER, BUFFER + 1).select({"w"})
    index.require_whole()
    assert values(index, "w") == W.numpy().tobytes()


def test_equal_values_in_unequal_storages_do_not_differ(tmp_path: Path) -> None:
    padded = torch.cat([BUFFER, BUFFER])[:5]
    strided = torch.stack([BUFFER, BUFFER + 9], dim=1)[:, 0]
    assert differing(tmp_path, BUFFER, padded, strided).problems == ()


def test_random_states_are_kept_once_per_rank(tmp_path: Path) -> None:
    index = differing(tmp_path, {"cpu": BUFFER}, {"cpu": BUFFER + 1}, key="rng")
    index.require_whole()
    assert values(index, "rng.cpu.rank_1") == (BUFFER + 1).numpy().tobytes()
    assert [note for note in index.notes if "rng.cpu" in note]


def test_equal_objects_are_taken_once(tmp_path: Path) -> None:
    index = differing(tmp_path, {"lr": 0.1}, {"lr": 0.1}, key="opts")
    assert [(entry.fqn, entry.value) for entry in index.objects] == [("opts.lr", 0.1)]


def test_unequal_objects_are_kept_once_per_rank(tmp_path: Path) -> None:
    index = differing(tmp_path, 7, 8, key="seed")
    assert [(e.fqn, e.value) for e in index.objects] == [("seed.rank_0", 7), ("seed.rank_1", 8)]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("step", (1, 1, 2)),
        ("step", (torch.tensor(1), torch.tensor(1), torch.tensor(2))),
        ("train_state", ({"global_step": 5}, {"global_step": 5}, {"global_step": 6})),
        ("lr_scheduler", ({"last_epoch": 5}, {"last_epoch": 5}, {"last_epoch": 6})),
        ("optim", tuple({"state": {"w": {"step": n}}} for n in (7, 7, 8))),
        ("optim", tuple({"state": {"w": {"step": torch.tensor(n)}}} for n in (7, 7, 8))),
    ],
)
def test_files_of_several_saves_are_refused(
    tmp_path: Path, key: str, values: tuple[object, ...]
) -> None:
    index = differing(tmp_path, *values, key=key)
    with pytest.raises(UnsupportedError, match=r"of several saves: .*(step|last_epoch) is .*rank"):
        index.select({"w"}).require_whole()


def test_a_step_that_differs_is_shown_with_both_values(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"step is 100 on rank 0 and 200 on rank 1\."):
        differing(tmp_path, 100, 200, key="step").require_whole()


@pytest.mark.parametrize("key", ["dataloader", "sampler"])
def test_each_rank_has_its_own_steps_of_its_dataloader(tmp_path: Path, key: str) -> None:
    index = differing(tmp_path, {"step": 7, "epoch": 1}, {"step": 8, "epoch": 2}, key=key)
    index.require_whole()
    assert index.objects[-1].fqn == f"{key}.step.rank_1"


def test_an_optimizer_of_which_some_steps_differ_is_refused_alone(tmp_path: Path) -> None:
    """An expert that had no gradients on one rank was not stepped there."""
    steps = [{"state": {"w": {"step": 7}, "expert": {"step": n}}} for n in (7, 6)]
    index = differing(tmp_path, *steps, key="optim")
    index.select({"w"}).require_whole()
    with pytest.raises(UnsupportedError, match=r"optim\.state\.expert\.step: values that differ"):
        index.require_whole()


def test_an_optimizer_of_which_options_differ_is_refused_by_name(tmp_path: Path) -> None:
    groups = [{"param_groups": [{"params": ["w"], "lr": lr}]} for lr in (0.1, 0.2)]
    index = differing(tmp_path, *groups, key="optim")
    index.select({"w"}).require_whole()
    match = r"optim\.param_groups\.0\.lr: values that differ between ranks.* rank 1 is the first"
    with pytest.raises(UnsupportedError, match=match):
        index.require_whole()


def test_a_tensor_that_is_plain_on_one_rank_only_is_refused(tmp_path: Path) -> None:
    mesh = mesh_of((2,), 0)
    torch.save({"w": dtensor(shard(W, ROWS, mesh), W.shape, ROWS, mesh)}, tmp_path / "rank0.pt")
    torch.save({"w": W}, tmp_path / "rank1.pt")
    with pytest.raises(UnsupportedError, match="a DTensor on rank 0 and a plain tensor on rank 1"):
        read(tmp_path).require_whole()


def test_plain_files_of_one_rank_are_a_whole_checkpoint(tmp_path: Path) -> None:
    torch.save({"w": W}, tmp_path / "model_world_size_1_rank_0.pt")
    assert values(read(tmp_path), "w") == W.numpy().tobytes()


# ---------------------------------------------------------------------- who is there, and who


@pytest.mark.parametrize(
    "name",
    [
        "model_world_size_{world}_rank_{rank}.pt",
        "rank_{rank}.pt",
        "rank{rank}.pth",
        "my.model-rank-{rank}.bin",
        "rank_{rank}_of_{world}.pt",
        "rank{rank:02}_model.pt",
    ],
)
def test_ranks_are_found_by_any_usual_name_and_sorted_as_numbers(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(24)
    save_ranks(tmp_path, {"w": (tensor, ROWS)}, (12,), name=name)
    index = read(tmp_path)
    index.require_whole()
    assert [chunk.rank for chunk in index.tensors[0].chunks] == list(range(12))
    assert values(index, "w") == tensor.numpy().tobytes()


def test_missing_ranks_are_listed_with_what_they_held(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, {"w": (W, ROWS)}, (4,))
    paths[1].unlink()
    paths[3].unlink()
    index = read(tmp_path)
    assert index.missing == (str(paths[1]), str(paths[3]))
    with pytest.raises(IncompleteError, match=r"ranks 1, 3\. Rank 1 held w \[3:6, 0:4\]"):
        index.require_whole()


def test_a_missing_file_held_only_what_is_in_the_files_of_its_family(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, ROWS)}, (2,))
    name = "optim_world_size_{world}_rank_{rank}.pt"
    lost = save_ranks(tmp_path, {"m": (W, ROWS)}, (2,), name=name)[1]
    lost.unlink()
    with pytest.raises(IncompleteError, match=r"is missing: rank 1\. Rank 1 held optim\.m \[6:11"):
        read(tmp_path).require_whole()


@pytest.mark.parametrize("lost", ["missing", "empty"])
def test_what_is_complete_without_a_rank_can_be_chosen(tmp_path: Path, lost: str) -> None:
    paths = save_ranks(tmp_path, {"w": (W, ROWS), "norm": (W, [Replicate()])}, (2,))
    Path(paths[1]).write_bytes(b"")
    if lost == "missing":
        Path(paths[1]).unlink()
    index = read(tmp_path)
    index.select({"norm"}).require_whole()
    with pytest.raises((IncompleteError, UnreadableError), match=lost):
        index.require_whole()


def test_the_mesh_tells_of_missing_ranks_where_names_do_not(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, {"w": (W, ROWS)}, (4,), name="rank{rank}.pt")
    paths[3].unlink()
    match = r"1 of 4 files rank\*\.pt is missing: rank 3\."
    with pytest.raises(IncompleteError, match=match) as caught:
        read(tmp_path).require_whole()
    assert caught.value.hint == f"Bring them from the nodes that wrote them, e.g. {paths[3]}."


def test_a_missing_replica_is_missing_too(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, HYBRID)}, (2, 2))[2].unlink()
    with pytest.raises(IncompleteError, match="rank 2"):
        read(tmp_path).require_whole()


def test_a_damaged_file_is_named_and_hides_no_other(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, {"w": (W, ROWS)}, (2,), plain={"buffer": BUFFER})
    paths[1].write_bytes(paths[1].read_bytes()[:1000])
    index = read(tmp_path)
    assert index.tensor("buffer") is not None
    with pytest.raises(UnreadableError, match=r"rank_1\.pt is truncated"):
        index.require_whole()


def test_the_first_error_is_raised_when_no_file_can_be_read(tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank{rank}.pt").write_bytes(b"<html>")
    with pytest.raises(UnreadableError, match=r"rank0\.pt"):
        read(tmp_path)


def test_a_renamed_file_is_refused(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, {"w": (W, ROWS)}, (3,))
    shutil.copy(paths[1], paths[2])
    with pytest.raises(UnsupportedError, match=r"of rank 2 by its name, but rank 1 saved it"):
        read(tmp_path).require_whole()


def test_ranks_that_disagree_on_a_shape_are_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, ROWS)}, (2,))
    mesh = mesh_of((2,), 1)
    state = {"w": dtensor(shard(W[:10], ROWS, mesh), (10, 4), ROWS, mesh)}
    torch.save(state, tmp_path / "model_world_size_2_rank_1.pt")
    with pytest.raises(UnsupportedError, match=r"is \[11, 4\] on rank 0 and \[10, 4\]"):
        read(tmp_path).require_whole()


def test_two_world_sizes_in_one_folder_are_refused(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, ROWS)}, (2,))
    save_ranks(tmp_path, {"w": (W, ROWS)}, (3,))
    with pytest.raises(UnsupportedError, match="2 world sizes, 2 and 3") as error:
        read(tmp_path)
    assert "model_world_size_3_rank_*.pt" in (error.value.hint or "")


def test_files_of_an_older_larger_save_are_noticed(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, ROWS)}, (4,), name="rank{rank}.pt")
    save_ranks(tmp_path, {"w": (W, ROWS)}, (2,), name="rank{rank}.pt")
    with pytest.raises(UnsupportedError, match="2 mesh sizes"):
        read(tmp_path).require_whole()


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, {"w": (W, ROWS)}, (2,), name="rank_{rank}.pt")
    shutil.copy(paths[1], tmp_path / "rank_01.pt")
    with pytest.raises(UnsupportedError, match="both say that they are of rank 1"):
        read(tmp_path)


def test_families_that_are_not_one_checkpoint_are_listed() -> None:
    with pytest.raises(UsageError, match=r"model_rank\*\.pt  \(4 files\)") as error:
        read(REAL / "torch-2.9.1-d_fsdp2/ranks")
    assert "ranks/rank*.pt'" in (error.value.hint or "")


def test_a_list_of_files_chooses_a_family() -> None:
    folder = REAL / "torch-2.9.1-d_fsdp2/ranks"
    index = rank_files.read_index(glob(folder, "model_rank*.pt"))
    index.require_whole()
    assert (len(index.tensors), index.root) == (15, str(folder))


def test_files_without_a_rank_in_their_names_are_no_rank_files(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt")]
    with pytest.raises(UsageError, match="none of these files has a rank in its name"):
        rank_files.read_index(paths)


def test_a_family_alone_keeps_the_names_of_its_files() -> None:
    folder = REAL / "verl_fsdp2_4r/ckpt/global_step_1/actor"
    index = rank_files.read_index(glob(folder, "model_world_size_4_rank_*.pt"))
    assert index.tensor("lm_head.weight") is not None


def test_families_together_are_containers_and_sections() -> None:
    index = read(REAL / "verl_fsdp2_4r/ckpt/global_step_1/actor")
    sections = {entry.path[0]: entry.section for entry in (*index.tensors, *index.objects)}
    assert sections == {"model": "model", "optim": "optim", "extra_state": "other"}


def test_flat_optimizer_shards_do_not_hide_the_model() -> None:
    index = read(REAL / "verl_fsdp1_4r/ckpt/global_step_1/actor")
    index.select({e.fqn for e in index.tensors if e.section == "model"}).require_whole()
    with pytest.raises(UnsupportedError, match=r"optim\.state\.0\.exp_avg, .* differ") as error:
        index.require_whole()
    assert "only a job with as many ranks" in str(error.value.hint)
    assert "--only model takes the model alone" in str(error.value.hint)


def test_a_missing_optimizer_file_does_not_hide_the_model(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, ROWS)}, (2,))
    optim = save_ranks(
        tmp_path, {"m": (W, ROWS)}, (2,), name="optim_world_size_{world}_rank_{rank}.pt"
    )
    optim[1].unlink()
    index = read(tmp_path)
    index.select({"model.w"}).require_whole()
    with pytest.raises(IncompleteError, match=r"files optim_world_size_2_rank_\*\.pt is missing"):
        index.select({"optim.m"}).require_whole()


def test_other_state_with_unknown_globals_is_kept_closed(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, ROWS)}, (2,))
    for rank in range(2):
        path = tmp_path / f"extra_state_world_size_2_rank_{rank}.pt"
        torch.save({"net": torch.nn.Identity}, path)
    index = read(tmp_path)
    index.require_whole()
    entry = index.object("extra_state.rank_1")
    assert (entry.opened, entry.data.length) == (False, path.stat().st_size)
    assert [note for note in index.notes if "torch.nn.modules.linear.Identity" in note]


def test_other_files_beside_the_rank_files_are_left_alone(tmp_path: Path) -> None:
    save_ranks(tmp_path, {"w": (W, ROWS)}, (2,))
    (tmp_path / "fsdp_config.json").write_text("{}")
    (tmp_path / "huggingface").mkdir()
    read(tmp_path).require_whole()


@pytest.mark.parametrize(
    "names",
    [("rank0.pt",), ("ep0-ba1-rank0.pt", "latest-rank0.pt"), ("mp_rank_00_model_states.pt",), ()],
)
def test_what_is_no_folder_of_rank_files(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert not rank_files.matches(str(tmp_path))


@pytest.mark.parametrize(
    "folder",
    [
        "fsdp1_sharded_nomesh_torchsave/ckpt",
        "torch-2.11-cuda-fsdp1st-2/ranks",
        "fsdp1_local_torchsave/ckpt",
        "torch-2.1.2-b3_fsdp1_local/ranks",
    ],
)
def test_sharded_tensors_and_local_state_dicts_are_refused(folder: str) -> None:
    with pytest.raises(UnsupportedError, match="ShardedTensor"):
        read(REAL / folder)


@pytest.mark.slow
def test_1100_files_are_read_with_few_of_them_open(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    tensor = torch.arange(2200)
    save_ranks(tmp_path, {"w": (tensor, ROWS)}, (1100,), plain={"buffer": BUFFER})
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    try:
        index = read(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    index.require_whole()
    assert values(index, "w") == tensor.numpy().tobytes()
