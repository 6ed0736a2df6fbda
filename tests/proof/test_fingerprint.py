"""Fingerprints: the same for the same tensors, whatever holds them, and as documented."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from ckpt_tools import api, formats
from ckpt_tools.errors import IncompleteError, UnreadableError, UnsupportedError
from ckpt_tools.proof.fingerprint import Fingerprint, fingerprint, is_fingerprint, load
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parents[1] / "data"
CHECKPOINTS = DATA / "checkpoints"

# Checkpoints of the same tensors, and the sections that they share.
TWINS = {
    "fsdp2 1-D: DCP, torch's own consolidation": (
        ("model", "optim", "other"),
        ("fsdp2_dcp_1d_4r/ckpt", "fsdp2_dcp_1d_4r/peer_dcp_to_torch.pt"),
    ),
    "DCP of HSDP, of one process, zstd, one file, old file": (
        ("model", "optim"),
        (
            "fsdp2_dcp_hsdp_2x4/ckpt",
            "fsdp2_full_torchsave_4r/ckpt/dcp_norank",
            "dcp_zstd_4r/ckpt",
            "fsdp2_full_torchsave_4r/ckpt/consolidated.pt",
            "fsdp2_full_torchsave_4r/ckpt/consolidated_legacy.pt",
        ),
    ),
    "the same model: HSDP rank files, safetensors of DCP in three ways": (
        ("model",),
        (
            "fsdp2_dcp_hsdp_2x4/ckpt",
            "fsdp2_torchsave_hsdp_2x4/ckpt",
            "dcp_hf_rank0_4r/ckpt",
            "dcp_hf_sharded_4r/ckpt",
            "dcp_serialization_safetensors_4r/ckpt",
            "dcp_serialization_safetensors_tensoronly_4r/ckpt",
            "fsdp2_dcp_rawoptim_4r/ckpt",
        ),
    ),
    "FSDP1: rank files, DCP of DTensors, DCP of ShardedTensors, full files": (
        ("model", "optim"),
        (
            "fsdp1_sharded_mesh1d_torchsave/ckpt",
            "fsdp1_sharded_mesh1d_dcp/ckpt",
            "fsdp1_sharded_nomesh_dcp/ckpt",
            "fsdp1_full_torchsave/ckpt/checkpoint.pt",
        ),
    ),
    "FSDP1 HSDP": (
        ("model", "optim"),
        ("fsdp1_sharded_hsdp2x2_torchsave/ckpt", "fsdp1_sharded_hsdp2x2_dcp/ckpt"),
    ),
    "FSDP2 over TP": (
        ("model",),
        (
            "fsdp2_tp_dcp_2x2/ckpt",
            "fsdp2_tp_torchsave_2x2/ckpt",
            "fsdp2_tp_dcp_2x2/peer_dcp_to_torch.pt",
        ),
    ),
    "EP": (("model",), ("fsdp2_ep_dcp_2x2/ckpt", "fsdp2_ep_torchsave_2x2/ckpt")),
    "wrapped by torch.compile and checkpoint_wrapper, or not": (
        ("model",),
        (
            "fsdp2_wrapped_raw_dcp_2r/ckpt",
            "fsdp2_wrapped_torchsave_2r/ckpt",
            "fsdp2_wrapped_getsd_dcp_2r/ckpt",
        ),
    ),
    "every element type": (
        ("model",),
        ("dtensor_dtypes_dcp_4r/ckpt", "dtensor_dtypes_torchsave_4r/ckpt"),
    ),
    "32 ranks and 8 ranks": (
        ("model", "optim"),
        ("torch-2.11-cpu-fsdp2-4x8/dcp", "torch-2.11-cpu-fsdp2-8/dcp"),
    ),
    "meshes of real GPUs": (
        ("model", "optim", "other"),
        (
            "torch-2.11-cuda-fsdp2-1x2/dcp",
            "torch-2.11-cuda-fsdp2-2/dcp",
            "torch-2.11-cuda-fsdp2-2x1/dcp",
        ),
    ),
    "FSDP1 and FSDP2 of real GPUs": (
        ("model", "optim"),
        (
            "torch-2.11-cuda-fsdp2-2/dcp",
            "torch-2.11-cuda-fsdp1st-2/dcp",
            "torch-2.11-cuda-fsdp1st-2/full.pt",
        ),
    ),
    "torch 2.9.1 in seven ways": (
        ("model",),
        (
            "torch-2.9.1-c_fsdp1_dtensor/dcp",
            "torch-2.9.1-c2_fsdp1_hsdp/dcp",
            "torch-2.9.1-d_fsdp2/dcp",
            "torch-2.9.1-d_fsdp2/full.pt",
            "torch-2.9.1-h_dcp_variants/dcp_zstd",
            "torch-2.9.1-h_dcp_variants/dcp_hf",
            "torch-2.9.1-h_dcp_variants/dcp_safetensors_fmt",
        ),
    ),
    "Lightning": (
        ("model", "optim"),
        (
            "lightning_fsdp_sharded_4r/ckpt/state.ckpt",
            "lightning_fsdp_sharded_4r/peer_lightning_consolidated.ckpt",
        ),
    ),
    "Accelerate and what its own merge made": (
        ("model",),
        (
            "accelerate_fsdp2_sharded_qwen2_untied_4r/ckpt/state/pytorch_model_fsdp_0",
            "accelerate_fsdp2_sharded_qwen2_untied_4r/peer_accelerate_merge",
        ),
    ),
    "PEFT": (
        ("model",),
        ("peft_fsdp2_adapter_torchsave_4r/ckpt", "peft_fsdp2_adapter_4r/ckpt/adapter"),
    ),
}
WITH_SHA256 = sorted(
    path.parent.name
    for path in CHECKPOINTS.glob("fsdp[12]_*/truth.json")
    if (path.parent / "ckpt").is_dir() and "sha256" in path.read_text()
)
REFUSED = {
    "fsdp1_local_torchsave",
    "fsdp1_local_torchsave_noorig",
    "fsdp1_sharded_nomesh_torchsave",
}
# Full files are given by name below; the folder holds several checkpoints.
SEVERAL = {"fsdp1_full_torchsave", "fsdp2_full_torchsave_4r"}


def of(path: str, *, threads: int = 2) -> Fingerprint:
    with Files() as files:
        return fingerprint(formats.read_index(str(CHECKPOINTS / path)), files, threads=threads)


@pytest.mark.parametrize("name", TWINS)
def test_the_same_tensors_have_one_fingerprint(name: str) -> None:
    sections, paths = TWINS[name]
    found = [of(path).sections for path in paths]
    first = {section: found[0][section] for section in sections}
    assert [{section: one[section] for section in sections} for one in found] == [first] * len(
        found
    )


@pytest.mark.parametrize("name", [n for n in WITH_SHA256 if n not in REFUSED | SEVERAL])
def test_digests_are_those_of_the_truth(name: str) -> None:
    truth = json.loads((CHECKPOINTS / name / "truth.json").read_text())["entries"]
    expected = {fqn: facts["sha256"] for fqn, facts in truth.items() if facts["kind"] == "tensor"}
    assert {tensor.fqn: tensor.sha256 for tensor in of(f"{name}/ckpt").tensors} == expected


def test_a_section_can_be_recomputed_as_documented() -> None:
    path = "fsdp2_dcp_hsdp_2x4"
    truth = json.loads((CHECKPOINTS / path / "truth.json").read_text())["entries"]
    lines = [
        f"{fqn.removeprefix('model.')}\0{facts['dtype']}\0"
        f"{','.join(map(str, facts['shape']))}\0{facts['sha256']}\n"
        for fqn, facts in truth.items()
        if fqn.startswith("model.") and facts["kind"] == "tensor"
    ]
    told = sha256("".join(sorted(lines)).encode()).hexdigest()
    assert of(f"{path}/ckpt").sections["model"] == told


def test_the_number_of_threads_changes_nothing() -> None:
    path = "torch-2.11-cpu-fsdp2-8/dcp"
    assert of(path, threads=1) == of(path, threads=7)


def test_another_name_type_shape_or_value_is_another_digest() -> None:
    digests = {
        of("fsdp2_dcp_1d_4r/ckpt").digest,
        of("fsdp2_dcp_1d_8r/ckpt").digest,
        of("fsdp2_bf16_fp32optim_dcp_4r/ckpt").digest,
        of("fsdp2_shard1_dcp_4r/ckpt").digest,
    }
    assert len(digests) == 4


def test_a_checkpoint_without_a_model_has_no_digest() -> None:
    assert of("fsdp1_full_torchsave/ckpt/optim.pt").digest is None


def test_a_hole_has_no_fingerprint() -> None:
    index = formats.read_index(str(DATA / "cases" / "C33_missing_ranks" / "hole"))
    with Files() as files, pytest.raises(IncompleteError, match="rank 3"):
        fingerprint(index, files)


def test_two_names_that_become_one_are_refused() -> None:
    index = formats.read_index(str(CHECKPOINTS / "hf_sharded_safetensors" / "ckpt"))
    first, second, *_ = index.tensors
    twin = replace(second, path=(f"_orig_mod.{first.fqn}",))
    index = replace(index, tensors=(first, twin))
    with Files() as files, pytest.raises(UnsupportedError, match="are both"):
        fingerprint(index, files)


# -------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "path",
    [
        "fsdp2_dcp_1d_4r/ckpt",
        "fsdp2_wrapped_raw_dcp_2r/ckpt",
        "composer-0.32.1-fsdp_sharded/ep0-ba1",
        "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
        "hf_sharded_safetensors/ckpt",
        "lightning_fsdp_sharded_4r/ckpt/state.ckpt",
        "verl_fsdp2_4r/ckpt/global_step_1/actor",
    ],
)
def test_a_fingerprint_is_read_back_as_it_was(path: str, tmp_path: Path) -> None:
    found = of(path)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(found.to_dict()))
    assert load(str(kept)) == found


def test_the_json_has_exactly_the_documented_keys() -> None:
    told = of("hf_sharded_safetensors/ckpt").to_dict()
    assert list(told) == ["schema", "digest", "sections", "tensors"]
    assert told["schema"] == "ckpt-tools/fingerprint/1"
    assert told["digest"] == told["sections"]["model"]
    keys = {tuple(facts) for facts in told["tensors"].values()}
    assert keys == {("sha256", "dtype", "shape", "section")}


def test_an_edited_fingerprint_is_refused(tmp_path: Path) -> None:
    told = of("hf_sharded_safetensors/ckpt").to_dict()
    fqn = next(iter(told["tensors"]))
    told["tensors"][fqn]["sha256"] = "0" * 64
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(told))
    with pytest.raises(UnreadableError, match="does not fit"):
        load(str(kept))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "other/1"}', '{"a": ' * 9999])
def test_what_is_no_fingerprint_is_refused(text: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(text)
    with pytest.raises(UnreadableError):
        load(str(kept))


@pytest.mark.parametrize(
    "damage",
    [
        {"sections": None},
        {"sections": {"model": "short"}},
        {"tensors": []},
        {"tensors": {"w": None}},
        {"tensors": {"w": {"sha256": "0" * 64, "dtype": "x", "shape": [1.5], "section": "model"}}},
        {"tensors": {"w": {"sha256": "0" * 64, "dtype": "x", "shape": [1], "section": "none"}}},
    ],
)
def test_a_fingerprint_with_odd_fields_is_refused(damage: dict, tmp_path: Path) -> None:
    told = {**of("hf_sharded_safetensors/ckpt").to_dict(), **damage}
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(told))
    with pytest.raises(UnreadableError):
        load(str(kept))


def test_a_fingerprint_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(of("hf_sharded_safetensors/ckpt").to_dict()))
    assert is_fingerprint(str(kept))
    for path in ("hf_sharded_safetensors/ckpt", "fsdp1_full_torchsave/ckpt/model.pt"):
        assert not is_fingerprint(str(CHECKPOINTS / path))


def test_an_object_and_a_tensor_of_one_name_without_wrappers_are_no_twins(tmp_path: Path) -> None:
    weights = torch.arange(4.0)
    torch.save({"model": {"_orig_mod.w": weights, "w": "a note"}}, tmp_path / "a.pt")
    torch.save({"model": {"w": weights}}, tmp_path / "b.pt")
    found, other = (api.fingerprint(str(tmp_path / name)) for name in ("a.pt", "b.pt"))
    assert found.digest == other.digest
