import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from reader_contract import DATA
from safetensors.numpy import load_file, save_file

from ckpt_tools.cli import cli
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.copying.lock import in_words
from ckpt_tools.transforms.lora import LoraConfig, MergeStep

REAL = DATA / "checkpoints"
PEFT = REAL / "peft_fsdp2_dcp_4r" / "ckpt"
PEFT_ADAPTER = REAL / "peft_fsdp2_adapter_4r" / "ckpt" / "adapter"
VERL = REAL / "verl_lora_4r"
VERL_META = VERL / "ckpt" / "global_step_1" / "actor" / "lora_train_meta.json"
VERL_MERGE = VERL / "peer_verl_merge"


def run(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)])


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
    ran("export", folder, "-o", tmp_path / "out", "--adapter", "--lora-alpha", 4)
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
        ({"base_model.model.m.q.lora_magnitude_vector.default.weight": (6,)}, 3, "no plain LoRA"),
        ({"base_model.model.m.q.lora_B.default.bias": (6,)}, 3, "no plain LoRA"),
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
        in_words(ExportOptions(steps=(MergeStep(LoraConfig(alpha)),))) for alpha in (8, 8, 16)
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
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "ckpt", no_dist=True)

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
