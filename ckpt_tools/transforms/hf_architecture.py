"""Which tensors a model needs: asked of transformers, or read from a safetensors folder's headers.

transformers builds the model on the meta device, so that nothing is allocated and nothing is
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
from ckpt_tools.errors import CheckpointError
from ckpt_tools.storage.paths import open_file

if TYPE_CHECKING:
    import torch

_INDEX = "model.safetensors.index.json"
_USUAL_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
Shapes = Mapping[str, tuple[int, ...] | None]
_Build = Callable[[object], object]


class Needed(NamedTuple):
    """What a model needs: ``choices`` are sets of names with shapes (None: not known).

    Any one of them will do: a loader may take experts one by one or all in one tensor. ``ties``
    give the tensor that a name is a copy of.
    """

    choices: tuple[Shapes, ...]
    ties: Mapping[str, str]
    according_to: str


def needed_by(folder: str, config: Mapping[str, object]) -> Needed | None:
    """What the model of this config needs, or None when nothing here can say it."""
    return _by_transformers(folder, config) or _by_headers(folder, config)


def usual_ties(config: Mapping[str, object]) -> dict[str, str]:
    """The tie of the output layer to the embedding, where the config says that there is one."""
    return dict(_USUAL_TIES) if config.get("tie_word_embeddings") is True else {}


def _by_transformers(folder: str, config: Mapping[str, object]) -> Needed | None:
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    # What it raises depends on its version: for a model type that it does not know, a config that
    # lacks something, or an environment in which it does not work. Then the headers are asked.
    try:
        transformers = import_module("transformers")
        model = _model_on_meta(transformers, folder, config)
    except (AttributeError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError):
        return None
    state = model.state_dict()
    choices = [_shapes(state)]
    on_hub = _as_on_hub(model, state)
    if on_hub is not None:
        choices.append(_shapes(on_hub))
    ties = getattr(model, "all_tied_weights_keys", None)
    according_to = f"{type(model).__name__} of transformers {transformers.__version__}"
    return Needed(
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
            model = _class_of(transformers, config)(read)
    finally:
        transformers.logging.set_verbosity(verbosity)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"transformers made a {type(model).__name__}")
    return model


def _class_of(transformers: ModuleType, config: Mapping[str, object]) -> _Build:
    """What builds the model from its config: the architecture that it names, or a causal model."""
    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    build: _Build = transformers.AutoModelForCausalLM.from_config
    if isinstance(first, str) and hasattr(transformers, first):
        build = getattr(transformers, first)
    return build


def _as_on_hub(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.Tensor] | None:
    """The state under the names of the model hub, for models that are held otherwise in memory."""
    if find_spec("transformers.core_model_loading") is None:
        return None
    loading = import_module("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    if revert is None:
        return None
    reverted = revert(model, dict(state))
    return reverted if isinstance(reverted, dict) and reverted.keys() != state.keys() else None


def _shapes(state: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _by_headers(folder: str, config: Mapping[str, object]) -> Needed | None:
    """What the folder's own weights are, or at least what its index says that they are."""
    ties = usual_ties(config)
    safetensors = formats.named("safetensors")
    try:
        if safetensors.matches(folder):
            index = safetensors.read_index(folder)
            shapes: Shapes = {entry.fqn: entry.shape for entry in index.tensors}
            if shapes and not index.problems:
                return Needed((shapes,), ties, f"the headers in {folder}")
    except CheckpointError:
        pass  # an index whose shards are left out is no checkpoint, and its names will do
    names = _names_of_index(os.path.join(folder, _INDEX))
    return Needed((dict.fromkeys(names),), ties, f"{_INDEX} in {folder}") if names else None


def _names_of_index(path: str) -> list[str]:
    try:
        with open(open_file(path), encoding="utf-8") as file:
            read = json.load(file)
    except (OSError, ValueError):
        return []
    names = read.get("weight_map") if isinstance(read, dict) else None
    return list(names) if isinstance(names, dict) else []
