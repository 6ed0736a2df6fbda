import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from ckpt_tools import api, formats
from ckpt_tools.convert import export as convert
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import AnswerNo, UsageError
from ckpt_tools.transforms import hf_architecture, hf_config, hf_folder
from ckpt_tools.transforms.hf_config import Weights
from ckpt_tools.transforms.hf_folder import AssetsTransform, asset_config, values_of

# A model type that transformers does not know: the headers of the asset folder must tell.
CONFIG: dict[str, object] = {"model_type": "of_our_own", "tie_word_embeddings": True}
TABLE = np.arange(6, dtype=np.float32).reshape(3, 2)
WEIGHTS = {"model.embed_tokens.weight": TABLE, "model.norm.weight": np.ones(2, np.float32)}


def assets(folder: Path, config: dict[str, object], weights: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text(name)
    (folder / "merges.txt").write_text("")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool.jinja").write_text("tool")
    save_file(weights, folder / "model.safetensors")
    return folder


StepFor = Callable[[CheckpointIndex], AssetsTransform]


def export(
    tmp_path: Path, weights: dict[str, np.ndarray], step_for: StepFor, dtype: DType | None = None
) -> convert.ExportPlan:
    source = tmp_path / "source.safetensors"
    save_file(weights, source)
    index = formats.read_index(str(source))
    return api.export(
        index,
        str(tmp_path / "out"),
        options=ExportOptions(steps=(step_for(index),), dtype=dtype),
        write=WriteOptions(),
        on_bytes=lambda _: None,
    )


def step_for(tmp_path: Path, *, allow: bool = False, **config: object) -> StepFor:
    folder = assets(tmp_path / "assets", CONFIG | config, WEIGHTS)
    found = asset_config(str(folder))
    return lambda index: AssetsTransform(str(folder), found, index, allow)


def test_the_assets_come_along_and_the_weights_do_not(tmp_path: Path) -> None:
    export(tmp_path, WEIGHTS, step_for(tmp_path))
    out = tmp_path / "out"
    found = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
    assert found == [
        "additional_chat_templates/tool.jinja",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in found:
        if name not in ("model.safetensors", "config.json"):
            assert (out / name).read_bytes() == (tmp_path / "assets" / name).read_bytes()
    assert load_file(out / "model.safetensors").keys() == WEIGHTS.keys()


def test_missing_unexpected_and_misshapen_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": np.ones((4, 2), np.float32), "new.w": TABLE}
    with pytest.raises(AnswerNo) as caught:
        export(tmp_path, weights, step_for(tmp_path))
    told = str(caught.value)
    assert "1 missing: model.norm.weight" in told
    assert "1 unexpected: new.w" in told
    assert "1 misshapen: model.embed_tokens.weight [4, 2], not [3, 2]" in told
    assert sorted(p.name for p in tmp_path.iterdir()) == ["assets", "source.safetensors"]


def test_a_mismatch_that_is_allowed_is_written_and_told(tmp_path: Path) -> None:
    plan = export(tmp_path, WEIGHTS | {"new.w": TABLE}, step_for(tmp_path, allow=True))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {*WEIGHTS, "new.w"}
    assert any("1 unexpected: new.w" in note for note in plan.notes)


def test_a_tied_head_that_is_equal_is_written_once(tmp_path: Path) -> None:
    plan = export(tmp_path, WEIGHTS | {"lm_head.weight": TABLE}, step_for(tmp_path))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == WEIGHTS.keys()
    assert any("equal to the bit: written once" in note for note in plan.notes)


def test_a_tied_head_that_differs_is_kept_and_told(tmp_path: Path) -> None:
    other = TABLE.copy()
    other[2, 1] = np.nextafter(other[2, 1], np.float32(9))
    step = step_for(tmp_path, allow=True)
    plan = export(tmp_path, WEIGHTS | {"lm_head.weight": other}, step)
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert any("their values differ: both are written" in note for note in plan.notes)


def test_an_untied_head_stays_though_it_is_equal(tmp_path: Path) -> None:
    step = step_for(tmp_path, allow=True, tie_word_embeddings=False)
    export(tmp_path, WEIGHTS | {"lm_head.weight": TABLE}, step)
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_an_index_without_its_shards_tells_the_names(tmp_path: Path) -> None:
    step = step_for(tmp_path)
    (tmp_path / "assets" / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys([*WEIGHTS, "gone.w"], "model-00001-of-00001.safetensors")}
    (tmp_path / "assets" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(AnswerNo, match=r"1 missing: gone\.w"):
        export(tmp_path, WEIGHTS, step)


def test_assets_that_tell_nothing_of_the_tensors_are_refused(tmp_path: Path) -> None:
    step = step_for(tmp_path)
    (tmp_path / "assets" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="Nothing says which tensors"):
        export(tmp_path, WEIGHTS, step)


@pytest.mark.parametrize("content", [None, "{", "[]", b"\xff\xfe"])
def test_assets_without_a_readable_config_are_refused(
    tmp_path: Path, content: str | bytes | None
) -> None:
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(UsageError, match=r"config\.json"):
        asset_config(str(tmp_path))


def config_of(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_says_the_type_that_was_written(tmp_path: Path, key: str) -> None:
    config: dict[str, object] = {key: "float32"}
    bf16 = BY_NAME["bfloat16"]
    plan = export(tmp_path, WEIGHTS, step_for(tmp_path, **config), dtype=bf16)
    assert config_of(tmp_path / "out") == CONFIG | {key: "bfloat16"}
    assert any("config.json says bfloat16" in n and "it said float32" in n for n in plan.notes)


def test_tensors_that_keep_their_type_are_not_called_by_that_of_the_assets(tmp_path: Path) -> None:
    export(tmp_path, WEIGHTS, step_for(tmp_path, torch_dtype="bfloat16"))
    assert config_of(tmp_path / "out")["torch_dtype"] == "float32"


def test_a_config_without_a_type_gets_one(tmp_path: Path) -> None:
    export(tmp_path, WEIGHTS, step_for(tmp_path))
    assert config_of(tmp_path / "out") == CONFIG | {"torch_dtype": "float32"}


def test_a_config_that_is_true_is_copied_to_the_byte(tmp_path: Path) -> None:
    export(tmp_path, WEIGHTS, step_for(tmp_path, torch_dtype="float32"))
    files = [tmp_path / folder / "config.json" for folder in ("assets", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_parts_of_a_config_say_types_that_are_written() -> None:
    config = {
        "dtype": "float16",
        "text_config": {"dtype": "float16", "rope": {"dtype": "float16"}},
        "vision_config": {"torch_dtype": "float32", "hidden_size": 8},
        "audio_config": {"torch_dtype": None},
    }
    both = {BY_NAME["bfloat16"]: 9, BY_NAME["float32"]: 1}
    found, _ = hf_config.true_of(Weights(both, {}, ()), config, of_source={}, must_fit=True)
    assert found == config | {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "rope": {"dtype": "float16"}},
    }


FP8 = {"quant_method": "fp8"}


def quantized(tmp_path: Path) -> CheckpointIndex:
    folder = tmp_path / "quantized"
    folder.mkdir()
    codes = {"l.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    scales = {"l.weight_scale_inv": torch.ones(1, 1)}
    plain = {"norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    save_torch(codes | scales | plain, folder / "model.safetensors")
    return formats.read_index(str(folder))


def export_quantized(index: CheckpointIndex, tmp_path: Path, config: dict[str, object]) -> None:
    folder = assets(tmp_path / "assets", config, {"l.weight": TABLE, "norm.weight": TABLE})
    names = {"l.weight": np.ones((4, 4), np.float32), "norm.weight": np.ones(4, np.float32)}
    save_file(names, folder / "model.safetensors")
    step = AssetsTransform(str(folder), asset_config(str(folder)), index)
    options = ExportOptions(steps=(step,))
    api.export(index, str(tmp_path / "out"), options=options, on_bytes=lambda _: None)


def test_quantized_weights_keep_the_config_that_says_how(tmp_path: Path) -> None:
    config = CONFIG | {"quantization_config": FP8, "torch_dtype": "bfloat16"}
    export_quantized(quantized(tmp_path), tmp_path, config)
    assert config_of(tmp_path / "out") == config


def test_quantized_weights_get_the_config_that_lies_with_them(tmp_path: Path) -> None:
    index = quantized(tmp_path)
    (tmp_path / "quantized" / "config.json").write_text(json.dumps({"quantization_config": FP8}))
    export_quantized(index, tmp_path, CONFIG)
    assert config_of(tmp_path / "out")["quantization_config"] == FP8


def test_quantized_weights_that_no_config_tells_of_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AnswerNo, match=r"1 tensors are quantized \(FP8: l\.weight\)"):
        export_quantized(quantized(tmp_path), tmp_path, CONFIG)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_plain_weights_have_no_quantization_config(tmp_path: Path, place: str) -> None:
    inner: dict[str, object] = {"quantization_config": FP8} if place == "text_config" else dict(FP8)
    plan = export(tmp_path, WEIGHTS, step_for(tmp_path, **{place: inner}))
    assert "quant" not in (tmp_path / "out" / "config.json").read_text()
    assert any("Removed from config.json its quantization_config" in note for note in plan.notes)


def test_scales_of_a_cache_keep_the_config_that_tells_of_them() -> None:
    config = {"quantization_config": {"kv_cache_scheme": {}}, "dtype": "float32"}
    weights = Weights({BY_NAME["float32"]: 4}, {}, ("l.self_attn.k_scale",))
    found, notes = hf_config.true_of(weights, config, of_source={}, must_fit=True)
    assert found == config
    assert "keeps its quantization_config" in notes[0]


@pytest.mark.parametrize("packed", ["l.qweight", "l.weight_packed", "l.weight"])
def test_packed_weights_stand_for_those_that_the_plain_model_needs(packed: str) -> None:
    weights = Weights({}, {packed: "a library's"}, (f"{packed}_scale",))
    shapes = {packed: (4, 1), f"{packed}_scale": (4,), "l.bias": (4,)}
    assert weights.plain(shapes, {"l.weight", "l.bias"}) == {"l.weight": None, "l.bias": (4,)}


def test_sizes_follow_from_the_config_as_the_models_take_them() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "use_cache": True}
    assert values_of(config) == {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    assert values_of(config | {"head_dim": 32})["head_dim"] == 32
    assert values_of({"text_config": config})["head_dim"] == 16


DECODER: dict[str, object] = {
    "vocab_size": 1 << 17,
    "hidden_size": 1 << 14,
    "intermediate_size": 1 << 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}
BIASED: dict[str, object] = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, BIASED, {"head_dim": 64}], ids=["plain", "biased", "heads"])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_numbers_of_a_config_say_what_transformers_says(
    tmp_path: Path, family: str, more: dict[str, object]
) -> None:
    pytest.importorskip("transformers")
    head = {"head_dim": 128} if family == "Qwen3" else {}
    named = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    config = DECODER | head | more | named
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = hf_architecture.by_numbers(config)
    truth = hf_architecture.by_transformers(str(tmp_path), config)
    assert found is not None
    assert truth is not None
    assert truth.choices == found.choices
    assert truth.ties == found.ties
    assert truth.according_to.startswith(f"{family}ForCausalLM of transformers")


def test_a_known_architecture_is_read_without_transformers(tmp_path: Path) -> None:
    llama = DECODER | {"architectures": ["LlamaForCausalLM"]}
    notes: list[str] = []
    needed = hf_architecture.needed_by(str(tmp_path), llama, on_note=notes.append)
    assert needed is not None
    assert needed.according_to == "the config of a LlamaForCausalLM"
    assert not notes


@pytest.mark.parametrize("more", [{"auto_map": {}}, {"num_key_value_heads": None}])
def test_numbers_are_not_guessed(more: dict[str, object]) -> None:
    llama = DECODER | {"architectures": ["LlamaForCausalLM"]}
    assert hf_architecture.by_numbers(llama | more) is None
    assert hf_architecture.by_numbers(DECODER | {"architectures": ["Qwen3ForCausalLM"]}) is None
    assert hf_architecture.by_numbers(DECODER) is None


def test_a_mixture_of_experts_may_come_in_one_tensor_or_one_by_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_experts": 4,
        "vocab_size": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    notes: list[str] = []
    needed = hf_architecture.needed_by(str(tmp_path), config, on_note=notes.append)
    assert needed is not None
    assert "import" in notes[0]
    fused, single = needed.choices
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in single


def test_the_same_bytes_of_the_same_file_are_equal_unread(tmp_path: Path) -> None:
    from ckpt_tools.storage.reader import Files

    save_file(WEIGHTS, tmp_path / "a.safetensors")
    entry = formats.read_index(str(tmp_path / "a.safetensors")).tensors[0]
    (tmp_path / "a.safetensors").unlink()
    assert hf_folder.same_bytes(entry, entry, Files())
