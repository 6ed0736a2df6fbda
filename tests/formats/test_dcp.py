import os
import pickle
import shutil
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reader_contract import DATA, ReaderContract, RealCheckpoint, truth_of, whole
from running import ran, run
from safetensors.torch import save_file

from ckpt_tools import formats, inspect, reshard, verify
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, Chunk, TensorEntry
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    UnreadableError,
    UnsafePickleError,
    UnsupportedError,
)
from ckpt_tools.formats.dcp import read as dcp
from ckpt_tools.formats.torch_file.locate import located
from ckpt_tools.storage.reader import Files

REAL = DATA / "checkpoints"
FSDP2 = REAL / "fsdp2_dcp_1d_4r" / "ckpt"
MEGATRON = REAL / "megatron-core-0.19.2-torch_dist_2r" / "ckpt" / "iter_0000003"
REFUSED = ("torch-2.1.2-b3_fsdp1_local", "torch-2.9.1-b3_fsdp1_local")


def _real() -> list[RealCheckpoint]:
    """Every DCP directory among the real checkpoints, but for those that are to be refused."""
    folders = sorted(found.parent for found in REAL.rglob(".metadata"))
    return [_case(folder) for folder in folders if folder.relative_to(REAL).parts[0] not in REFUSED]


def _case(folder: Path) -> RealCheckpoint:
    top = REAL / folder.relative_to(REAL).parts[0]
    return RealCheckpoint(
        str(folder.relative_to(DATA)),
        str(top.relative_to(DATA)),
        rename=lambda fqn: _name_in_truth(folder, fqn),
        absent=lambda name: _is_elsewhere(folder, name),
    )


def _name_in_truth(folder: Path, fqn: str) -> str | None:
    """What the truth beside a directory calls an entry; None for what it leaves out."""
    top = folder.relative_to(REAL).parts[0]
    if fqn.startswith(("rng", "cfg.")) and not top.startswith("fsdp2_dcp_1d"):
        return None
    if "g_dcp_plain" in top and fqn.startswith("optim."):
        return None  # by integer id, where the truth has names
    if top.startswith("nemo-automodel"):
        return None  # whose truth is in a file of its own: see test_frameworks
    if folder.parent.name == "checkpoint_modelonly":
        return None  # cast to bfloat16 on the way: see the test of its own
    if folder.name == "dcp_model_only_flat":
        return f"model.{fqn}"
    if top == "torch-2.11-cuda-fsdp1st-2":
        return fqn.removeprefix("model.") if fqn.startswith("model.") else None
    return fqn.replace("optim.state.", "optim.") if top.startswith("torch-2.11-") else fqn


def _is_elsewhere(folder: Path, name: str) -> bool:
    """Whether the truth, which is of the whole save, has this name from another folder of it."""
    if folder.name in ("pytorch_model_fsdp_0", "dcp_model_only_flat"):
        return not name.startswith("model.")
    if folder.name == "optimizer_0":
        return not name.startswith("optimizer.")
    if folder.parent.name in ("checkpoint_modelonly", "epoch_0_step_2"):
        return True
    if "g_dcp_plain" in str(folder):
        return name.startswith("optim.")
    # Of the torch 2.1 jobs with use_orig_params only the weights could be saved.
    return "torch-2.1.2-b2" in str(folder) and name.startswith("optim.")


class TestRealDirectories(ReaderContract):
    checkpoints = tuple(_real())

    def read(self, path: Path) -> CheckpointIndex:
        return dcp.read_index(str(path))

    def located(self, index: CheckpointIndex, files: Files) -> CheckpointIndex:
        return formats.locate(index, files)


def test_there_are_as_many_real_directories_as_the_data_holds() -> None:
    assert len(TestRealDirectories.checkpoints) >= 60


def test_torchtitans_model_only_save_is_the_truth_in_bfloat16() -> None:
    import torch

    folder = REAL / "torchtitan_llama3_4r"
    truth = truth_of(folder)
    with Files() as files:
        read = dcp.read_index(str(folder / "ckpt" / "checkpoint_modelonly" / "step-2"))
        for entry in formats.locate(read, files).tensors:
            full = torch.frombuffer(bytearray(truth[entry.fqn].data), dtype=torch.float32)
            assert entry.dtype.name == "bfloat16"
            cast = full.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
            assert whole(entry, files) == cast


@pytest.fixture
def save(tmp_path: Path) -> Path:
    """A copy of a real FSDP2 save of four ranks, to be damaged."""
    return shutil.copytree(FSDP2, tmp_path / "save")


def _only_problem(folder: Path) -> CheckpointError:
    index = dcp.read_index(str(folder))
    with Files() as files:
        (problem,) = formats.locate(index, files).problems
    return problem


@pytest.mark.parametrize("folder", REFUSED)
def test_flat_parameters_are_refused(folder: str) -> None:
    with pytest.raises(UnsupportedError, match=r"flat parameters \(_flat_param\)") as caught:
        dcp.read_index(str(REAL / folder / "dcp_local"))
    assert "FULL_STATE_DICT" in str(caught.value.hint)


def test_a_directory_without_metadata_is_refused(save: Path) -> None:
    (save / ".metadata").unlink()
    with pytest.raises(
        IncompleteError, match=r"no \.metadata, only data files of ranks 0, 1, 2, 3"
    ):
        dcp.read_index(str(save))


@pytest.mark.parametrize("name", ["metadata", "_metadata", ".metadata (1)"])
def test_a_metadata_that_a_download_renamed_is_shown(save: Path, name: str) -> None:
    (save / ".metadata").rename(save / name)
    with pytest.raises(IncompleteError) as caught:
        dcp.read_index(str(save))
    assert caught.value.hint == f"If {name!r} is it, rename it to .metadata."


def test_an_interrupted_save_is_named_as_one(save: Path) -> None:
    (save / ".metadata").rename(save / ".metadata.tmp")
    with pytest.raises(IncompleteError, match="the save was interrupted"):
        dcp.read_index(str(save))


def test_a_later_save_that_was_interrupted_is_noted(save: Path) -> None:
    (save / ".metadata.tmp").write_bytes(b"")
    (note,) = [note for note in dcp.read_index(str(save)).notes if ".metadata.tmp" in note]
    assert "a later save into this folder was interrupted" in note


def test_an_empty_metadata_is_refused(save: Path) -> None:
    (save / ".metadata").write_bytes(b"")
    with pytest.raises(UnreadableError, match="is empty"):
        dcp.read_index(str(save))


def test_a_missing_data_file_is_named_with_what_it_hurts(save: Path) -> None:
    (save / "__2_0.distcp").unlink()
    problem = _only_problem(save)
    assert isinstance(problem, IncompleteError)
    assert "__2_0.distcp" in problem.message
    assert "Ranks 0, 1, 3 are intact" in str(problem.hint)
    assert "Damaged: " in str(problem.hint)


def test_data_files_may_lie_in_folders_of_ranks(save: Path) -> None:
    world_size = dcp.read_index(str(save)).world_size
    path = save / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 (our own data)
    for info in metadata.storage_data.values():
        info.relative_path = f"node{info.relative_path[2]}/{info.relative_path}"
    path.write_bytes(pickle.dumps(metadata))
    for file in save.glob("*.distcp"):
        (save / f"node{file.name[2]}").mkdir()
        file.rename(save / f"node{file.name[2]}" / file.name)
    assert verify(str(save)).whole
    assert dcp.read_index(str(save)).world_size == world_size
    (save / "node2" / "__2_0.distcp").unlink()
    assert "1 of 4 data files is not there: node2/__2_0.distcp" in _only_problem(save).message


def test_a_short_data_file_is_named_with_both_lengths(save: Path) -> None:
    data = save / "__3_0.distcp"
    need = data.stat().st_size
    os.truncate(data, 20_000)
    problem = _only_problem(save)
    assert f"is truncated: 20,000 bytes, the index needs {need:,}" in problem.message


def test_an_empty_data_file_hurts_every_tensor_in_it(save: Path) -> None:
    os.truncate(save / "__1_0.distcp", 0)
    index = dcp.read_index(str(save))
    hurt = {e.fqn for e in index.tensors if any(c.rank == 1 for c in e.chunks)}
    assert hurt <= index.problems[0].about


def _edit(save: Path, change: str) -> None:
    """Change `.metadata` with torch's own classes."""
    import torch.distributed.checkpoint

    path = save / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 (our own data)
    fqn = "app.model.emb.weight"
    chunks = metadata.state_dict_metadata[fqn].chunks
    index = next(i for i in metadata.storage_data if i.fqn == fqn and tuple(i.offset) == (3, 0))
    if change == "hole":
        del chunks[1]
    elif change == "overlap":
        chunks[1].sizes = torch.Size((4, 7))
    elif change == "transform":
        metadata.storage_data[index].transform_descriptors = ["stream.lzma/9"]
    elif change == "dtype":
        metadata.state_dict_metadata[fqn].properties.dtype = torch.int32
    elif change == "swap":
        other = next(i for i in metadata.storage_data if i.fqn == fqn and tuple(i.offset) == (9, 0))
        data = metadata.storage_data
        data[index], data[other] = data[other], data[index]
    elif change == "one place":
        other = next(i for i in metadata.storage_data if i.fqn == fqn and tuple(i.offset) == (6, 0))
        metadata.storage_data[index] = metadata.storage_data[other]
    elif change == "no nesting":
        metadata.__dict__["planner_dati"] = metadata.__dict__.pop("planner_data")
    path.write_bytes(pickle.dumps(metadata))


def test_two_items_at_one_place_are_refused(save: Path) -> None:
    _edit(save, "one place")
    problem = _only_problem(save)
    assert isinstance(problem, UnreadableError)
    assert "several items at the same bytes, of app.model.emb.weight." in problem.message
    assert problem.about == {"app.model.emb.weight"}


def test_a_metadata_whose_nesting_has_lost_its_name_is_refused(save: Path) -> None:
    _edit(save, "no nesting")
    with pytest.raises(UnreadableError, match="has no planner_data, but 'planner_dati'"):
        dcp.read_index(str(save))


def test_a_hole_is_refused_with_its_place(save: Path) -> None:
    _edit(save, "hole")
    problem = _only_problem(save)
    assert isinstance(problem, IncompleteError)
    assert "app.model.emb.weight: chunks cover 56 of 77 elements" in problem.message
    assert "[3:6, 0:7]" in problem.message


def test_an_overlap_is_refused_with_its_place(save: Path) -> None:
    _edit(save, "overlap")
    problem = _only_problem(save)
    assert "app.model.emb.weight: 2 chunks overlap in [6:7, 0:7]" in problem.message


def test_an_unknown_transform_is_refused(save: Path) -> None:
    _edit(save, "transform")
    with pytest.raises(UnsupportedError, match=r"packed with \['stream.lzma/9'\]"):
        dcp.read_index(str(save))


def test_an_item_of_another_type_than_its_chunk_is_refused(save: Path) -> None:
    _edit(save, "dtype")
    assert "is float32, but .metadata says int32" in _only_problem(save).message


def test_an_item_of_another_shape_than_its_chunk_is_refused(save: Path) -> None:
    _edit(save, "swap")
    assert "has shape [2, 7], but .metadata says [3, 7]" in _only_problem(save).message


def test_metadata_that_would_run_code_runs_none(tmp_path: Path) -> None:
    hostile = shutil.copytree(DATA / "cases" / "C38_malicious_pickle" / "dcp", tmp_path / "dcp")
    with pytest.raises(UnsafePickleError, match=r"os\.makedirs"):
        dcp.read_index(str(hostile))
    assert not list(tmp_path.rglob("PWNED*"))


def test_metadata_of_another_library_is_not_called_hostile(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"canother_framework\nStorage\n.")
    with pytest.raises(UnsafePickleError) as caught:
        dcp.read_index(str(tmp_path))
    assert "Another library wrote the directory." in str(caught.value.hint)


def test_megatron_is_read_under_its_own_names_in_their_sections() -> None:
    index = formats.read_index(str(MEGATRON))
    index.require_whole()
    sections = {entry.fqn: entry.section for entry in index.entries}
    assert sections["decoder.layers.self_attention.linear_qkv.weight"] == "model"
    assert sections["optimizer.state.exp_avg.embedding.word_embeddings.weight"] == "optim"
    with Files() as files:
        opened = formats.open_objects(index, files)
    extra = "decoder.layers.self_attention.linear_qkv._extra_state/shard_0_3"
    assert opened.object(extra).value == (None,) or opened.object(extra).value == [None]
    [common] = opened.object("common_state/shard_0_1").value
    assert common["iteration"] == 3
    assert verify(index).whole  # state.exp_avg.w is of w
    found = inspect(index)
    assert (found.optimizer.kind, found.resume.yes) == ("Adam or AdamW", True)


def test_what_megatron_loads_beside_a_directory_goes_along_with_its_names(tmp_path: Path) -> None:
    source = shutil.copytree(MEGATRON, tmp_path / "iter_0000003")
    source.chmod(0o700)
    (source / "common.pt").write_bytes(b"as old versions wrote it")
    reshard(source, tmp_path / "out", 4)
    for name in ("metadata.json", "common.pt"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    ran("reshard", source, "-o", tmp_path / "other", "--only", "model", "--rename", "^d=e")
    assert not (tmp_path / "other" / "metadata.json").exists()


def test_a_range_that_megatron_has_flattened_is_refused_by_its_name(save: Path) -> None:
    metadata = pickle.loads((save / ".metadata").read_bytes())  # noqa: S301 (our own data)
    flattened = next(fqn for fqn in metadata.state_dict_metadata if fqn.endswith("exp_avg"))
    metadata.mcore_data = {flattened: {"nd_reformulated_orig_global_shape": (3, 4)}}
    (save / ".metadata").write_bytes(pickle.dumps(metadata))
    problem = _only_problem(save)
    assert isinstance(problem, UnsupportedError)
    assert f"{flattened} is flattened by Megatron's distributed optimizer" in problem.message
    assert problem.about == {flattened}


def _hostile_object(save: Path) -> None:
    """Give the object `step` a payload that would make a directory when it is unpickled."""
    import torch

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.makedirs, (str(save / "PWNED"),)

    index = dcp.read_index(str(save))
    entry = index.object("step") or index.objects[0]
    torch.save(Payload(), save / "item")
    with (save / entry.data.path).open("ab") as file:
        place = file.tell()
        file.write((save / "item").read_bytes())
    metadata = pickle.loads((save / ".metadata").read_bytes())  # noqa: S301 (our own data)
    info = next(v for k, v in metadata.storage_data.items() if k.fqn == entry.fqn)
    info.offset, info.length = place, (save / "item").stat().st_size
    (save / ".metadata").write_bytes(pickle.dumps(metadata))


def test_an_object_that_would_run_code_runs_none(save: Path) -> None:
    _hostile_object(save)
    index = dcp.read_index(str(save))
    with Files() as files, pytest.raises(UnsafePickleError, match="makedirs"):
        formats.open_objects(index, files)
    assert not (save / "PWNED").exists()


def _save_a_shard(folder: Path, nest: Callable[[object], object], *, flatten: bool) -> None:
    """Save what ``nest`` puts around the shard that rank 0 of 2 has, as rank 0 would."""
    import torch
    import torch.distributed.checkpoint as torch_dcp
    from alone import ALONE
    from dtensor_files import device_mesh, dtensor
    from torch.distributed.tensor import Shard

    mesh = device_mesh((2,), rank=0, names=None)
    shard = dtensor(torch.ones(2, 2), (4, 2), [Shard(0)], mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it saves from a single process
        torch_dcp.save(
            {"model": nest(shard), "whole": torch.ones(3)},
            storage_writer=torch_dcp.FileSystemWriter(folder),
            planner=torch_dcp.DefaultSavePlanner(flatten_state_dict=flatten),
            **ALONE,
        )


def test_a_save_without_flattening_is_refused_as_incomplete(tmp_path: Path) -> None:
    _save_a_shard(tmp_path / "out", lambda shard: {"w": shard}, flatten=False)
    with pytest.raises(IncompleteError, match="flatten_state_dict=False"):
        dcp.read_index(str(tmp_path / "out"))


def test_a_shard_in_a_tuple_is_refused_as_incomplete(tmp_path: Path) -> None:
    _save_a_shard(tmp_path / "out", lambda shard: (shard, {"step": 1}), flatten=True)
    index = dcp.read_index(str(tmp_path / "out"))
    flaw = index.object("model").flaw
    assert isinstance(flaw, IncompleteError)
    assert "one rank's shards" in flaw.message
    assert [entry.fqn for entry in index.tensors] == ["whole"]


def _give_each_rank_its_metadata(save: Path) -> None:
    for rank in range(4):
        part = pickle.loads((save / ".metadata").read_bytes())  # noqa: S301 (our own data)
        name = f"__{rank}_0.distcp"
        part.storage_data = {k: v for k, v in part.storage_data.items() if v.relative_path == name}
        kept = {(key.fqn, tuple(key.offset or ())) for key in part.storage_data}
        for fqn, entry in part.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                entry.chunks = [c for c in entry.chunks if (fqn, tuple(c.offsets)) in kept]
        (save / f"__{rank}.metadata").write_bytes(pickle.dumps(part))
    (save / ".metadata").unlink()


def test_per_rank_metadata_is_joined(save: Path) -> None:
    whole = dcp.read_index(str(save))
    _give_each_rank_its_metadata(save)
    joined = dcp.read_index(str(save))
    assert joined.problems == ()
    assert [e.fqn for e in joined.tensors] == [e.fqn for e in whole.tensors]
    assert {c.box for c in joined.tensors[0].chunks} == {c.box for c in whole.tensors[0].chunks}


def test_ranks_that_disagree_on_a_tensor_are_named_with_what_each_says(save: Path) -> None:
    fqn = dcp.read_index(str(save)).tensors[0].fqn
    _give_each_rank_its_metadata(save)
    part = pickle.loads((save / "__2.metadata").read_bytes())  # noqa: S301 (our own data)
    part.state_dict_metadata[fqn].size = [7]
    (save / "__2.metadata").write_bytes(pickle.dumps(part))
    (problem,) = (p for p in dcp.read_index(str(save)).problems if "on rank 2" in p.message)
    assert problem.message.startswith(f"{fqn}: it is ")
    assert problem.about == {fqn}


def test_a_compressed_directory_without_zstandard_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    index = dcp.read_index(str(REAL / "dcp_zstd_4r" / "ckpt"))
    with Files() as files:
        problem = formats.locate(index, files).problems[0]
    assert "ckpt-tools[zstd]" in str(problem.hint)


def test_an_object_that_can_be_read_no_longer_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = dcp.read_index(str(REAL / "fsdp2_dcp_1d_4r" / "ckpt"))

    def unreadable(_: Files, path: str, *_place: int) -> bytes:
        raise UnreadableError(f"{path} cannot be read: Input/output error.")

    monkeypatch.setattr(Files, "read", unreadable)
    with Files() as files, pytest.raises(UnreadableError, match="Input/output error"):
        formats.open_objects(index, files)


def test_strays_are_told_and_ignored() -> None:
    index = dcp.read_index(str(DATA / "cases" / "C55_rank_without_file" / "dcp"))
    assert index.problems == ()
    assert any("__9_0.distcp" in note for note in index.notes)


def test_files_of_an_older_save_by_more_ranks_are_no_ranks_of_this_one(save: Path) -> None:
    of_rank_0 = (save / "__0_0.distcp").read_bytes()
    for rank in range(4, 8):
        (save / f"__{rank}_0.distcp").write_bytes(of_rank_0)
    assert dcp.read_index(str(save)).world_size == 4


def test_the_box_of_a_chunk_is_what_metadata_says() -> None:
    entry = dcp.read_index(str(FSDP2)).tensor("app.model.emb.weight")
    assert entry is not None
    assert [chunk.box for chunk in entry.chunks][-1] == Box((9, 0), (2, 7))


def test_what_is_said_of_all_tensors_of_a_file_is_said_once(save: Path) -> None:
    index = dcp.read_index(str(save))

    def refuse(_entry: TensorEntry, chunk: Chunk) -> Chunk:
        raise UnreadableError(f"{chunk.data.path} cannot be opened: Permission denied.")

    problems = located(index, refuse).problems
    assert len(problems) == len({problem.message for problem in problems}) <= 4
    assert set().union(*(problem.about for problem in problems)) == {e.fqn for e in index.tensors}


def test_items_that_were_never_written_are_told_without_keeping_what_was_read(
    tmp_path: Path,
) -> None:
    tensors = {f"w{number}": torch.zeros(20_000) for number in range(200)}
    save_file(tensors, tmp_path / "model.safetensors")
    done = run("reshard", tmp_path / "model.safetensors", "-o", tmp_path / "out", "--to-mesh", "1")
    assert done.exit_code == 0, done.output
    data = tmp_path / "out" / "__0_0.distcp"
    length = data.stat().st_size
    data.write_bytes(b"")
    os.truncate(data, length)
    index = formats.read_index(str(tmp_path / "out"))
    tracemalloc.start()
    with Files() as files:
        problems = formats.locate(index, files).problems
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(problems) == len(tensors)
    assert peak < 3_000_000, "of each, 64 KiB are read"


def test_safetensors_without_the_place_of_a_shard_are_refused(tmp_path: Path) -> None:
    real = REAL / "dcp_serialization_safetensors_tensoronly_4r" / "ckpt"
    folder = shutil.copytree(real, tmp_path / "save")
    data = (folder / "__1_0.distcp").read_bytes()
    (folder / "__1_0.distcp").write_bytes(data.replace(b"saved_offsets", b"saved_offset$"))
    with pytest.raises(UnreadableError, match="DCP_SHARDING_INFO should give 1 offsets"):
        dcp.read_index(str(folder))
