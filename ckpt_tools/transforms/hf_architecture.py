"""Which tensors a model needs: by its config, by transformers, or by its weights' headers.

The config's numbers alone say it for Llama and its like. Importing transformers may take half a
minute; it builds the model on the meta device, so that nothing is allocated and nothing is
downloaded. No code of the asset folder is run.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools import formats
from ckpt_tools.copying.parallel import ignore_note
from ckpt_tools.errors import CheckpointError
from ckpt_tools.storage.paths import open_file

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_USUAL_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
Shapes = Mapping[str, tuple[int, ...] | None]


class _Decoder(NamedTuple):
    """What differs between dense decoders: biases of q, k and v, of o, of the MLP, and norms of q
    and k. A text is the config's key of a bias.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    has_qk_norm: bool = False


_DECODERS = {
    "LlamaForCausalLM": _Decoder("attention_bias", "attention_bias", "mlp_bias"),
    "MistralForCausalLM": _Decoder(),
    "Qwen2ForCausalLM": _Decoder(qkv_bias=True),
    "Qwen3ForCausalLM": _Decoder("attention_bias", "attention_bias", has_qk_norm=True),
}


class _Needed(NamedTuple):
    """What a model needs: ``choices`` are sets of names with shapes (None: not known).

    Any one of them will do: a loader may take experts one by one or all in one tensor. ``ties``
    give the tensor that a name is a copy of.
    """

    choices: tuple[Shapes, ...]
    ties: Mapping[str, str]
    according_to: str


def needed_by(
    folder: str, config: Mapping[str, object], *, on_note: Callable[[str], None] = ignore_note
) -> _Needed | None:
    """What the model of this config needs, or None when nothing here can say it.

    ``on_note`` is called before what takes long.
    """
    known = by_numbers(config)
    if known is None and find_spec("transformers") is not None and find_spec("torch") is not None:
        on_note("Asking transformers what the model needs; importing it may take half a minute ...")
        known = by_transformers(folder, config)
    return known or _by_headers(folder, config)


def by_numbers(config: Mapping[str, object]) -> _Needed | None:
    """What the numbers of a config say; None for an unknown architecture, or if one is left out."""
    name = _architecture(config)
    decoder = _DECODERS.get(name or "")
    sizes = [config.get(key) for key in _SIZES]
    vocabulary, hidden, inner, layers, heads, kv_heads = (
        size if isinstance(size, int) else 0 for size in sizes
    )
    if decoder is None or "auto_map" in config or 0 in (vocabulary, hidden, inner, heads, kv_heads):
        return None
    head = config.get("head_dim")
    if not isinstance(head, int):
        if decoder.has_qk_norm:  # whose heads are of 128 then, whatever else the config says
            return None
        head = hidden // heads
    linear = {
        "self_attn.q_proj": (heads * head, hidden, decoder.qkv_bias),
        "self_attn.k_proj": (kv_heads * head, hidden, decoder.qkv_bias),
        "self_attn.v_proj": (kv_heads * head, hidden, decoder.qkv_bias),
        "self_attn.o_proj": (hidden, heads * head, decoder.o_bias),
        "mlp.gate_proj": (inner, hidden, decoder.mlp_bias),
        "mlp.up_proj": (inner, hidden, decoder.mlp_bias),
        "mlp.down_proj": (hidden, inner, decoder.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for key, (rows, columns, bias) in linear.items():
        layer[f"{key}.weight"] = (rows, columns)
        if bias is True or (bias and config.get(bias) is True):
            layer[f"{key}.bias"] = (rows,)
    if decoder.has_qk_norm:
        layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        **{f"model.layers.{n}.{key}": shape for n in range(layers) for key, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    return _Needed((shapes,), usual_ties(config), f"the config of a {name}")


def _architecture(config: Mapping[str, object]) -> str | None:
    """The class that a config names first."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return first if isinstance(first, str) else None


def usual_ties(config: Mapping[str, object]) -> dict[str, str]:
    """The tie of the output layer to the embedding, where the config says that there is one."""
    return dict(_USUAL_TIES) if config.get("tie_word_embeddings") is True else {}


def by_transformers(folder: str, config: Mapping[str, object]) -> _Needed | None:
    """What transformers says, or None where it cannot build the model."""
    # What it raises depends on its version: for a model type that it does not know, a config that
    # lacks something, or an environment in which it does not work. Then the headers are asked.
    try:
        transformers = import_module("transformers")
        model = _model_on_meta(transformers, folder, config)
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError):
        return None
    state = model.state_dict()
    choices = [_shapes(state)]
    # Models that are held otherwise in memory have other names on the model hub.
    if find_spec("transformers.core_model_loading") is not None:
        loading = import_module("transformers.core_model_loading")
        revert = getattr(loading, "revert_weight_conversion", None)
        on_hub = None if revert is None else revert(model, dict(state))
        if isinstance(on_hub, dict) and on_hub.keys() != state.keys():
            choices.append(_shapes(on_hub))
    ties = getattr(model, "all_tied_weights_keys", None)
    according_to = f"{type(model).__name__} of transformers {transformers.__version__}"
    return _Needed(
        tuple(choices), dict(ties) if isinstance(ties, dict) else usual_ties(config), according_to
    )


def _model_on_meta(
    transformers: ModuleType, folder: str, config: Mapping[str, object]
) -> torch.nn.Module:
    import torch

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            read = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            build = transformers.AutoModelForCausalLM.from_config
            model = getattr(transformers, _architecture(config) or "", build)(read)
    finally:
        transformers.logging.set_verbosity(verbosity)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"transformers made a {type(model).__name__}")
    return model


def _shapes(state: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _by_headers(folder: str, config: Mapping[str, object]) -> _Needed | None:
    """What the folder's own weights are, or at least what its index says that they are."""
    ties = usual_ties(config)
    safetensors = formats.named("safetensors")
    try:
        if safetensors.matches(folder):
            index = safetensors.read_index(folder)
            shapes: Shapes = {entry.fqn: entry.shape for entry in index.tensors}
            if shapes and not index.problems:
                return _Needed((shapes,), ties, f"the headers in {folder}")
    except CheckpointError:
        pass  # an index whose shards are left out is no checkpoint, and its names will do
    try:
        with open(open_file(os.path.join(folder, _INDEX)), encoding="utf-8") as file:
            read = json.load(file)
    except (OSError, ValueError):
        return None
    names = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(names, dict) or not names:
        return None
    return _Needed((dict.fromkeys(names),), ties, f"{_INDEX} in {folder}")
