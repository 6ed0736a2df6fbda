"""config.json as it is written beside the weights: the type and the quantization that they have.

Loaders do what it says, whatever the tensors are: transformers casts to its dtype, and builds other
layers where it has a quantization_config. An example, of float32 weights under the config of an
FP8 model:

    torch_dtype: bfloat16, quantization_config: {quant_method: fp8}    in the asset folder
    torch_dtype: float32                                               beside the float32 weights
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpt_tools.core.dtypes import DType, parse_dtype
from ckpt_tools.core.text import some
from ckpt_tools.errors import AnswerNo
from ckpt_tools.transforms.base import TransformedTensor
from ckpt_tools.transforms.dtypes import DtypePolicy
from ckpt_tools.transforms.hf_architecture import Shapes

CONFIG = "config.json"
# Every version of transformers reads the first; 4.56 and later write the second.
_DTYPES = ("torch_dtype", "dtype")
# compressed-tensors had the second one at first.
_QUANTIZATIONS = ("quantization_config", "compression_config")

Config = Mapping[str, object]


class Weights(NamedTuple):
    """What config.json must be true of.

    ``types`` count the elements of floating tensors that belong to no quantized weight. ``packed``
    are quantized weights by name, with their families. ``scales`` are other tensors of quantizing
    libraries: a calibrated model has such, and one of which only the cache is quantized.
    """

    types: Mapping[DType, int]
    packed: Mapping[str, str]
    scales: Collection[str]

    def plain(self, shapes: Shapes, wanted: Collection[str]) -> Shapes:
        """The shapes by the names in the model that is not quantized; None for packed ones.

        What stands for ``l.weight`` is called so, ``l.qweight`` or ``l.weight_packed``.
        """
        shapes_of: dict[str, tuple[int, ...] | None] = {}
        for fqn, shape in shapes.items():
            if fqn in self.packed:
                usual = f"{fqn.rpartition('.')[0]}.weight".removeprefix(".")
                begins = (fqn[:end] for end in range(len(fqn), 0, -1))
                shapes_of[next((n for n in (*begins, usual) if n in wanted), fqn)] = None
            elif fqn in wanted or fqn not in self.scales:
                shapes_of[fqn] = shape
        return shapes_of


def weights_of(made: Sequence[TransformedTensor], types: DtypePolicy) -> Weights:
    """What these entries are when they are written in these types, by their new names."""
    (written, _), known = types.types_of(made), types.quantized
    sizes = Counter(member.weight for member in known.members.values())
    counts: Counter[DType] = Counter()
    packed: dict[str, str] = {}
    scales: list[str] = []
    for one in made:
        fqn, dtype = one.entry.fqn, written[one.entry.fqn]
        families = [known.members[name].family for name in one.origins if name in known.members]
        codes = [name for name in one.origins if known.is_packed(name)]
        # An 8-bit float without scales is a number like any other.
        if codes and (dtype.kind != "float" or sizes[codes[0]] > 1):
            packed[fqn] = families[0]
        elif families or not known.doubtful.keys().isdisjoint(one.origins):
            scales.append(fqn)
        elif dtype.kind == "float":
            counts[dtype] += one.entry.numel
    return Weights(counts, packed, scales)


def true_of(
    weights: Weights, config: Config, *, of_source: Config, must_fit: bool
) -> tuple[Config, list[str]]:
    """The config that is true of the weights, and what was changed in it, for a person.

    ``of_source`` is the config that lies with the checkpoint: it may say how the weights were
    quantized. Raises AnswerNo when nothing says it, and the config ``must_fit``.
    """
    corrected, notes = _with_quantization(weights, config, of_source, must_fit=must_fit)
    most = max(weights.types, key=lambda kind: weights.types[kind], default=None)
    if most is None:
        return corrected, notes

    def of_written(part: Config) -> dict[str, object]:
        """A part may keep another type that is written, too: that of a vision tower."""
        wrong = [key for key, dtype in _said(part).items() if dtype not in weights.types]
        return {**part, **dict.fromkeys(wrong, most.name)}

    wrong = [key for key in _DTYPES if key in config and _said(config).get(key) != most]
    absent = () if any(key in config for key in _DTYPES) else _DTYPES[:1]
    typed = {**_mapped(corrected, of_written), **dict.fromkeys((*wrong, *absent), most.name)}
    if typed != corrected:
        said = {dtype.name for part in _parts(corrected) for dtype in _said(part).values()}
        was = f"it said {' and '.join(sorted(said))}" if said else "it said none"
        notes.append(f"{CONFIG} says {most.name}, as the tensors are written; {was}.")
    return typed, notes


def is_quantized(config: Config) -> bool:
    """Whether a config says how its model is quantized."""
    return any(key in part for part in _parts(config) for key in _QUANTIZATIONS)


def _with_quantization(
    weights: Weights, config: Config, of_source: Config, *, must_fit: bool
) -> tuple[Config, list[str]]:
    """The config with a quantization where the weights have one, and elsewhere without."""
    has = is_quantized(config)
    if has and weights.scales and not weights.packed:
        what = f"no weight is quantized, but there is {some(sorted(weights.scales))}"
        return config, [f"{CONFIG} keeps its {_QUANTIZATIONS[0]}: {what}."]
    if has and not weights.packed:
        plain = _mapped(
            config, lambda part: {k: v for k, v in part.items() if k not in _QUANTIZATIONS}
        )
        return plain, [f"Removed from {CONFIG} its {_QUANTIZATIONS[0]}: no tensor is quantized."]
    if has or not weights.packed:
        return config, []
    taken = {key: of_source[key] for key in _QUANTIZATIONS if key in of_source}
    if taken:
        return {**config, **taken}, [f"{CONFIG} gets the {min(taken)} of the checkpoint's own."]
    families = ", ".join(sorted(set(weights.packed.values())))
    text = (
        f"{len(weights.packed)} tensors are quantized ({families}: {some(list(weights.packed))}), "
        f"and {CONFIG} has no {_QUANTIZATIONS[0]}: a loader would read the codes as numbers."
    )
    if must_fit:
        hint = "Give the assets of the quantized model; --allow-mismatch continues without."
        raise AnswerNo(text, hint=hint)
    return config, [text]


def _said(part: Config) -> dict[str, DType]:
    """The types that one part of a config says, by their keys."""
    types = {key: parse_dtype(str(part.get(key))) for key in _DTYPES}
    return {key: dtype for key, dtype in types.items() if dtype is not None}


def _mapped(config: Config, change: Callable[[Config], dict[str, object]]) -> dict[str, object]:
    """The config with every part of it changed: itself, text_config, vision_config…"""
    changed = change(config)
    return {**changed, **{key: _mapped(part, change) for key, part in _inner(changed).items()}}


def _parts(config: Config) -> Iterator[Config]:
    """The config and the configs in it."""
    yield config
    for part in _inner(config).values():
        yield from _parts(part)


def _inner(config: Config) -> dict[str, Config]:
    return {
        key: value
        for key, value in config.items()
        if key.endswith("_config") and key not in _QUANTIZATIONS and isinstance(value, dict)
    }
