"""Finding the checkpoint that a path means, and the framework that made it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from reader_contract import DATA
from running import run
from safetensors.torch import load_file

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.errors import (
    CheckpointError,
    IncompleteError,
    UnreadableError,
    UnsupportedError,
)

REAL = DATA / "checkpoints"
HF = REAL / "torchtitan_llama3_4r" / "ckpt" / "checkpoint_hf" / "step-2"
DCP = REAL / "fsdp2_dcp_1d_4r" / "ckpt"


@pytest.mark.parametrize(
    ("path", "framework"),
    [
        ("accelerate_fsdp2_sharded_llama_tied_4r/ckpt/state/pytorch_model_fsdp_0", "accelerate"),
        ("accelerate_fsdp2_sharded_llama_tied_4r/ckpt/state/optimizer_0", "accelerate"),
        ("accelerate_fsdp1_full_llama_tied_4r/ckpt/state/pytorch_model_fsdp.bin", "accelerate"),
        ("accelerate_fsdp1_full_llama_tied_4r/ckpt/state/optimizer.bin", "accelerate"),
        ("transformers_trainer_fsdp2_4r/ckpt/checkpoint-2/pytorch_model_fsdp_0", "transformers"),
        ("torchtitan_llama3_4r/ckpt/checkpoint_full", "torchtitan"),
        ("composer-0.32.1-monolith/ep0-ba1-rank0.pt", "composer"),
        ("composer-0.32.1-monolith/latest-rank0.pt", "composer"),
        ("composer-0.32.1-fsdp_sharded/latest-rank0.pt", "composer"),
        ("verl_fsdp2_4r/ckpt", "verl"),
        ("lightning_fsdp_sharded_4r/ckpt", "lightning"),
        ("fsdp2_dcp_1d_4r/ckpt", None),
    ],
)
def test_the_framework_is_named_when_something_tells_it(path: str, framework: str | None) -> None:
    index = formats.read_index(str(REAL / path))
    assert index.framework == framework
    told = [note for note in index.notes if note.startswith("Framework: ")]
    assert len(told) == (framework is not None)


def test_the_second_model_of_an_accelerate_folder_is_of_accelerate(tmp_path: Path) -> None:
    state = REAL / "accelerate_fsdp1_full_llama_tied_4r" / "ckpt" / "state"
    shutil.copy(state / "pytorch_model_fsdp.bin", tmp_path / "pytorch_model_fsdp_1.bin")
    index = formats.read_index(str(tmp_path / "pytorch_model_fsdp_1.bin"))
    assert index.framework == "accelerate"


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("torchtitan_llama3_4r/ckpt/checkpoint_full", "checkpoint_full/step-2"),
        ("verl_fsdp2_4r/ckpt", "ckpt/global_step_1/actor"),
        ("lightning_fsdp_sharded_4r/ckpt", "ckpt/state.ckpt"),
    ],
)
def test_the_one_checkpoint_inside_a_parent_is_read_and_told(path: str, inside: str) -> None:
    index = formats.read_index(str(REAL / path))
    assert index.root.endswith(inside)
    assert f"Reading {index.root}." in index.notes


@pytest.mark.parametrize(
    "beside",
    [
        *("trainer_state.pt", "train_dataloader.pt", "orchestrator/progress.pt"),
        *("recipe_state/recipe_state.pt", "step_scheduler.pt", "dataloader.pt"),
        *("rng/rng_dp_rank_1.pt", "dataloader/dataloader_dp_rank_1.pt"),
    ],
)
def test_state_of_a_trainer_is_no_checkpoint_beside_the_one_inside(
    beside: str, tmp_path: Path
) -> None:
    shutil.copytree(REAL / "fsdp2_dcp_1d_4r" / "ckpt", tmp_path / "policy")
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    torch.save({"step": 3}, tmp_path / beside)
    assert formats.read_index(str(tmp_path)).root == str(tmp_path / "policy")


def test_several_checkpoints_inside_a_parent_are_listed_with_their_commands() -> None:
    parent = REAL / "torchtitan_llama3_4r" / "ckpt"
    with pytest.raises(UnreadableError, match="3 are inside") as caught:
        formats.read_index(str(parent))
    assert str(caught.value.hint).splitlines() == [
        f"ckpt-tools inspect {parent}/checkpoint_modelonly/step-2",
        f"ckpt-tools inspect {parent}/checkpoint_hf/step-2",
        f"ckpt-tools inspect {parent}/checkpoint_full/step-2",
    ]


def test_a_link_and_its_target_are_one_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "step-2")
    (tmp_path / "latest").symlink_to("step-2")
    assert formats.read_index(str(tmp_path)).root == str(tmp_path / "step-2")
    assert formats.read_index(str(tmp_path / "latest")).problems == ()


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_of_a_directory_means_the_directory(name: str) -> None:
    assert formats.read_index(str(DCP / name)).root == str(DCP)


def test_a_glob_chooses_rank_files() -> None:
    folder = REAL / "torch-2.11-cuda-fsdp2-2" / "ranks"
    chosen = formats.read_index(str(folder / "model_world_size_2_rank_*.pt"))
    assert {entry.section for entry in chosen.tensors} == {"model"}
    both = formats.read_index(str(folder))
    assert {entry.section for entry in both.tensors} == {"model", "optim"}


def test_a_glob_that_fits_nothing_is_told() -> None:
    with pytest.raises(IncompleteError, match="does not exist"):
        formats.read_index(str(DCP / "nothing_*.pt"))


@pytest.mark.parametrize(
    ("names", "tool"),
    [
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed ZeRO"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
        (["_CHECKPOINT_METADATA", "manifest.ocdbt"], "Orbax"),
    ],
)
def test_the_folders_of_other_tools_are_named(names: list[str], tool: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 100)
    with pytest.raises(UnsupportedError, match=tool):
        formats.read_index(str(tmp_path))


@pytest.mark.parametrize("chosen", ["", "consolidated.00.pth", "consolidated.01.pth"])
def test_a_tensor_parallel_part_is_never_taken_for_the_whole(chosen: str, tmp_path: Path) -> None:
    import torch

    for part in range(2):
        torch.save({"w": torch.ones(2)}, tmp_path / f"consolidated.0{part}.pth")
    with pytest.raises(UnsupportedError, match="2 tensor-parallel parts"):
        formats.read_index(str(tmp_path / chosen))
    (tmp_path / "consolidated.01.pth").unlink()
    assert not formats.read_index(str(tmp_path)).problems


def test_a_megatron_directory_is_named_though_it_looks_like_dcp(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    shutil.copy(DCP / ".metadata", tmp_path)
    with pytest.raises(UnsupportedError, match="Megatron"):
        formats.read_index(str(tmp_path))


@pytest.mark.parametrize("chosen", ["", "10"])
def test_a_nanotron_checkpoint_is_named_though_its_files_are_read(
    tmp_path: Path, chosen: str
) -> None:
    folder = tmp_path / "10"
    block = folder / "model" / "lm_head" / "pp_block"
    block.mkdir(parents=True)
    shutil.copy(HF / "model-00001-of-00001.safetensors", block / "model_weight.safetensors")
    (folder / "checkpoint_metadata.json").write_text('{"version": "1.4", "tp": 2, "dp": 1}')
    with pytest.raises(UnsupportedError, match="nanotron"):
        formats.read_index(str(tmp_path / chosen))


def test_a_folder_without_a_checkpoint_says_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(CheckpointError, match="holds no checkpoint") as caught:
        formats.read_index(str(tmp_path))
    assert ".metadata" in str(caught.value.hint)


# ------------------------------------------------------------------------------ what stands beside


@pytest.mark.parametrize("beside", ["step-1000", "runs/step-1000"])
def test_a_checkpoint_beside_what_was_read_is_named(tmp_path: Path, beside: str) -> None:
    shutil.copy(HF / "model-00001-of-00001.safetensors", tmp_path / "model.safetensors")
    broken = tmp_path / beside
    broken.mkdir(parents=True)
    (broken / "__1_0.distcp").write_bytes(b"cut")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04" + bytes(60))
    (tmp_path / "scheduler.bin").write_bytes(b"PK\x03\x04" + bytes(60))
    (note,) = formats.read_index(str(tmp_path)).notes
    assert note == f"Beside it, and not read: pytorch_model.bin, {beside}."
    result = run("verify", tmp_path, "--json")
    assert note in json.loads(result.stdout)["notes"]


def test_what_belongs_to_a_checkpoint_does_not_stand_beside_it() -> None:
    for name in ("hf_sharded_safetensors", "lightning_fsdp_sharded_4r", "dcp_hf_consolidated_4r"):
        index = formats.read_index(str(REAL / name / "ckpt"))
        assert not [note for note in index.notes if "Beside" in note]


@pytest.mark.parametrize(
    ("name", "head", "what"),
    [
        ("m.gguf", b"GGUF\x03", "GGUF"),
        ("m.bin", b"GGUF\x03", "GGUF"),
        ("m.npz", b"PK\x03\x04", "npz"),
        ("m.zip", b"PK\x03\x04" + bytes(22) + b"\x08\0\0\0model.pt", "unzip"),
        ("m.pt.gz", b"\x1f\x8b\x08", "gunzip"),
        ("m.tar", b"model.pt".ljust(257, b"\0") + b"ustar", "tar -xf"),
        ("m.pt", b"\x93NUMPY\x01", "npy"),
        ("flax_model.msgpack", b"\x81", "msgpack"),
        ("model.ckpt.data-00000-of-00001", b"x", "TensorFlow"),
        ("m.h5", b"\x89HDF\r\n\x1a\n", "HDF5"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", b"PK", "DeepSpeed"),
        ("layer_01-model_00-model_states.pt", b"PK", "DeepSpeed"),
        ("__0_0.distcp.txt", b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
        ("m.safetensors", b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
    ],
)
def test_the_files_of_other_tools_are_named(
    name: str, head: bytes, what: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(head + b" " * 100)
    with pytest.raises(CheckpointError) as caught:
        formats.read_index(str(tmp_path / name))
    assert what in f"{caught.value.message} {caught.value.hint}"


@pytest.mark.parametrize(
    ("inside", "what"),
    [
        ("global_step5/zero_pp_rank_0_mp_rank_00_model_states.pt", "DeepSpeed"),
        ("100/_CHECKPOINT_METADATA", "Orbax"),
        ("step/.snapshot_metadata", "torchsnapshot"),
        ("iter_0000005/mp_rank_01/model_optim_rng.pt", "Megatron"),
        ("flax_model.msgpack", "msgpack"),
        ("saved_model.pb", "TensorFlow"),
        ("global_step2_universal/zero/optimizer_state.pt", "DeepSpeed universal"),
    ],
)
def test_the_parents_of_other_tools_are_named(inside: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 100)
    with pytest.raises(UnsupportedError, match=what):
        formats.read_index(str(tmp_path))


@pytest.mark.parametrize("inside", ["", "/zero", "/zero/", "/zero/fc1.weight", "/zero/buf"])
def test_a_universal_folder_is_deepspeeds_at_each_level(inside: str) -> None:
    folder = REAL / "deepspeed-0.19.8-universal_2r" / "ckpt" / "global_step2_universal"
    path = f"{folder}{inside}"
    assert formats.run_of(path) == []
    with pytest.raises(UnsupportedError, match="DeepSpeed universal checkpoint"):
        formats.read_index(path)


@pytest.mark.parametrize(
    "path", [".", "global_step2", "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
def test_both_scripts_that_deepspeed_puts_beside_its_checkpoints_are_named(path: str) -> None:
    with pytest.raises(UnsupportedError, match="DeepSpeed ZeRO checkpoint") as caught:
        formats.read_index(str(REAL / "deepspeed-0.19.8-zero2-bf16_2r" / "ckpt" / path))
    assert "zero_to_fp32.py or zero_to_torch.py" in str(caught.value.hint)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pointer_in_the_place_of_a_file_of_dcp_is_named(name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(DCP, tmp_path / "c")
    (folder / name).chmod(0o600)
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UnreadableError, match="is a Git LFS pointer"):
        formats.read_index(str(folder)).require_whole()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("scripted.pt", "TorchScript"),
        ("traced.pth", "TorchScript"),
        ("exported.pt2", "torch.export"),
    ],
)
def test_programs_are_named_with_the_call_that_makes_a_state_dict(name: str, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what) as caught:
        formats.read_index(str(DATA / "cases" / "D09_program_archive" / name))
    assert "load(path).state_dict" in str(caught.value.hint)


AUTOMODEL = REAL / "nemo-automodel-0.7.0_2r"


def test_a_model_and_an_optimizer_in_two_formats_are_one_checkpoint(tmp_path: Path) -> None:
    index = formats.read_index(str(AUTOMODEL / "epoch_0_step_2"))
    index.require_whole()
    assert index.framework == "automodel"
    truth = {f"model.{n}": one for n, one in load_file(AUTOMODEL / "truth.safetensors").items()}
    truth |= load_file(AUTOMODEL / "truth_optim.safetensors")
    read = {name: one.torch() for name, one in ckpt_tools.Checkpoint(index).items()}
    assert read.keys() == truth.keys()
    assert all(torch.equal(read[name], value) for name, value in truth.items())
    other = shutil.copytree(AUTOMODEL / "epoch_0_step_2", tmp_path / "run" / "step-7")
    (other / "optim").rename(other / "optimizer")
    plain = formats.read_index(str(tmp_path / "run"))
    plain.require_whole()
    assert plain.framework is None
    assert {entry.section for entry in plain.tensors} == {"model", "optim"}


def test_a_model_and_an_optimizer_in_one_format_stay_two(tmp_path: Path) -> None:
    for name in ("model", "optim"):
        shutil.copytree(DCP, tmp_path / "step-7" / name)
    assert len(formats.run_of(str(tmp_path / "step-7"))) == 2


def test_a_model_in_the_cache_of_hugging_face_is_what_main_means(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    for revision in ("0a1b", "2c3d"):
        shutil.copytree(HF, folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("2c3d")
    for given in (folder, tmp_path / "hub"):
        index = formats.read_index(str(given))
        assert index.root == str(folder / "snapshots" / "2c3d")
        assert formats.run_of(str(given)) == []
    (folder / "refs" / "main").write_text("../..")
    assert len(formats.run_of(str(folder))) == 2
