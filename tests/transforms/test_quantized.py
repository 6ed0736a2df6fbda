"""The state dicts of quantizing libraries, and what of them a cast must leave."""

from pathlib import Path

import pytest
import torch
from running import run
from safetensors.torch import load_file, save_file

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.transforms.quantized import Quantized, recognise

SHORT = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "u8": "uint8", "i8": "int8"}
SHORT |= {"i32": "int32", "i64": "int64", "f8": "float8_e4m3fn", "e8": "float8_e8m0fnu"}
SHORT |= {"f4": "float4_e2m1fn_x2", "i16": "int16"}


def found_in(text: str, *, prefix: str = "model.layers.0.") -> Quantized:
    """What is recognised in tensors written as ``name:type`` or ``name:type:dims``."""
    tensors = []
    for word in text.split():
        name, _, kind = word.rpartition("=")
        kind, _, dims = kind.partition("/")
        path = tuple(f"{prefix}{name}".split("."))
        shape = (2,) * int(dims or 2)
        dtype = BY_NAME[SHORT[kind]]
        tensors.append(TensorEntry(".".join(path), path, "model", dtype, shape, ()))
    return recognise(CheckpointIndex("run", "dcp", tuple(tensors)))


NF4 = (
    "l.weight={} l.weight.absmax=u8/1 l.weight.quant_map=f32/1 l.weight.nested_absmax=f32/1 "
    "l.weight.nested_quant_map=f32/1 l.weight.quant_state.bitsandbytes__nf4=u8/1"
)
FAMILIES = {
    "bitsandbytes 4-bit": [NF4.format("u8"), NF4.format("bf16"), NF4.format("f32")],
    "bitsandbytes 8-bit": ["l.weight=i8 l.SCB=f32/1 l.weight_format=u8/0"],
    "8-bit optimizer state": [
        "w.state1=u8 w.state2=u8 w.qmap1=f32/1 w.qmap2=f32/1 w.absmax1=f32/1 w.absmax2=f32/1"
    ],
    "torchao": [
        "l._weight_qdata=i8 l._weight_scale=f32 l._weight_zero_point=f32",
        "l.weight:_weight_qdata=f8 l.weight:_weight_scale=f32",
        "l.weight_qdata=u8 l.weight_scale=bf16",
    ],
    "torchao 8-bit optimizer state": ["w.exp_avg.codes=u8 w.exp_avg.scale=f32 w.exp_avg.qmap=f32"],
    "compressed-tensors": [
        "l.weight_packed=i32 l.weight_scale=bf16 l.weight_shape=i64/1 l.weight_g_idx=i32/1",
        "l.weight_packed=u8 l.weight_scale=f8 l.weight_global_scale=f32 l.input_global_scale=f32",
    ],
    "GPTQ": ["l.qweight=i32 l.qzeros=i32 l.scales=f16 l.g_idx=i32/1"],
    "AWQ": ["l.qweight=i32 l.qzeros=i32 l.scales=f16"],
    "FP8": [
        "l.weight=f8 l.weight_scale=f32/0 l.input_scale=f32/0",
        "l.weight=f8 l.weight_scale_inv=f32",
        "self_attn.q_proj.weight=f8 self_attn.k_scale=f32/0 self_attn.v_scale=f32/0",
        "mlp.experts.gate_up_proj=f8 mlp.experts.gate_up_proj_scale_inv=f32",
        "l.weight=f8 l.scale_weight=f32/0 l.scale_input=f32/0",
    ],
    "NVFP4": ["l.weight=u8 l.weight_scale=f8 l.weight_scale_2=f32/0 l.input_scale=f32/0"],
    "MXFP4": ["e.gate_up_proj_blocks=u8 e.gate_up_proj_scales=u8"],
    "FP4": ["l.weight=f4 l.weight_scale=e8"],
    "HQQ": ["l.W_q=u8 l.scale=f16 l.zero=f16"],
    "Quanto": [
        "l.weight._data=i8 l.weight._scale=bf16 l.input_scale=bf16/0",
        "l.weight._data._data=u8 l.weight._scale=bf16 l.weight._shift=bf16 l.output_scale=bf16/0",
    ],
    "EXL2": ["l.q_weight=i32 l.q_scale=i32 l.q_scale_max=f16/1 l.q_groups=i16/1 l.q_invperm=i32/1"],
    "AQLM": ["l.codes=i16 l.codebooks=f16 l.scales=f16"],
    "ModelOpt": [
        "l.weight_quantizer._amax=f32 l.input_quantizer._amax=f32/0",
        "l.weight_quantizer._scale=f32 l.input_quantizer._pre_quant_scale=bf16",
    ],
    "Transformer Engine": ["l._extra_state=f32/1", "l.scale_inv_fwd=f32/1 l.amax_history_fwd=f32"],
    "fake-quantized": [
        (
            "l.weight_fake_quant.fake_quant_enabled=u8/1 l.weight_fake_quant.observer_enabled=u8/1 "
            "l.weight_fake_quant.scale=f32/1 l.weight_fake_quant.zero_point=i32/1"
        )
    ],
    "calibrated": [
        "l.scale=f32/0 l.zero_point=i64/0",
        "l.weight_scale=bf16 l.weight_zero_point=i8 l.input_scale=bf16/1",
    ],
    "packed int8": ["l.weight=i8 l.weight_scale=f32", "l.w=i8 l.scales=bf16 l.absmax=f32"],
}


@pytest.mark.parametrize(
    ("family", "text"), [(name, text) for name, texts in FAMILIES.items() for text in texts]
)
@pytest.mark.parametrize("prefix", ["", "model.layers.0.", "state.model."])
def test_a_family_is_known_as_a_whole(family: str, text: str, prefix: str) -> None:
    found = found_in(text, prefix=prefix)
    floats = {w.split("=")[0] for w in text.split() if w.split("=")[1][:2] in ("f3", "f1", "bf")}
    members = {fqn.removeprefix(prefix): one.family for fqn, one in found.members.items()}
    assert {members.get(name) for name in floats} <= {family}
    assert family in members.values()
    assert not found.doubtful


@pytest.mark.parametrize(
    "text",
    [
        "norm.scale=f32/1 norm.bias=f32/1",
        "attn.scale=f32/0 attn.q.weight=bf16 scales=f32/1",
        "bn.weight=f32/1 bn.running_mean=f32/1 bn.num_batches_tracked=i64/0",
        "embeddings.position_ids=i32 embeddings.weight=bf16",
        "attn.bias=u8/4 attn.masked_bias=f32/0 attn.c_attn.weight=f32",
        "attn.attn_mask=i8 attn.weight=f32 rng_state=u8/1 w.step=i32/0 w.exp_avg=f32",
        "attn.relative_position_index=i64 attn.relative_position_bias_table=f32",
        "vq.quantizer.codebook=f32 vector_quantizer.embedding.weight=f32",
        "gate.e_score_correction_bias=f32/1 gate.weight=bf16 gate.tokens_per_expert=i32/1",
        "l.state1=f32 l.state2=f32",
    ],
)
def test_a_plain_model_has_no_families(text: str) -> None:
    found = found_in(text)
    assert not found.members
    assert not found.doubtful


@pytest.mark.parametrize(
    "text",
    ["l.weight=i8 l.other=f32", "l.weight=u8 l.u=f32/1", "l.weight=f8 l.u=f32", "l.x=u8 l.u=f32"],
)
def test_what_stands_beside_a_packed_tensor_unknown_is_doubtful(text: str) -> None:
    found = found_in(text)
    ((name, beside),) = found.doubtful.items()
    assert name.endswith((".other", ".u"))
    assert beside.endswith((".weight", ".x"))


@pytest.mark.parametrize(
    "scale",
    ["l.weight_scale=f32/1", "l.input_scale=f32/0", "l.weight_scale_inv=f32", "l.k_scale=f32/0"],
)
def test_a_scale_by_name_beside_a_plain_weight_is_doubtful(scale: str) -> None:
    found = found_in(f"l.weight=bf16 {scale}")
    assert list(found.doubtful.values()) == ["model.layers.0.l.weight"]
    assert not found.members
    assert not found_in("attn.k_scale=f32/1 attn.q_scale=f32/2 ls.layer_scale=f32/1").doubtful


def test_biases_and_other_modules_of_a_quantized_model_are_plain() -> None:
    text = "l.weight=f8 l.weight_scale=f32 l.bias=f32/1 n.scale=f32/1 l.lora_A.default.weight=f32"
    found = found_in(text)
    assert {fqn.removeprefix("model.layers.0.") for fqn in found.members} == {
        "l.weight",
        "l.weight_scale",
    }
    assert not found.doubtful


def test_a_weight_of_its_own_type_beside_calibrated_scales_is_cast() -> None:
    found = found_in("l.weight=bf16 l.weight_scale=f32 l.weight_zero_point=f8 l.bias=bf16/1")
    assert not any(fqn.endswith((".weight", ".bias")) for fqn in found.members)
    assert any(fqn.endswith(".weight_scale") for fqn in found.members)
    assert not found.doubtful


def test_all_types_at_the_top_of_a_checkpoint_are_no_family() -> None:
    found = found_in("t_f32=f32 t_u8=u8 t_i8=i8 t_bf16=bf16", prefix="")
    assert not found.doubtful


def test_codes_in_floating_storage_are_known_by_the_state_beside_them() -> None:
    assert found_in(NF4.format("bf16")).codes == {"model.layers.0.l.weight"}
    assert not found_in(NF4.format("u8")).codes


# -------------------------------------------------------------------------------- through commands


@pytest.fixture
def nf4(tmp_path: Path) -> Path:
    tensors = {
        "0.weight": torch.randn(8, 1).bfloat16(),
        "0.weight.absmax": torch.randn(4),
        "0.weight.quant_map": torch.randn(16),
        "0.weight.quant_state.bitsandbytes__nf4": torch.arange(9, dtype=torch.uint8),
        "0.bias": torch.randn(4),
        "1.weight": torch.randn(4),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_an_export_keeps_a_quantized_weight_to_the_bit_and_proves_it(
    nf4: Path, tmp_path: Path
) -> None:
    words = ("--dtype", "fp16", "--check", "--rename", "^0=first")
    result = run("export", nf4, "-o", tmp_path / "out.safetensors", *words)
    assert result.exit_code == 0, result.stderr
    assert "Kept exact: 4 tensors of 1 bitsandbytes 4-bit weight (0.weight)" in result.stderr
    there, here = load_file(tmp_path / "out.safetensors"), load_file(nf4)
    assert there["1.weight"].dtype == there["first.bias"].dtype == torch.float16
    for name in here:
        if name.startswith("0.weight"):
            assert there[f"first{name[1:]}"].dtype == here[name].dtype
            assert torch.equal(there[f"first{name[1:]}"], here[name])


def test_a_family_is_known_when_its_signs_are_left_out(nf4: Path, tmp_path: Path) -> None:
    words = ("--dtype", "fp16", "-x", "*quant*", "-x", "*absmax")
    result = run("export", nf4, "-o", tmp_path / "out.safetensors", *words)
    assert result.exit_code == 0, result.stderr
    assert load_file(tmp_path / "out.safetensors")["0.weight"].dtype == torch.bfloat16


def test_a_reshard_keeps_them_too_and_takes_exceptions(nf4: Path, tmp_path: Path) -> None:
    words = ("reshard", nf4, "-o", tmp_path / "out", "--to-mesh", 1, "--dtype", "fp16")
    result = run(*words, "--dtype-for", "1.weight=keep")
    assert result.exit_code == 0, result.stderr
    assert "Kept exact: 4 tensors" in result.stderr
    exported = run("export", tmp_path / "out", "-o", tmp_path / "back.safetensors")
    assert exported.exit_code == 0, exported.stderr
    there, here = load_file(tmp_path / "back.safetensors"), load_file(nf4)
    assert {name for name in here if there[name].dtype != here[name].dtype} == {"0.bias"}


def test_a_doubtful_cast_writes_nothing(tmp_path: Path) -> None:
    tensors = {"l.weight": torch.ones(2, 2, dtype=torch.int8), "l.odd": torch.ones(2)}
    save_file(tensors, tmp_path / "in.safetensors")
    words = ("export", tmp_path / "in.safetensors", "-o", tmp_path / "out.safetensors")
    result = run(*words, "--dtype", "bf16")
    assert result.exit_code == 2
    assert "l.odd" in result.stderr
    assert "--dtype-for" in result.stderr
    assert not (tmp_path / "out.safetensors").exists()
    assert run(*words, "--dtype", "bf16", "--dtype-for", "l.odd=keep").exit_code == 0
