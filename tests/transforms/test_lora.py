import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from alone import ALONE
from click.testing import Result
from reader_contract import DATA
from running import run
from safetensors.numpy import load_file, save_file

from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.copying.origin import option_texts
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.transforms import quantized
from ckpt_tools.transforms.lora import LoraConfig, MergeTransform

REAL = DATA / "checkpoints"
PEFT = REAL / "peft_fsdp2_dcp_4r" / "ckpt"
PEFT_ADAPTER = REAL / "peft_fsdp2_adapter_4r" / "ckpt" / "adapter"
VERL = REAL / "verl_lora_4r"
VERL_META = VERL / "ckpt" / "global_step_1" / "actor" / "lora_train_meta.json"
VERL_MERGE = VERL / "peer_verl_merge"


def ran(*words: object) -> Result:
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    return result


def adapter_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "adapter_model.safetensors")


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and np.array_equal(found[name], wanted[name])
        for name in wanted
    )


def test_an_adapter_is_what_peft_itself_saves(tmp_path: Path) -> None:
    ran("export", PEFT, "-o", tmp_path / "out", "--adapter", "--lora-alpha", 6)
    assert same(adapter_of(tmp_path / "out"), adapter_of(PEFT_ADAPTER))
    made, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "out", PEFT_ADAPTER)
    )
    for key in ("r", "lora_alpha", "modules_to_save", "peft_type", "bias", "use_rslora"):
        assert made[key] == theirs[key]
    assert set(made["target_modules"]) == set(theirs["target_modules"])


def test_an_adapter_that_ranks_saved_by_itself_is_all_of_it(tmp_path: Path) -> None:
    source = REAL / "peft_fsdp2_adapter_torchsave_4r" / "ckpt"
    ran("export", source, "-o", tmp_path / "out", "--adapter", "--lora-alpha", 6)
    assert same(adapter_of(tmp_path / "out"), adapter_of(PEFT_ADAPTER))
    made = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert made["modules_to_save"] == ["lm_head"]


def test_a_given_configuration_goes_along_as_it_is(tmp_path: Path) -> None:
    config = PEFT_ADAPTER / "adapter_config.json"
    ran("export", PEFT, "-o", tmp_path / "out", "--adapter", "--adapter-config", config)
    out = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert out == json.loads(config.read_text())


def test_verls_adapter_has_the_names_and_bits_of_verls_own_merger(tmp_path: Path) -> None:
    words = ("--adapter", "--adapter-config", VERL_META, "--dtype", "bf16")
    ran("export", VERL / "ckpt", "-o", tmp_path / "out", *words)
    ours = tmp_path / "out" / "adapter_model.safetensors"
    theirs = VERL_MERGE / "lora_adapter" / "adapter_model.safetensors"
    assert ran("diff", ours, theirs).exit_code == 0
    made = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (made["r"], made["lora_alpha"], made["task_type"]) == (4, 8, "CAUSAL_LM")


def test_nothing_is_merged_into_codes_that_look_like_floats(tmp_path: Path) -> None:
    """bitsandbytes says so below the weight's own name in the source."""
    sign = {"base_model.model.l.base_layer.weight.quant_map": np.zeros(16, np.float32)}
    folder = source(tmp_path / "in", layer("l", 2) | sign)
    words = ("--merge-lora", "--lora-alpha", 4, "--dtype", "bf16")
    result = run("export", folder, "-o", tmp_path / "out", *words)
    assert result.exit_code == 3
    assert "l.weight is bitsandbytes 4-bit: LoRA cannot be merged" in result.stderr


def test_what_is_quantized_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def recognise(index: CheckpointIndex) -> quantized.Quantized:
        asked.append(index)
        return real(index)

    real = quantized.recognise
    monkeypatch.setattr(quantized, "recognise", recognise)
    folder = source(tmp_path / "in", layer("l", 2))
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text("{}")
    words = ("--merge-lora", "--lora-alpha", 4, "--dtype", "bf16", "--hf-assets", assets)
    ran("export", folder, "-o", tmp_path / "out", *words, "--allow-mismatch", "--dry-run")
    assert len(asked) == 1


def test_alpha_is_asked_for_and_never_guessed(tmp_path: Path) -> None:
    for way in ("--adapter", "--merge-lora"):
        result = run("export", PEFT, "-o", tmp_path / "out", way)
        assert result.exit_code == 2
        assert "alpha is in no tensor" in result.stderr
    assert run("export", PEFT, "-o", tmp_path / "out", "--lora-alpha", 6).exit_code == 2
    assert not list(tmp_path.iterdir())


def source(folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def layer(prefix: str, rank: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = {"base_layer": (6, 5), "lora_A.default": (rank, 5), "lora_B.default": (6, rank)}
    return {
        f"base_model.model.{prefix}.{part}.weight": rng.random(size, np.float32)
        for part, size in sizes.items()
    }


def merged(tensors: dict[str, np.ndarray], prefix: str, scale: float) -> np.ndarray:
    base, a, b = (
        tensors[f"base_model.model.{prefix}.{part}.weight"]
        for part in ("base_layer", "lora_A.default", "lora_B.default")
    )
    return base + np.float32(scale) * (b @ a)


def test_a_merge_adds_the_scaled_product_and_leaves_the_rest(tmp_path: Path) -> None:
    tensors = layer("m.q", 2) | {"base_model.model.m.k.weight": np.ones((2, 2), np.float32)}
    tensors["base_model.model.m.q.base_layer.bias"] = np.arange(6, dtype=np.float32)
    folder = source(tmp_path / "in", tensors)
    ran("export", folder, "-o", tmp_path / "out", "--merge-lora", "--lora-alpha", 3)
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == {"m.q.weight", "m.q.bias", "m.k.weight"}
    np.testing.assert_allclose(out["m.q.weight"], merged(tensors, "m.q", 1.5), rtol=1e-6)
    assert np.array_equal(out["m.q.bias"], np.arange(6))
    assert not [name for name in out if "lora" in name]


def test_a_merge_in_small_slabs_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_tools.transforms.lora import merge

    monkeypatch.setattr(merge, "_SLAB_NUMEL", 11)
    tensors = layer("m.q", 2)
    folder = source(tmp_path / "in", tensors)
    ran("export", folder, "-o", tmp_path / "out", "--merge-lora", "--lora-alpha", 2)
    out = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_allclose(out["m.q.weight"], merged(tensors, "m.q", 1.0), rtol=1e-6)


def test_a_merge_and_a_map_can_be_checked_against_what_was_planned(tmp_path: Path) -> None:
    folder = source(tmp_path / "in", layer("m.q", 2))
    words = ("--merge-lora", "--lora-alpha", 2, "--rename", "^m=n", "--check")
    told = ran("export", folder, "-o", tmp_path / "out", *words).stderr
    assert "Proven" in told


def test_a_merge_is_rounded_once(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    tensors = layer("m.q", 2)
    folder = source(tmp_path / "in", tensors)
    words = ("--merge-lora", "--lora-alpha", 2, "--dtype", "bf16")
    ran("export", folder, "-o", tmp_path / "out", *words)
    wanted = torch.from_numpy(merged(tensors, "m.q", 1.0)).bfloat16()
    assert torch.equal(load_torch(tmp_path / "out" / "model.safetensors")["m.q.weight"], wanted)


def test_a_merge_says_which_finite_values_its_cast_made_infinite(tmp_path: Path) -> None:
    tensors = layer("m.q", 2) | layer("m.k", 2)
    tensors["base_model.model.m.q.base_layer.weight"][5, 4] = -65_535
    folder = source(tmp_path / "in", tensors)
    words = ("--merge-lora", "--lora-alpha", 2, "--dtype", "fp16")
    told = ran("export", folder, "-o", tmp_path / "out", *words).stderr
    assert "Finite values of 1 tensor are" in told
    assert "infinite in it: m.q.weight." in told


def test_alpha_patterns_ranks_and_rslora_count_for_each_module(tmp_path: Path) -> None:
    tensors = layer("a.q", 2) | layer("b.q", 4, 1)
    folder = source(tmp_path / "in", tensors)
    config = {"lora_alpha": 8, "r": 2, "rank_pattern": {"b.q": 4}, "alpha_pattern": {"^b.q": 2}}
    for more, scales in (({}, (4.0, 0.5)), ({"use_rslora": True}, (8 / 2**0.5, 1.0))):
        (tmp_path / "config.json").write_text(json.dumps(config | more))
        out = tmp_path / f"out{len(more)}"
        ran(
            "export",
            folder,
            "-o",
            out,
            "--merge-lora",
            "--adapter-config",
            tmp_path / "config.json",
        )
        found = load_file(out / "model.safetensors")
        for name, scale in zip(("a.q", "b.q"), scales, strict=True):
            np.testing.assert_allclose(
                found[f"{name}.weight"], merged(tensors, name, scale), rtol=1e-5
            )


def test_an_adapter_of_several_ranks_says_so(tmp_path: Path) -> None:
    folder = source(tmp_path / "in", layer("a.q", 2) | layer("b.q", 4, 1) | layer("c.q", 2, 2))
    (tmp_path / "config.json").write_text(json.dumps({"lora_alpha": 4}))
    words = ("--adapter", "--adapter-config", tmp_path / "config.json")
    ran("export", folder, "-o", tmp_path / "out", *words)
    made = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (made["r"], made["rank_pattern"]) == (2, {r"^b\.q": 4})
    assert made["target_modules"] == ["q"]


def test_target_modules_are_full_names_where_a_last_part_would_mean_more(tmp_path: Path) -> None:
    tensors = layer("a.q", 2) | {"base_model.model.b.q.weight": np.ones((2, 2), np.float32)}
    folder = source(tmp_path / "in", tensors)
    ran("export", folder, "-o", tmp_path / "out", "--adapter", "--lora-alpha", 4)
    made = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert made["target_modules"] == ["a.q"]


def test_a_configuration_of_another_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"lora_alpha": 8, "r": 16}))
    words = ("--adapter", "--adapter-config", tmp_path / "config.json")
    result = run("export", PEFT, "-o", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert "says rank 16, its tensors have 3" in result.stderr


@pytest.mark.parametrize("way", ["--adapter", "--merge-lora"])
def test_alpha_alone_is_refused_where_ranks_differ(tmp_path: Path, way: str) -> None:
    folder = source(tmp_path / "in", layer("a.q", 2) | layer("b.q", 4, 1))
    result = run("export", folder, "-o", tmp_path / "out", way, "--lora-alpha", 4)
    assert result.exit_code == 2
    assert "The modules have ranks 2, 4 (PEFT's rank_pattern)" in result.stderr
    assert "--adapter-config FILE" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["adapter_config.json", "lora_train_meta.json"])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"lora_alpha": 4, "use_rslora": True}, "says use_rslora = True;"),
        ({"lora_alpha": 4, "alpha_pattern": {"q": 8}}, "says alpha_pattern = {'q': 8};"),
        ({"lora_alpha": 8}, "says lora_alpha = 8;"),
        ({"lora_alpha": 4, "use_rslora": False}, None),
    ],
)
def test_alpha_alone_is_refused_where_the_configuration_beside_says_more(
    tmp_path: Path, name: str, said: dict[str, object], words: str | None
) -> None:
    folder = source(tmp_path / "in", layer("a.q", 2))
    (folder / name).write_text(json.dumps(said))
    asked = ("export", folder, "-o", tmp_path / "out", "--merge-lora")
    result = run(*asked, "--lora-alpha", 4)
    if words is None:
        assert result.exit_code == 0, result.stderr
    else:
        assert result.exit_code == 2
        assert words in result.stderr
        assert f"--adapter-config {folder / name} in place of --lora-alpha" in result.stderr
        ran(*asked, "--adapter-config", folder / name)


def test_one_of_several_adapters_is_chosen_by_name(tmp_path: Path) -> None:
    tensors = layer("m.q", 2)
    for side in "AB":
        first = tensors[f"base_model.model.m.q.lora_{side}.default.weight"]
        tensors[f"base_model.model.m.q.lora_{side}.second.weight"] = 2 * first
    folder = source(tmp_path / "in", tensors)
    words = ("export", folder, "-o", tmp_path / "out", "--adapter", "--lora-alpha", 1)
    result = run(*words)
    assert result.exit_code == 2
    assert "2 adapters: default, second" in result.stderr
    ran(*words, "--adapter-name", "second")
    found = adapter_of(tmp_path / "out")["base_model.model.m.q.lora_A.weight"]
    assert np.array_equal(found, tensors["base_model.model.m.q.lora_A.second.weight"])


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ({"base_model.model.m.q.lora_magnitude_vector.default.weight": (6,)}, 3, "not plain LoRA"),
        ({"base_model.model.m.q.lora_B.default.bias": (6,)}, 3, "not plain LoRA"),
        ({"base_model.model.m.q.lora_B.default.weight": None}, 3, "only A is there"),
        ({"base_model.model.m.q.base_layer.weight": None}, 3, "the base weight is not"),
        ({"base_model.model.m.q.base_layer.weight": (6, 7)}, 3, r"make [6, 5]"),
        ({"base_model.model.m.q.lora_A.default.weight": (2, 5, 1, 1)}, 3, "convolutions"),
    ],
)
def test_what_cannot_be_merged_is_refused(
    tmp_path: Path, change: dict[str, tuple[int, ...] | None], code: int, told: str
) -> None:
    tensors = layer("m.q", 2)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = np.ones(shape, np.float32)
    folder = source(tmp_path / "in", tensors)
    result = run("export", folder, "-o", tmp_path / "out", "--merge-lora", "--lora-alpha", 1)
    assert result.exit_code == code
    assert told in result.stderr
    assert not (tmp_path / "out").exists()


PEFT_NAME = "base_model.model.m.q."


@pytest.mark.parametrize(
    "name",
    [
        PEFT_NAME + "trainable_tokens_delta.default",
        PEFT_NAME + "anything.default",
        PEFT_NAME + "base_layer.base_layer.weight",
        "base_model.model.emb.token_adapter.base_layer.weight",
        "base_model.model.m.k.ia3_l.default",
        "base_model.xlora_classifier.weight",
        "prompt_encoder.default.embedding.weight",
    ],
)
@pytest.mark.parametrize("way", ["--merge-lora", "--adapter"])
def test_what_peft_puts_there_and_is_not_understood_is_refused_by_name(
    tmp_path: Path, name: str, way: str
) -> None:
    tensors = layer("m.q", 2) | {name: np.ones((2, 2), np.float32)}
    folder = source(tmp_path / "in", tensors)
    result = run("export", folder, "-o", tmp_path / "out", way, "--lora-alpha", 1)
    assert result.exit_code == 3
    assert name in result.stderr
    assert not (tmp_path / "out").exists()


def test_tokens_trained_alone_are_refused_in_an_adapters_own_folder_too(tmp_path: Path) -> None:
    tensors = {f"{PEFT_NAME}lora_{side}.weight": np.ones((2, 2), np.float32) for side in "AB"}
    tensors["base_model.model.emb.token_adapter.trainable_tokens_delta"] = np.ones((1, 2))
    folder = source(tmp_path / "in", tensors)
    result = run("export", folder, "-o", tmp_path / "out", "--adapter", "--lora-alpha", 1)
    assert result.exit_code == 3
    assert "trainable_tokens_delta" in result.stderr


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainable_token_indices", [1, 3]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("layer_replication", [[0, 2]]),
        ("alora_invocation_tokens", [5]),
        ("use_dora", True),
        ("bias", "all"),
        ("peft_type", "ADALORA"),
        ("of_a_later_peft", {"x": 1}),
    ],
)
def test_a_setting_that_is_not_understood_is_refused_by_name(
    tmp_path: Path, key: str, value: object
) -> None:
    config = json.loads((PEFT_ADAPTER / "adapter_config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--adapter", "--adapter-config", tmp_path / "config.json")
    result = run("export", PEFT, "-o", tmp_path / "out", *words)
    assert result.exit_code == 3
    assert key in result.stderr


# ------------------------------------------------------------------------------------------ filters


def adapted(prefix: str = "") -> dict[str, np.ndarray]:
    """Two modules with LoRA, one that was trained whole, and what no adapter has touched."""
    tensors = layer("m.q", 2) | layer("m.k", 2, 1)
    score = "base_model.model.score."
    tensors[f"{score}original_module.weight"] = np.zeros((2, 6), np.float32)
    tensors[f"{score}modules_to_save.default.weight"] = np.ones((2, 6), np.float32)
    tensors["base_model.model.norm.weight"] = np.ones(6, np.float32)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def filtered(
    tmp_path: Path, tensors: dict[str, np.ndarray], filters: list[str], way: str = "--merge-lora"
) -> Result:
    folder = source(tmp_path / "in", tensors)
    return run("export", folder, "-o", tmp_path / "out", way, "--lora-alpha", 2, *filters)


@pytest.mark.parametrize("way", ["--merge-lora", "--adapter"])
@pytest.mark.parametrize("prefix", ["", "model.", "model.module._fsdp_wrapped_module."])
@pytest.mark.parametrize(
    ("more", "filters"),
    [
        ("lora_magnitude_vector.default.weight", ["-x", "*magnitude*"]),
        ("lora_magnitude_vector.default.weight", ["-x", "re:m.q.lora_[^AB]"]),
        ("lora_magnitude_vector", ["-x", "*magnitude*"]),
        (
            "lora_magnitude_vector.default.weight",
            ["-i", "*base_layer*", "-i", "*lora_A*", "-i", "*lora_B*", "-i", "*modules_to_save*"],
        ),
        ("lora_B.default.bias", ["-x", "*.bias"]),
        ("trainable_tokens_delta.default", ["-x", "*tokens*"]),
        ("anything.default", ["-x", "*anything*"]),
        (None, ["-x", "*m.q.lora_*"]),
        (None, ["-x", "*m.q.lora_B*"]),
        (None, ["-x", "*modules_to_save*"]),
        (None, ["-i", "*base_layer*", "-i", "*m.q*"]),
    ],
)
def test_filters_that_split_an_adapter_are_refused(
    tmp_path: Path, more: str | None, filters: list[str], prefix: str, way: str
) -> None:
    tensors = adapted(prefix)
    if more is not None:
        tensors[f"{prefix}base_model.model.m.q.{more}"] = np.ones(6, np.float32)
    result = filtered(tmp_path, tensors, filters, way)
    assert result.exit_code == 2, result.stderr
    assert "of the LoRA adapter, and keep their modules" in result.stderr
    assert (more or "default.weight") in result.stderr
    assert not (tmp_path / "out").exists()


def test_whole_modules_may_be_left_out(tmp_path: Path) -> None:
    tensors = adapted()
    result = filtered(tmp_path, tensors, ["-x", "*.m.k.*", "-x", "*score*"])
    assert result.exit_code == 0, result.stderr
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == {"m.q.weight", "norm.weight"}
    np.testing.assert_allclose(out["m.q.weight"], merged(tensors, "m.q", 1.0), rtol=1e-6)


@pytest.mark.parametrize("filters", [["-x", "*.second.*"], ["-x", "*.second.*", "-x", "*norm*"]])
def test_another_adapter_may_be_left_out_whatever_it_is(tmp_path: Path, filters: list[str]) -> None:
    tensors = adapted()
    for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
        tensors[f"base_model.model.m.q.{part}.second.weight"] = np.ones((2, 2), np.float32)
    result = filtered(tmp_path, tensors, filters)
    assert result.exit_code == 0, result.stderr
    out = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_allclose(out["m.q.weight"], merged(tensors, "m.q", 1.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("base_model.model.m.q.lora_magnitude_vector.default.weight", 2),
        ("base_model.model.m.q.lora_B.default.bias", 2),
        ("base_model.model.m.q.anything.default", 2),
        ("base_model.xlora_classifier.weight", 2),
        ("average.m.q.weight", 0),
    ],
)
def test_exclude_is_a_hint_only_where_it_helps(tmp_path: Path, name: str, code: int) -> None:
    tensors = adapted() | {name: np.ones(6, np.float32)}
    result = filtered(tmp_path, tensors, [])
    assert result.exit_code == 3
    assert ("--exclude" in result.stderr) == (code == 0)
    words = ("--merge-lora", "--lora-alpha", 2, "-x", name)
    again = run("export", tmp_path / "in", "-o", tmp_path / "out", *words)
    assert again.exit_code == code, again.stderr


def test_lora_over_packed_codes_is_not_merged_whatever_type_holds_them(tmp_path: Path) -> None:
    tensors = layer("m.q", 2)
    tensors[PEFT_NAME + "base_layer.weight.quant_map"] = np.ones(16, np.float32)
    folder = source(tmp_path / "in", tensors)
    result = run("export", folder, "-o", tmp_path / "out", "--merge-lora", "--lora-alpha", 1)
    assert result.exit_code == 3
    assert "m.q.weight is bitsandbytes 4-bit" in result.stderr


# ----------------------------------------------------------------------------------- square weights


def square(prefix: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    sizes = {"base_layer": (4, 4), "lora_A.default": (2, 4), "lora_B.default": (4, 2)}
    return {
        f"base_model.model.{prefix}.{part}.weight": rng.random(size, np.float32)
        for part, size in sizes.items()
    }


def way_of(out: Path, tensors: dict[str, np.ndarray], module: str) -> str:
    """How the delta of a module was added."""
    names = (f"base_model.model.{module}.{part}" for part in ("base_layer", "lora_A.default"))
    base, a = (tensors[f"{name}.weight"] for name in names)
    delta = tensors[f"base_model.model.{module}.lora_B.default.weight"] @ a
    found = load_file(out / "model.safetensors")[f"{module}.weight"]
    same = [
        way for way, d in (("linear", delta), ("conv1d", delta.T)) if np.allclose(found, base + d)
    ]
    return same[0]


CONV1D = {
    "base_model.model.h.0.c_fc.weight": np.ones((4, 8)),
    "base_model.model.h.0.c_fc.bias": np.ones(8),
}
LINEAR = {
    "base_model.model.h.0.fc.weight": np.ones((8, 4)),
    "base_model.model.h.0.fc.bias": np.ones(8),
}


@pytest.mark.parametrize(
    ("module", "more", "words", "way"),
    [
        ("m.odd", {}, (), None),
        ("m.c_proj", {}, (), None),
        ("m.c_proj", LINEAR, (), None),
        ("m.c_proj", CONV1D, (), "conv1d"),
        ("m.odd", LINEAR, (), "linear"),
        ("m.q_proj", {}, (), "linear"),
        ("m.q_proj", CONV1D, (), "linear"),
        ("m.odd", {}, ("--lora-fan-in-fan-out", "yes"), "conv1d"),
        ("m.odd", {}, ("--lora-fan-in-fan-out", "no"), "linear"),
        ("m.c_proj", CONV1D, ("--lora-fan-in-fan-out", "no"), "linear"),
        ("m.odd", {}, (True,), "conv1d"),
        ("m.c_proj", {}, (False,), "linear"),
        ("m.c_proj", CONV1D, (True,), "conv1d"),
        ("m.c_proj", CONV1D, (False,), None),
    ],
)
def test_what_the_shape_cannot_tell_is_known_or_asked_for(
    tmp_path: Path,
    module: str,
    more: dict[str, np.ndarray],
    words: tuple[object, ...],
    way: str | None,
) -> None:
    tensors = square(module) | more
    folder = source(tmp_path / "in", tensors)
    config = tmp_path / "config.json"
    if words and isinstance(words[0], bool):
        config.write_text(json.dumps({"lora_alpha": 2, "fan_in_fan_out": words[0]}))
        words = ("--adapter-config", config)
    else:
        words = ("--lora-alpha", 2, *words)
    result = run("export", folder, "-o", tmp_path / "out", "--merge-lora", *words)
    if way is None:
        assert result.exit_code == 2
        assert "--lora-fan-in-fan-out" in result.stderr
        assert module in result.stderr
    else:
        assert result.exit_code == 0, result.stderr
        assert way_of(tmp_path / "out", tensors, module) == way


def test_a_checkpoint_without_lora_is_told_so(tmp_path: Path) -> None:
    folder = source(tmp_path / "in", {"m.w": np.ones(1, np.float32)})
    result = run("export", folder, "-o", tmp_path / "out", "--adapter", "--lora-alpha", 1)
    assert result.exit_code == 1
    assert "no LoRA weights" in result.stderr


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"lora_alpha": "8"}', '{"lora_alpha": true}']
)
def test_a_configuration_without_alpha_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    words = ("--adapter", "--adapter-config", tmp_path / "config.json")
    assert run("export", PEFT, "-o", tmp_path / "out", *words).exit_code == 2


def test_an_unfinished_merge_with_another_alpha_is_another_order() -> None:
    one, same, other = (
        option_texts(ExportOptions(steps=(MergeTransform(LoraConfig(alpha)),)))
        for alpha in (8, 8, 16)
    )
    assert one == same
    assert one != other


# -------------------------------------------------------------------------------- PEFT as the judge


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.usefixtures("quiet")
def test_peft_loads_the_adapter_and_the_merge_with_its_logits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    import torch
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        architectures=["LlamaForCausalLM"],
    )
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    told = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        target_modules=["q_proj", "down_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(base, told)
    tokens = torch.arange(20).reshape(2, 10)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "ckpt", **ALONE)

    words = ("export", tmp_path / "ckpt", "--lora-alpha", 6)
    ran(*words, "-o", tmp_path / "adapter", "--adapter")
    assets = ("--hf-assets", tmp_path / "base")
    ran(*words, "-o", tmp_path / "merged", "--merge-lora", *assets)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, wanted)
        torch.testing.assert_close(alone(input_ids=tokens).logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "targets", [["c_attn"], ["attn.c_proj"], ["c_proj"], ["c_attn", "c_proj", "c_fc", "lm_head"]]
)
@pytest.mark.parametrize("says", ["alpha", "config"])
def test_a_gpt2_is_merged_as_peft_merges_it(tmp_path: Path, targets: list[str], says: str) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    import torch
    from safetensors.torch import load_file as load_torch

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    told = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(transformers.GPT2LMHeadModel(config), told)
    torch.save(model.state_dict(), tmp_path / "ckpt.pt")
    model.save_pretrained(tmp_path / "adapter")
    words: tuple[object, ...] = ("--lora-alpha", 6)
    if says == "config" and "lm_head" not in targets:
        words = ("--adapter-config", tmp_path / "adapter" / "adapter_config.json")
    ran("export", tmp_path / "ckpt.pt", "-o", tmp_path / "out", "--merge-lora", *words)
    wanted = model.merge_and_unload().state_dict()
    found = load_torch(tmp_path / "out" / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-6, atol=1e-6)
