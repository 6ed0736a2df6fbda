"""Models of transformers and TorchTitan, trained a step, exported, loaded: the same logits."""

import json
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alone import ALONE
from click.testing import Result
from reader_contract import DATA
from running import run
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5")

REAL = DATA / "checkpoints"
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3MoeConfig", {"head_dim": 16, "num_experts": 4, **EXPERTS}),
}
TOKENS = torch.arange(24).reshape(2, 12) % 61


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What other packages warn of is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def ran(*words: object) -> Result:
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    return result


def trained(kind: str) -> nn.Module:
    name, more = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**SMALL, **more)
    model = transformers.AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    return model.eval()


def save_assets(model: nn.Module, folder: Path) -> Path:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return folder


def save_dcp(model: nn.Module, folder: Path) -> Path:
    dcp.save({"app": {"model": model.state_dict()}}, checkpoint_id=folder, **ALONE)
    return folder


def logits(model: nn.Module, vocab: int = 61) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS % vocab).logits


def loaded(folder: Path) -> nn.Module:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def check_strictly(folder: Path) -> set[str]:
    """What a strict loader wants of a folder; gives the names in it."""
    found: dict[str, str] = {}
    nbytes = 0
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"
            for name in file.keys():  # noqa: SIM118 (no mapping)
                assert name not in found
                found[name] = path.name
                nbytes += file.get_tensor(name).nbytes
    index = folder / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if index.exists():
        read = json.loads(index.read_text())
        assert read["weight_map"] == found
        assert read["metadata"]["total_size"] == nbytes
    return set(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_trained_model_loads_with_the_same_logits(tmp_path: Path, kind: str) -> None:
    model = trained(kind)
    out = tmp_path / "out"
    assets = save_assets(model, tmp_path / "assets")
    source = save_dcp(model, tmp_path / "ckpt")
    words = ("export", source, "-o", out, "--hf-assets", assets, "--max-shard-size", "40KB")
    told = ran(*words).stderr
    names = check_strictly(out)
    assert "Names and shapes are what the model needs, according to" in told
    tied = bool(MODELS[kind][1].get("tie_word_embeddings"))
    assert ("lm_head.weight" in names) == (not tied)
    assert torch.equal(logits(loaded(out)), logits(model))


@pytest.mark.parametrize("more", [(), ("--dtype", "bf16"), ("--dtype-for", "*=bf16")])
def test_transformers_loads_the_type_that_was_written(tmp_path: Path, more: tuple[str]) -> None:
    model = trained("llama")
    model.config.dtype = "float16"
    words = ("export", save_dcp(model, tmp_path / "ckpt"), "-o", tmp_path / "out", *more)
    ran(*words, "--hf-assets", save_assets(model, tmp_path / "assets"))
    assert loaded(tmp_path / "out").dtype == (torch.bfloat16 if more else torch.float32)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_experts_go_out_one_by_one_as_the_hub_has_them(tmp_path: Path, kind: str) -> None:
    model = trained(kind)
    out, theirs = tmp_path / "out", tmp_path / "theirs"
    assets = save_assets(model, tmp_path / "assets")
    source = save_dcp(model, tmp_path / "ckpt")
    name = {"mixtral": "moe-mixtral-to-hf", "qwen3-moe": "moe-qwen3-to-hf"}[kind]
    ran("export", source, "-o", out, "--hf-assets", assets, "--map", name)
    model.save_pretrained(theirs)
    assert check_strictly(out) == check_strictly(theirs)
    assert torch.equal(logits(loaded(out)), logits(model))
    there, _, back = name.partition("-to-")
    assert comes_back(model, tmp_path, f"{back}-to-{there}")


def test_a_model_that_lacks_a_layer_is_refused_with_its_names(tmp_path: Path) -> None:
    model = trained("llama")
    assets = save_assets(model, tmp_path / "assets")
    source = save_dcp(model, tmp_path / "ckpt")
    words = ("export", source, "-o", tmp_path / "out", "--hf-assets", assets)
    result = run(*words, "-x", "*layers.1.mlp*")
    assert result.exit_code == 1
    assert "3 missing: model.layers.1.mlp.down_proj.weight" in result.stderr
    assert not list(tmp_path.glob("out*"))


REAL_JOBS = {
    "accelerate_fsdp2_sharded_llama_tied_4r": ("ckpt/state/pytorch_model_fsdp_0", "ckpt"),
    "accelerate_fsdp2_sharded_qwen2_untied_4r": ("ckpt/state/pytorch_model_fsdp_0", "ckpt"),
    "verl_fsdp2_4r": ("ckpt", "ckpt/global_step_1/actor/huggingface"),
}


@pytest.mark.parametrize("job", REAL_JOBS)
def test_what_four_ranks_trained_under_fsdp2_loads_with_its_logits(
    tmp_path: Path, job: str
) -> None:
    place = REAL / job
    source, assets = (place / folder for folder in REAL_JOBS[job])
    words = ("export", source, "-o", tmp_path / "out", "--hf-assets", assets)
    ran(*words, "--max-shard-size", "2KB")
    check_strictly(tmp_path / "out")
    truth = {
        name.removeprefix("model."): value
        for name, value in load_file(place / "truth.safetensors").items()
        if name.startswith("model.")
    }
    config = transformers.AutoConfig.from_pretrained(assets)
    dtype = truth["model.embed_tokens.weight"].dtype  # the model's `to` would cast buffers, too
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(truth, strict=True)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert torch.equal(logits(found.eval(), 37), logits(model.eval(), 37))


# ------------------------------------------------------------------------------------- TorchTitan


class _Absent(ModuleType):
    """A package of GPU kernels that is imported at the top of others and not called on a CPU."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


KERNELS = "torchtitan.distributed.minimal_async_ep"


def titan(model: str) -> ModuleType:
    """TorchTitan's package of a model; its kernels need Triton, which is absent without a GPU."""
    pytest.importorskip("torchtitan")
    if find_spec("triton") is None:
        for name in (KERNELS, f"{KERNELS}.api", f"{KERNELS}.kernels"):
            stand_in = sys.modules.setdefault(name, _Absent(name))
            stand_in.__path__ = []
    return pytest.importorskip(f"torchtitan.models.{model}", exc_type=ImportError)


def llama3(**sizes: int) -> nn.Module:
    """A TorchTitan Llama 3 with random weights, on attention that runs on a CPU."""
    package = titan("llama3")
    rope = package.ComplexRoPE.Config(dim=8, max_seq_len=64, theta=10000.0)
    layers = package._build_llama3_layers(rope=rope, attn_backend="flex", **sizes)
    norm = package.RMSNorm.Config(normalized_shape=32, param_init=package._NORM_INIT)
    return built(package, package.Llama3Model, layers, norm)


def qwen3(**sizes: int) -> nn.Module:
    package = titan("qwen3")
    rope = package.CosSinRoPE.Config(dim=16, max_seq_len=64, theta=10000.0)
    build = package._build_qwen3_layers
    if "num_experts" in sizes:
        build = partial(package._build_qwen3_moe_layers, moe_comm_backend="standard")
    layers = build(rope=rope, attn_backend="flex", head_dim=16, **sizes)
    return built(package, package.Qwen3Model, layers, package._qwen3_norm(32))


def built(package: ModuleType, model: type, layers: list[object], norm: object) -> nn.Module:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    init = {"weight": partial(nn.init.normal_, std=0.5)}
    config = model.Config(
        dim=32,
        vocab_size=61,
        norm=norm,
        tok_embeddings=package.Embedding.Config(
            num_embeddings=61, embedding_dim=32, param_init=init
        ),
        lm_head=package.Linear.Config(in_features=32, out_features=61, param_init=init),
        layers=layers,
    )
    torch.manual_seed(0)
    made = config.build()
    made.init_weights()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    made.config_of_titan = config
    return made.eval()


DENSE = {"n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48}
HF_SMALL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def same_config(kind: str, model: nn.Module, **more: object) -> nn.Module:
    eps = model.norm.eps
    name = {"llama3": "LlamaConfig", "qwen3": "Qwen3Config", "moe": "Qwen3MoeConfig"}[kind]
    config = getattr(transformers, name)(**SMALL, **HF_SMALL, rms_norm_eps=eps, **more)
    return transformers.AutoModelForCausalLM.from_config(config)


def comes_back(model: nn.Module, tmp_path: Path, name: str, *more: str) -> bool:
    """Whether the exported folder becomes the same checkpoint of shards again, bit for bit."""
    words = ("reshard", tmp_path / "out", "-o", tmp_path / "back", "--to-mesh", 4, "--map", name)
    ran(*words, *more)
    wanted = {key: value for key, value in model.state_dict().items() if "expert_bias" not in key}
    state = {key: torch.full_like(value, torch.nan) for key, value in wanted.items()}
    dcp.load(state, checkpoint_id=tmp_path / "back", **ALONE)
    return all(torch.equal(state[key], value) for key, value in wanted.items())


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_a_torchtitan_model_has_the_same_logits_in_transformers(tmp_path: Path, kind: str) -> None:
    model = llama3(**DENSE) if kind == "llama3" else qwen3(**DENSE)
    more = {} if kind == "llama3" else {"head_dim": 16, "tie_word_embeddings": False}
    assets = save_assets(same_config(kind, model, **more), tmp_path / "assets")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ckpt", **ALONE)
    words = ("export", tmp_path / "ckpt", "-o", tmp_path / "out", "--map", "auto")
    told = ran(*words, "--hf-assets", assets).stderr
    assert f"chose torchtitan-{kind}-to-hf" in told
    with torch.no_grad():
        wanted = model(TOKENS)
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), wanted, rtol=1e-4, atol=1e-4)
    assert comes_back(model, tmp_path, f"hf-to-torchtitan-{kind}")


def test_a_tied_torchtitan_model_gets_its_head_back(tmp_path: Path) -> None:
    model = qwen3(**DENSE)
    model.lm_head.weight = model.tok_embeddings.weight
    more = {"head_dim": 16, "tie_word_embeddings": True}
    assets = save_assets(same_config("qwen3", model, **more), tmp_path / "assets")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ckpt", **ALONE)
    words = ("export", tmp_path / "ckpt", "-o", tmp_path / "out", "--map", "auto")
    ran(*words, "--hf-assets", assets)
    assert "lm_head.weight" not in check_strictly(tmp_path / "out")
    with torch.no_grad():
        wanted = model(TOKENS)
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), wanted, rtol=1e-4, atol=1e-4)
    assert comes_back(model, tmp_path, "hf-to-torchtitan-qwen3", "--untie")


def test_torchtitans_experts_go_out_as_torchtitan_itself_writes_them(tmp_path: Path) -> None:
    sizes = {key: size for key, size in DENSE.items() if key != "hidden_dim"}
    model = qwen3(**sizes, moe_hidden_dim=24, num_experts=4, top_k=2)
    more = {"head_dim": 16, "num_experts": 4, "tie_word_embeddings": False, **EXPERTS}
    more |= {"norm_topk_prob": True}
    hub = same_config("moe", model, **more)
    assets = save_assets(hub, tmp_path / "assets")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "ckpt", **ALONE)
    words = ("export", tmp_path / "ckpt", "-o", tmp_path / "out", "--map", "torchtitan-qwen3-to-hf")
    skipped = ("-x", "*expert_bias*", "-x", "*tokens_per_expert*")
    ran(*words, "--hf-assets", assets, *skipped)
    adapter = titan("qwen3").Qwen3StateDictAdapter(model.config_of_titan, None)
    theirs = adapter.to_hf(model.state_dict())
    found = tensors_of(tmp_path / "out")
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)
    with torch.no_grad():
        wanted = model(TOKENS)  # TorchTitan multiplies by its experts in bfloat16
    torch.testing.assert_close(logits(loaded(tmp_path / "out")), wanted, rtol=2e-2, atol=5e-2)
    assert comes_back(model, tmp_path, "hf-to-torchtitan-qwen3")


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found
