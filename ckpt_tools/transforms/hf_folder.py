"""A folder that Hugging Face's loaders take: what lies beside the weights, and which weights.

The asset folder (config, tokenizer, chat template; a downloaded base model will do) says which
model it is. `hf_architecture` says what that model needs; here it is compared with what there is,
and tied tensors are written once where their bytes prove that they are one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from ckpt_tools import formats
from ckpt_tools.copying.parallel import ignore_note
from ckpt_tools.copying.read import first_difference
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import AnswerNo, UsageError, reason_of
from ckpt_tools.formats.frameworks import HUB_FOLDER
from ckpt_tools.storage import paths
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms import hf_architecture, hf_config
from ckpt_tools.transforms.base import TransformedTensor, TransformResult, copied_file, small_file
from ckpt_tools.transforms.dtypes import DtypePolicy
from ckpt_tools.transforms.hf_architecture import Shapes
from ckpt_tools.transforms.hf_config import CONFIG

_ASSETS = (
    CONFIG,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "additional_chat_templates/*",
)
# The model's own code, which loaders run only with trust_remote_code=True.
_CODE = ("configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py")
_NEVER = ("*.safetensors*", "*.bin*", "*.pt", "*.pth", "*.gguf", "*.distcp")


def asset_config(folder: str) -> Mapping[str, object]:
    """The config of an asset folder. Raises UsageError for none, or one that cannot be read."""
    config = read_config(folder)
    if config is None:
        raise UsageError(
            f"{folder} has no {CONFIG}.",
            hint="--hf-assets takes the folder of a model on the hub, with or without its weights.",
        )
    return config


def files_read(folder: str) -> list[str]:
    """Paths of all files in a folder that may be taken, or say which tensors the model has."""
    wanted = (*_ASSETS, *_CODE)
    indexes = [name for name in _names_in(folder) if name.endswith(".index.json")]
    return [os.path.join(folder, name) for name in (*_files_in(folder, wanted), *indexes)]


def _files_in(folder: str, wanted: Sequence[str]) -> list[str]:
    """The files in a folder that match a glob of the same depth, but never weights."""
    return [
        name
        for name in _names_in(folder)
        if not any(fnmatch(name, glob) for glob in _NEVER)
        and any(fnmatch(name, glob) and name.count("/") == glob.count("/") for glob in wanted)
    ]


def _names_in(folder: str) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder)
        for parent, _, names in os.walk(folder)
        for name in names
    )


def read_config(folder: str) -> Mapping[str, object] | None:
    """The config.json of a folder, or None when it has none. Raises UsageError for a broken one."""
    path = os.path.join(folder, CONFIG)
    try:
        with open(paths.open_file(path), encoding="utf-8") as file:
            config = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {reason_of(error)}.") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no JSON object.")
    return config


def config_beside(path: str) -> Mapping[str, object]:
    """The config.json in a folder, or in that of a file; empty when there is none.

    verl keeps it in the folder ``huggingface`` beside the rank files. Raises UsageError for a
    broken one.
    """
    folder = os.path.dirname(path) or "." if os.path.isfile(path) else path
    return read_config(folder) or read_config(os.path.join(folder, HUB_FOLDER)) or {}


def assets_beside(path: str) -> str:
    """The asset folder that a framework left with a checkpoint, as ``--hf-assets auto`` means it.

    Raises UsageError when there is none.
    """
    folder = os.path.dirname(path) or "." if os.path.isfile(path) else path
    above = os.path.dirname(os.path.abspath(folder))
    places = [os.path.join(folder, HUB_FOLDER), folder, os.path.join(above, HUB_FOLDER), above]
    beside = next((one for one in places if os.path.isfile(os.path.join(one, CONFIG))), None)
    if beside is None:
        raise UsageError(
            f"--hf-assets auto finds no {CONFIG} with {path}.",
            hint=f"Looked in {', '.join(places)}. Give the folder of the model on the hub.",
        )
    return beside


def model_type_of(config: Mapping[str, object]) -> str | None:
    """The architecture that a config names (``llama``, ``qwen3``), or None."""
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, dict) else None
    model_type = config.get("model_type", inner)
    return model_type if isinstance(model_type, str) else None


def values_of(config: Mapping[str, object]) -> dict[str, int]:
    """The sizes that a config names, e.g. ``hidden_size``, in elements.

    ``head_dim`` and ``num_key_value_heads`` follow from others where a config leaves them out.
    """
    text = config.get("text_config")
    both = {**config, **text} if isinstance(text, dict) else config
    values = {
        key: value
        for key, value in both.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }
    heads, hidden = values.get("num_attention_heads", 0), values.get("hidden_size", 0)
    if heads and "num_key_value_heads" not in values:
        values["num_key_value_heads"] = heads
    if heads and hidden % heads == 0 and "head_dim" not in values:
        values["head_dim"] = hidden // heads
    return values


@dataclass(frozen=True, slots=True)
class AssetsTransform:
    """Puts the assets beside the weights, once these are what the config's model needs.

    ``config`` is that of the asset ``folder``, ``source`` the checkpoint of the weights.
    """

    folder: str
    config: Mapping[str, object] = field(repr=False)
    source: CheckpointIndex = field(repr=False)
    allow_mismatch: bool = False
    on_note: Callable[[str], None] = field(default=ignore_note, repr=False)

    def __call__(
        self, made: tuple[TransformedTensor, ...], files: Files, types: DtypePolicy
    ) -> TransformResult:
        """Compare names and shapes, write tied tensors once, add the files.

        Raises AnswerNo, with lists, when anything is missing, unexpected or misshapen, or quantized
        where the config is not.
        """
        needed = hf_architecture.needed_by(self.folder, self.config, on_note=self.on_note)
        if needed is None and not self.allow_mismatch:
            raise UsageError(
                f"Nothing says which tensors the model of {self.folder} needs.",
                hint="Install transformers, or put the model's safetensors index there; "
                "--allow-mismatch continues without.",
            )
        ties = dict(needed.ties) if needed else hf_architecture.usual_ties(self.config)
        left, notes = _untied(made, ties, self.source, files)
        weights = hf_config.weights_of(left, types)
        config, changes = hf_config.true_of(
            weights,
            self.config,
            of_source=config_beside(self.source.root),
            must_fit=not self.allow_mismatch,
        )
        if needed is not None:
            shapes: Shapes = {one.entry.fqn: one.entry.shape for one in left}
            if hf_config.is_quantized(config):
                shapes = weights.plain(shapes, set().union(*needed.choices))
            notes += self._compared(shapes, needed.choices, ties, needed.according_to)
        files_of = _files_in(self.folder, _ASSETS + (_CODE if "auto_map" in self.config else ()))
        plans = {name: copied_file(name, os.path.join(self.folder, name)) for name in files_of}
        if config != self.config:
            body = json.dumps(config, indent=2, ensure_ascii=False).encode() + b"\n"
            plans[CONFIG] = small_file(CONFIG, body)
        notes.append(f"Added {counted(len(plans), 'file')}: {', '.join(plans)}.")
        return TransformResult(left, (*notes, *changes), (*plans.values(),))

    def _compared(
        self, shapes: Shapes, choices: Sequence[Shapes], ties: Mapping[str, str], whose: str
    ) -> list[str]:
        """Notes on the comparison, a line for each kind of fault; ``whose`` choices they are.

        Raises AnswerNo.
        """
        best = min(choices, key=lambda choice: len(choice.keys() ^ shapes.keys()))
        both = ((name, shapes[name], best[name]) for name in sorted(best.keys() & shapes.keys()))
        kinds = {
            "missing": [
                n for n in sorted(best.keys() - shapes.keys()) if ties.get(n) not in shapes
            ],
            "unexpected": sorted(shapes.keys() - best.keys()),
            "misshapen": [
                f"{name} {list(shape)}, not {list(wanted)}"
                for name, shape, wanted in both
                if shape is not None and wanted is not None and shape != wanted
            ],
        }
        if not any(kinds.values()):
            return [f"Names and shapes are what the model needs, according to {whose}."]
        lines = [f"The tensors are not what {whose} needs:"]
        lines += [f"{len(of)} {kind}: {some(of, 20)}" for kind, of in kinds.items() if of]
        if not self.allow_mismatch:
            raise AnswerNo(
                *lines,
                hint="--map auto or --rename give other names, --exclude leaves tensors out; "
                "--allow-mismatch writes the folder anyway.",
            )
        return lines


def _untied(
    made: tuple[TransformedTensor, ...],
    ties: Mapping[str, str],
    index: CheckpointIndex,
    files: Files,
) -> tuple[tuple[TransformedTensor, ...], list[str]]:
    """The entries without those that are proven copies of the tensor that they are tied to."""
    entries = {one.entry.fqn: one.entry for one in made}
    notes: list[str] = []
    copies: set[str] = set()
    for name, source in sorted(ties.items()):
        if name not in entries or source not in entries:
            continue
        one, other = formats.located_in(index, (entries[name], entries[source]), files)
        if same_bytes(one, other, files):
            copies.add(name)
            notes.append(f"{name} is tied to {source}, and equal to the bit: written once.")
        else:
            notes.append(
                f"The config ties {name} to {source}, but their values differ: both are written, "
                "and a loader that ties them loses one."
            )
    return tuple(one for one in made if one.entry.fqn not in copies), notes


def same_bytes(one: TensorEntry, other: TensorEntry, files: Files) -> bool:
    """Whether two located tensors hold the same bytes in the same shape and type.

    Reads both, slab by slab, unless they are the same bytes of the same files.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if tuple(one.chunks) == tuple(other.chunks):
        return True
    return first_difference(one, other, Box.whole(one.shape), files=files) is None
