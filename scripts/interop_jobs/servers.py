"""Exports of tiny random models, loaded by what serves them: `servers.py FOLDER`, on the CPU.

Each model is saved as a DCP directory, exported with --hf-assets, and loaded; its logits are
compared with those of the model itself. What is not installed is skipped. Prints a Markdown table.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch import Tensor

SMALL: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
# The config's class, what is added to it, the map that gives the hub's names.
MODELS: dict[str, tuple[str, dict[str, object], str]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": False}, ""),
    "Llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}, ""),
    "Qwen 3": ("Qwen3Config", {"head_dim": 16}, ""),
    "Qwen 3 MoE": ("Qwen3MoeConfig", _MOE, "moe-qwen3-to-hf"),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}, "moe-mixtral-to-hf"),
}
ARCHITECTURES = {"llama": "LLAMA", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "mixtral": "LLAMA"}
TOKENS = torch.arange(1, 25).reshape(2, 12) * 5 % 128
BOUND = 2e-5  # of a logit: other kernels


class Export:
    """One exported folder, and the model that it must be equal to."""

    def __init__(self, kind: str, folder: str) -> None:
        name, more, told = MODELS[kind]
        torch.manual_seed(0)
        config = getattr(transformers, name)(**SMALL, **more)
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        config.architectures = [type(self.model).__name__]
        self.kind, self.out = kind, os.path.join(folder, kind.replace(" ", "-"))
        config.save_pretrained(f"{self.out}-assets")
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=f"{self.out}-dcp", no_dist=True)
        words = ["--hf-assets", f"{self.out}-assets", *(["--map", told] if told else [])]
        tool("export", f"{self.out}-dcp", "-o", self.out, *words)

    def logits(self) -> Tensor:
        return logits_of(self.model)


def tool(*words: str) -> None:
    """Run the command line. Raises RuntimeError with what it says when it refuses."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    python = os.environ.get("CKPT_TOOLS_PYTHON", sys.executable)
    done = subprocess.run(  # noqa: S603
        [python, "-m", "ckpt_tools", *words],
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.float()


def by_transformers(one: Export) -> str:
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        one.out, output_loading_info=True
    )
    lost = [*told["missing_keys"], *told["unexpected_keys"], *told["mismatched_keys"]]
    if lost:
        return f"DIFFERS: {lost[:3]}"
    return equal(logits_of(loaded.eval()), one.logits())


def by_gguf(one: Export) -> str:
    """llama.cpp's own table of names: each tensor that its converter would be given has a place."""
    import gguf
    from safetensors import safe_open

    kind = getattr(gguf.MODEL_ARCH, ARCHITECTURES[one.model.config.model_type])
    table = gguf.get_tensor_name_map(kind, one.model.config.num_hidden_layers)
    files = [name for name in os.listdir(one.out) if name.endswith(".safetensors")]
    names: list[str] = []
    for name in files:
        with safe_open(os.path.join(one.out, name), "pt") as file:
            names += list(file.keys())
    # Its converter stacks experts before it asks: what is asked for is one name for all of them.
    stacked = {name.replace(".experts.0.", ".experts.") for name in names}
    stacked = {name for name in stacked if not any(f".experts.{n}." in name for n in range(1, 4))}
    lost = [name for name in stacked if table.get_name(name, (".weight", ".bias")) is None]
    return f"DIFFERS: no place for {lost[:3]}" if lost else f"{len(stacked)} names have a place"


def by_ctranslate2(one: Export) -> str:
    """Its converter, and the next tokens that its own kernels choose."""
    import ctranslate2

    words = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), **_MARKS)
    words.save_pretrained(one.out)
    place = f"{one.out}-ct2"
    ctranslate2.converters.TransformersConverter(one.out).convert(place, force=True)
    generator = ctranslate2.Generator(place, device="cpu")
    found = generator.forward_batch(TOKENS.tolist(), return_log_probs=True)
    return equal(torch.from_numpy(_array(found)), one.logits().log_softmax(-1))


_MARKS = {"unk_token": "0", "bos_token": "1", "eos_token": "2", "pad_token": "0"}


def _array(view: object) -> object:
    import numpy as np

    return np.array(view)


def _tokenizer() -> object:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({str(n): n for n in range(128)}, unk_token="0"))  # noqa: S106


def by_vllm(one: Export) -> str:
    """The greedy tokens of vLLM and of the model."""
    import vllm

    server = vllm.LLM(one.out, skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    asked = [{"prompt_token_ids": row} for row in TOKENS.tolist()]
    found = [list(done.outputs[0].token_ids) for done in server.generate(asked, sampling)]
    wanted = one.model.generate(TOKENS, do_sample=False, max_new_tokens=8)[:, 12:].tolist()
    return "the same greedy tokens" if found == wanted else f"DIFFERS: {found}, not {wanted}"


def equal(found: Tensor, wanted: Tensor) -> str:
    apart = float((found - wanted).abs().max())
    if apart == 0:
        return "bit-equal logits"
    return f"logits equal to {apart:.0e}" if apart <= BOUND else f"DIFFERS by {apart:.1e}"


def adapter(folder: str) -> str:
    """A LoRA adapter out of a checkpoint of base and adapter, loaded onto the base by PEFT."""
    import peft

    base = Export("Llama", os.path.join(folder, "lora"))
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    trained = peft.get_peft_model(base.model, config).eval()
    for name, value in trained.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    dcp.save({"model": trained.state_dict()}, checkpoint_id=f"{base.out}-lora-dcp", no_dist=True)
    words = ("--adapter", "--lora-alpha", "8")
    tool("export", f"{base.out}-lora-dcp", "-o", f"{base.out}-adapter", *words)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base.out)
    loaded = peft.PeftModel.from_pretrained(plain, f"{base.out}-adapter").eval()
    return equal(logits_of(loaded), logits_of(trained))


def fp8(folder: str) -> str:
    """A model with fp8 weights and their scales: its config keeps saying how, and transformers
    decodes it.
    """
    one = Export("Llama", os.path.join(folder, "fp8"))
    state: dict[str, Tensor] = {}
    for name, value in one.model.state_dict().items():
        state[name] = value
        if "_proj" in name:
            scale = value.abs().max() / 448
            state[name] = (value / scale).to(torch.float8_e4m3fn)
            state[name.replace(".weight", ".weight_scale_inv")] = scale.reshape(1, 1)
            with torch.no_grad():
                value.copy_(state[name].float() * scale)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = f"{one.out}-assets/config.json"
    with open(path) as file:
        config = json.load(file) | {"quantization_config": quantization}
    with open(path, "w") as file:
        json.dump(config, file)
    dcp.save({"model": state}, checkpoint_id=f"{one.out}-fp8-dcp", no_dist=True)
    out = f"{one.out}-fp8"
    tool("export", f"{one.out}-fp8-dcp", "-o", out, "--hf-assets", f"{one.out}-assets")
    decode = transformers.FineGrainedFP8Config(weight_block_size=(128, 128), dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        out, quantization_config=decode, dtype=torch.float32
    )
    return equal(logits_of(loaded.eval()), one.logits())


LOADERS: dict[str, tuple[str, Callable[[Export], str]]] = {
    "transformers": ("transformers", by_transformers),
    "llama.cpp's names": ("gguf", by_gguf),
    "CTranslate2": ("ctranslate2", by_ctranslate2),
    "vLLM": ("vllm", by_vllm),
}


def main() -> int:
    folder = os.path.abspath(sys.argv[1])
    os.makedirs(folder, exist_ok=True)
    print("| model | loaded by | result |\n| --- | --- | --- |", flush=True)
    results = []
    for kind in MODELS:
        one = Export(kind, folder)
        for name, (package, load) in LOADERS.items():
            results.append(_row(kind, name, package, lambda: load(one)))  # noqa: B023
    results.append(_row("LoRA adapter", "PEFT", "peft", lambda: adapter(folder)))
    results.append(_row("Llama, fp8", "transformers", "transformers", lambda: fp8(folder)))
    return int(any(told.startswith(("DIFFERS", "FAILED")) for told in results))


def _row(model: str, loader: str, package: str, do: Callable[[], str]) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        told, version = f"skipped: no {package}", ""
    else:
        try:
            told = do()
        except Exception as error:  # noqa: BLE001  (a row's failure is an answer)
            absent = "No conversion is registered" in str(error)
            told = (
                "skipped: it has no such model"
                if absent
                else f"FAILED: {type(error).__name__}: {error}".splitlines()[0][:300]
            )
    print(f"| {model} | {loader} {version} | {told} |", flush=True)
    return told


if __name__ == "__main__":
    sys.exit(main())
