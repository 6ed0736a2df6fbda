"""Greedy tokens and their logprobs by vLLM: `vllm_greedy.py ASKED FOUND`, with VLLM_PYTHON.

ASKED is a JSON file with a list: the folder of a model, its dtype, prompts as token ids, how many
tokens to add, and perhaps an adapter. FOUND will have, for each of them, the tokens of each prompt,
and a logprob for each of them and, without an adapter, for each token of the prompt but the first;
or what went wrong.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process for all models
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

import vllm
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest


def greedy(
    *, model: str, dtype: str, prompts: list[list[int]], tokens: int, adapter: str
) -> list[object]:
    server = vllm.LLM(
        model,
        dtype=dtype,
        max_model_len=64,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_lora=bool(adapter),
        distributed_executor_backend="uni",
    )
    sampling = vllm.SamplingParams(
        temperature=0,
        max_tokens=tokens,
        detokenize=False,
        logprobs=0,
        prompt_logprobs=None if adapter else 0,  # 0.32 dies of both
    )
    done = server.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        sampling,
        lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
    )
    found = []
    for prompt, one in zip(prompts, done, strict=True):
        added = list(one.outputs[0].token_ids)
        every = [*(one.prompt_logprobs or [])[1:], *one.outputs[0].logprobs]
        chosen = zip([*prompt, *added][-len(every) :], every, strict=True)
        found.append({"tokens": added, "logprobs": [of[token].logprob for token, of in chosen]})
    return found


def main() -> None:
    with open(sys.argv[1]) as file:
        asked = json.load(file)
    answers: list[object] = []
    for one in asked:
        try:
            answers.append({"found": greedy(**one)})
        except Exception as error:  # noqa: BLE001  (it is the answer)
            answers.append({"error": f"{type(error).__name__}: {error}"})
        cleanup_dist_env_and_memory()
        with open(sys.argv[2], "w") as file:
            json.dump(answers, file)


if __name__ == "__main__":
    main()
