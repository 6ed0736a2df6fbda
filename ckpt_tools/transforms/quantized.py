"""Which tensors together are one quantized weight: packed codes and the scales of them.

A cast would leave the codes and change what they mean, so a family keeps its types as a whole. It
is known by its packed tensor (a narrow or packed type), or by names that only one library writes.
Here are names, types and shapes; no value is read. An example:

    l.weight uint8, l.weight_scale float8, l.weight_scale_2 float32   one NVFP4 weight
    l.bias bfloat16                                                   not of it: added afterwards
    l.other float32                                                   may be of it: nothing tells

Sources of the names: the state dicts of bitsandbytes 0.45, torchao 0.14, compressed-tensors 0.12,
GPTQModel 4, AutoAWQ 0.2, Transformer Engine 2, ModelOpt 0.33, and those of transformers 5.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ckpt_tools.core import names
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import CheckpointIndex, TensorEntry

# What kinds of element types packed tensors have: see `_kind`.
_BYTES, _INTS = frozenset({"i8"}), frozenset({"i8", "i16", "i32", "i64"})
_WORDS, _FP8, _FP4 = frozenset({"i8", "i16", "i32"}), frozenset({"f8"}), frozenset({"f4"})
_NARROW = _BYTES | _FP8 | _FP4


class _Family(NamedTuple):
    """``packed`` is the packed tensor's name in its module, ``kinds`` are those of its type.

    ``beside`` must be there too; ``also`` are names of the family that `_is_scale` does not know.
    """

    name: str
    packed: str
    kinds: frozenset[str]
    beside: str = ""
    also: str = ""


# The first row that fits names the family.
_FAMILIES = (
    _Family("bitsandbytes 8-bit", "weight", _BYTES, r"(weight\.)?SCB"),
    _Family("8-bit optimizer state", r"state\d", _BYTES, r"absmax\d", r"(new_)?max\d|\w+norm_vec"),
    _Family("torchao", r".*(qdata|int_data|packed_weight)", _WORDS | _NARROW),
    _Family("torchao 8-bit optimizer state", "codes", _BYTES, "qmap"),
    _Family("compressed-tensors", r"(.+_)?weight_packed", _WORDS),
    _Family("GPTQ", "qweight", _INTS, "g_idx"),
    _Family("AWQ", "qweight", _INTS, "qzeros"),
    _Family("GPTQ or AWQ", "qweight", _INTS),
    _Family("EXL2", "q_weight", _INTS, "", r"q_.+"),
    _Family("EXL3", "trellis", _INTS),
    _Family("HQQ", "W_q", _INTS),
    _Family("AQLM", "codes", _INTS, "codebooks"),
    _Family("VPTQ", "indices", _INTS, "centroids", r"weight_bias|norm_.+"),
    _Family("QuIP#", r"Qidxs(_\w+)?", _INTS),
    _Family("Marlin", r"B(_24)?", frozenset({"i32"}), "s", "s"),
    _Family("Quanto", "_data", _NARROW),
    _Family("MXFP4", r".+_blocks", _BYTES, r".+_scales"),
    _Family("NVFP4", r".+", _NARROW, r".+_scale_2"),
    _Family("fake-quantized", r"(fake_quant|observer)_enabled", _INTS, "", r"(min|max)_val|eps"),
    _Family("torch.ao quantized", "zero_point", _INTS, "scale"),
    _Family("FP8", r".+", _FP8),
    _Family("FP4", r".+", _FP4),
)
# Only bitsandbytes writes these below a weight's name; the weight itself may be of any type, for
# FSDP shards it in the type of the layers beside it (bnb_4bit_quant_storage).
_BNB4 = "bitsandbytes 4-bit"
_BNB4_SIGN = re.compile(r"(?P<weight>.+)\.((nested_)?quant_map|quant_state(\..+)?)")
# Buffers that quantizing layers keep beside a weight of any type.
_QUANTIZER = re.compile(
    r"(?P<layer>.+?)\.([^.]*quantizer(\.\d+)?\._\w*(amax|scale|zero_point|bias_value)"
    r"|_extra_state|fp8_meta\w*(\..+)?|\w*amax_history\w*|scale(_inv)?_(fwd|bwd)"
    r"|(.*\.)?activation_post_process\.((min|max)_val|eps))"
)
# Scales of activations: they may stand in a module above those of the packed weights.
_CACHE_SCALE = re.compile(r"(q|k|v|kv|qkv|prob|input|output|[qkv]_cache|[qkv]_proj)_scale(_float)?")

# Words of a name, without the digits at their end.
_SCALE_WORD = re.compile(
    r"scales?|scaling|q?zeros?|zp|absmax|amax|qmap|codebooks?|centroids|lut|shift|offsets?|scbt?|cb"
    r"|s[uv]h?|wscale|dmin|mcg"
)
_WEIGHT_WORD = re.compile(r"q?weights?|packed|codes|q?data|blocks|kernel|wq?|proj|experts")
_BIAS_WORD = re.compile(r"bias(es)?|sinks")
_PLAIN = re.compile(
    r"lora_\w+|step|(max_)?exp_avg\w*|momentum_buffer|master\w*|fp32_param|param|running_(mean|var)"
)
# Integers that are no codes, by what they are called.
_NO_CODES_WORD = re.compile(
    r"mask(ed)?|bias|ids?|idx|index|indices|positions?|enabled|steps?|rng|seed|count(er)?|num|tokens?"
    r"|state|version|flags?|format|len(gths?)?|bucket|order|perm|shape|sizes?"
)


class Member(NamedTuple):
    """What a tensor belongs to: a family by its name, and the weight."""

    family: str
    weight: str


class Quantized(NamedTuple):
    """The tensors of a checkpoint that a cast must leave, by name.

    ``members`` belong to a quantized weight; ``codes`` are those of them that hold packed codes in
    a floating type; ``doubtful`` floating tensors stand beside the packed one that they name, and
    nothing tells whether they belong to it.
    """

    members: Mapping[str, Member]
    codes: frozenset[str]
    doubtful: Mapping[str, str]


NONE = Quantized({}, frozenset(), {})


def recognise(index: CheckpointIndex) -> Quantized:
    """The quantized weights of a checkpoint, from names, types and shapes alone."""
    tensors = {entry.fqn: entry for entry in index.tensors}
    members = _by_names(tensors, [entry.fqn for entry in index.objects])
    codes = {
        one.weight
        for one in members.values()
        if one.family == _BNB4
        and one.weight in tensors
        and tensors[one.weight].dtype.kind == "float"
    }
    doubtful: dict[str, str] = {}
    above: dict[str, Member] = {}
    containers = {names.join(path) for path in names.container_of(e.path for e in index.tensors)}
    for module, group in _by_module(tensors).items():
        packed = _packed(group)
        for name, family in packed.items():
            member = Member(family.name, f"{module}{name}")
            members.setdefault(group[name].fqn, member)
            for higher in _above(module):
                above.setdefault(higher, member)
        at_top = module.rstrip(".") in containers or not module
        for name in group.keys() - packed.keys():
            fqn = group[name].fqn
            found = _belongs(name, packed)
            if fqn in members:
                continue
            if found is not None and _is_of(name, packed[found]):
                members[fqn] = Member(packed[found].name, f"{module}{found}")
            elif found is not None and _is_doubtful(group[name], name, found, at_top=at_top):
                doubtful[fqn] = group[found].fqn
    for fqn in tensors.keys() - members.keys():
        module, _, leaf = fqn.rpartition(".")
        if f"{module}." in above and _CACHE_SCALE.fullmatch(leaf):
            members[fqn] = above[f"{module}."]
            doubtful.pop(fqn, None)
    return Quantized(members, frozenset(codes), doubtful)


def _by_names(tensors: Mapping[str, TensorEntry], others: Collection[str]) -> dict[str, Member]:
    """What is known by names alone: all below a 4-bit weight, and the buffers of quantizers."""
    signs = (_BNB4_SIGN.fullmatch(fqn) for fqn in (*tensors, *others))
    weights = {sign["weight"] for sign in signs if sign is not None}
    found: dict[str, Member] = {}
    for fqn in tensors:
        weight = next((one for one in (fqn, *_prefixes(fqn)) if one in weights), None)
        layer = _QUANTIZER.fullmatch(fqn)
        if weight is not None:
            found[fqn] = Member(_BNB4, weight)
        elif layer is not None and tensors[fqn].dtype.kind == "float":
            found[fqn] = Member("quantizer", layer["layer"])
    return found


def _prefixes(fqn: str) -> Iterator[str]:
    while "." in fqn:
        fqn = fqn.rpartition(".")[0]
        yield fqn


def _above(module: str) -> Iterable[str]:
    """The modules up to two levels above a module, each with its dot."""
    return [f"{one}." for one in _prefixes(module.rstrip("."))][:2]


def _by_module(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of each module (its name with the dot) by their names in it.

    What lies below a tensor's own name (``weight.absmax``) stands in that tensor's module.
    """
    groups: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    for fqn, entry in tensors.items():
        owner = next((one for one in _prefixes(fqn) if one in tensors), fqn)
        module = owner[: owner.rfind(".") + 1]
        groups[module][fqn[len(module) :]] = entry
    return groups


def _packed(group: Mapping[str, TensorEntry]) -> dict[str, _Family]:
    """The packed tensors of a module, with their families."""
    found = {}
    for name, entry in group.items():
        family = _family(name, entry, group)
        if family is not None:
            found[name] = family
    if len(found) > 1:  # beside codes, a zero point is theirs
        found.pop("zero_point", None)
    return found


def _family(name: str, entry: TensorEntry, group: Collection[str]) -> _Family | None:
    """The family that a tensor is the packed one of, or None."""
    kind = _kind(entry.dtype)
    if not kind or (_is_scale(name) and name != "zero_point"):
        return None
    for row in _FAMILIES:
        if (
            kind in row.kinds
            and re.fullmatch(row.packed, name)
            and (not row.beside or any(re.fullmatch(row.beside, other) for other in group))
        ):
            return row
    by_name = kind in _WORDS and _has(name, _WEIGHT_WORD)
    by_shape = kind in _BYTES and len(entry.shape) >= 2
    if (by_name or by_shape) and not _has(name, _NO_CODES_WORD):
        return _Family(f"packed {entry.dtype.name}", name, _WORDS)
    return None


def _kind(dtype: DType) -> str:
    """``i8`` to ``i64`` for integers, ``f8`` and ``f4`` for narrow floats, else nothing."""
    if dtype.kind in ("int", "uint"):
        return f"i{dtype.bits}"
    if dtype.kind == "raw" or (dtype.kind == "float" and dtype.bits < 8):
        return "f4"
    return "f8" if dtype.kind == "float" and dtype.bits == 8 else ""


def _belongs(name: str, packed: Mapping[str, _Family]) -> str | None:
    """The packed tensor that a tensor of the same module is nearest to by name."""
    return max(packed, key=lambda one: (len(_common(one, name)), one), default=None)


def _common(one: str, other: str) -> str:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return one[:count]


def _is_of(name: str, family: _Family) -> bool:
    return _is_scale(name) or bool(family.also and re.fullmatch(family.also, name))


def _is_doubtful(entry: TensorEntry, name: str, packed: str, *, at_top: bool) -> bool:
    """Whether a tensor beside a packed one may be of its family.

    At the top of a checkpoint everything stands beside everything: only a weight's own name tells.
    """
    plain = _has(name, _BIAS_WORD) or _PLAIN.fullmatch(name) is not None
    near = not at_top or _has(packed, _WEIGHT_WORD) or name.startswith(packed)
    return entry.dtype.kind == "float" and not plain and near


def _is_scale(name: str) -> bool:
    """Whether a name is one of scales, zero points, code books… as quantizing libraries have."""
    return _has(name, _SCALE_WORD)


def _has(name: str, word: re.Pattern[str]) -> bool:
    words = re.split(r"[_.:]", name.lower())
    return any(word.fullmatch(one.rstrip("0123456789")) for one in words)
