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
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from os.path import commonprefix
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

    ``beside`` must be there too; ``also`` are names of the family without a `_SCALE_WORD`.
    """

    name: str
    packed: str
    kinds: frozenset[str]
    beside: str = ""
    also: str = ""


# A weight may be of any type beside its zero point: of such a module only the scales are kept.
_ZERO = "zero_point"
# The first row that fits names the family.
_FAMILIES = (
    _Family("bitsandbytes 8-bit", "weight", _BYTES, r"(weight\.)?SCB", "weight_format"),
    _Family("8-bit optimizer state", r"state\d", _BYTES, r"absmax\d", r"(new_)?max\d|\w+norm_vec"),
    _Family("torchao", r".*(qdata|int_data|packed_weight)", _WORDS | _NARROW),
    _Family("torchao 8-bit optimizer state", "codes", _BYTES, "qmap"),
    _Family("compressed-tensors", r"(.+_)?weight_packed", _WORDS, "", r".*(shape|g_idx)"),
    _Family("GPTQ", "qweight", _INTS, "g_idx", "g_idx"),
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
    _Family(
        "fake-quantized", "fake_quant_enabled", _INTS, "", r"observer_enabled|(min|max)_val|eps"
    ),
    _Family("calibrated", rf"(.+_)?{_ZERO}", _INTS | _FP8, r"(.+_)?scale"),
    _Family("FP8", r".+", _FP8),
    _Family("FP4", r".+", _FP4),
)
# Families whose weights are still plain numbers: what stands for the weight is a buffer beside it.
_UNPACKED = frozenset({"fake-quantized", "calibrated"})
# Only bitsandbytes writes these below a weight's name; the weight itself may be of any type, for
# FSDP shards it in the type of the layers beside it (bnb_4bit_quant_storage).
_BNB4 = "bitsandbytes 4-bit"
_BNB4_SIGN = re.compile(r"(?P<weight>.+)\.((nested_)?quant_map|quant_state(\..+)?)")
# Buffers that quantizing layers keep beside a weight of any type.
_BUFFERS = (
    ("ModelOpt", r"(?P<layer>.+?)\.[^.]*quantizer(\.\d+)?\._\w*(amax|scale|zero_point|bias_value)"),
    (
        "Transformer Engine",
        r"(?P<layer>.+?)\.(_extra_state|fp8_meta\w*(\..+)?|\w*amax_history\w*|scale(_inv)?_(fwd|bwd))",
    ),
    ("fake-quantized", r"(?P<layer>.+?)\.(.*\.)?activation_post_process\.((min|max)_val|eps)"),
)
# Names of scales that a plain model hardly has, though no packed tensor stands beside them: those
# of a model that is calibrated, or was decoded, or of which only the cache is quantized: then it is
# one number.
_LONE = re.compile(r"(weight|input|output)_(global_)?scale(_inv|_\d)?|(?P<one>[qkv]_scale)")
_BUFFER_SIGN = re.compile(r"quantizer|_extra_state|fp8_meta|amax_|_fwd|_bwd|post_process")
# Scales of activations: they may stand in a module above those of the packed weights.
_CACHE_SCALE = re.compile(
    r"(q|k|v|kv|qkv|prob|input|output|[qkv]_cache|[qkv]_proj)?_(scale(_float)?|shift)"
)

# Words of a name, without the digits at their end; these of scales, zero points and code books.
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


class _Member(NamedTuple):
    """What a tensor belongs to: a family by its name, and the weight."""

    family: str
    weight: str


class Quantized(NamedTuple):
    """The tensors of a checkpoint that a cast must leave, by name.

    ``members`` belong to a quantized weight; ``codes`` are those of them that hold packed codes in
    a floating type; ``doubtful`` floating tensors stand beside the weight that they name, and
    nothing tells whether they belong to it.
    """

    members: Mapping[str, _Member]
    codes: frozenset[str]
    doubtful: Mapping[str, str]

    def is_packed(self, name: str) -> bool:
        """Whether a tensor holds the codes of a weight, rather than scales of it or of a layer."""
        member = self.members.get(name)
        return member is not None and member.weight == name and member.family not in _UNPACKED


def recognise(index: CheckpointIndex) -> Quantized:
    """The quantized weights of a checkpoint, from names, types and shapes alone."""
    tensors = {entry.fqn: entry for entry in index.tensors}
    members = _by_names(tensors, [entry.fqn for entry in index.objects])
    weights = {one.weight for one in members.values() if one.family == _BNB4} & tensors.keys()
    codes = frozenset(one for one in weights if tensors[one].dtype.kind == "float")
    doubtful: dict[str, str] = {}
    above: dict[str, _Member] = {}
    containers = {names.join(path) for path in names.container_of(e.path for e in index.tensors)}
    for module, group in _by_module(tensors).items():
        packed = _packed(group)
        if packed:
            at_top = not module or module[:-1] in containers
            known, near = _sorted_out(group, packed, at_top=at_top)
            for name, one in known.items():
                members.setdefault(module + name, _Member(packed[one].name, module + one))
            for higher in islice(_prefixes(module[:-1]), 2):
                above.setdefault(f"{higher}.", members[module + next(iter(packed))])
            doubtful |= {module + name: module + one for name, one in near.items()}
    for fqn in tensors.keys() - members.keys() if above else ():
        module, _, leaf = fqn.rpartition(".")
        if f"{module}." in above and _CACHE_SCALE.fullmatch(leaf):
            members[fqn] = above[f"{module}."]
    for fqn, entry in tensors.items():
        module, _, leaf = fqn.rpartition(".")
        lone = _LONE.fullmatch(leaf) if entry.dtype.kind == "float" else None
        if lone is not None and (lone["one"] is None or entry.numel == 1):
            doubtful.setdefault(fqn, f"{module}.weight")
    return Quantized(members, codes, {k: v for k, v in doubtful.items() if k not in members})


def _by_names(tensors: Mapping[str, TensorEntry], others: Collection[str]) -> dict[str, _Member]:
    """What is known by names alone: all below a 4-bit weight, and the buffers of quantizers."""
    signs = (_BNB4_SIGN.fullmatch(fqn) for fqn in (*tensors, *others) if "quant_" in fqn)
    weights = {sign["weight"] for sign in signs if sign is not None}
    members: dict[str, _Member] = {}
    for fqn, entry in tensors.items():
        owners = (fqn, *_prefixes(fqn)) if weights else ()
        weight = next((one for one in owners if one in weights), None)
        if weight is not None:
            members[fqn] = _Member(_BNB4, weight)
        elif entry.dtype.kind == "float" and _BUFFER_SIGN.search(fqn):
            for family, text in reversed(_BUFFERS):  # the first that fits counts
                layer = re.fullmatch(text, fqn)
                if layer is not None:
                    members[fqn] = _Member(family, layer["layer"])
    return members


def _prefixes(fqn: str) -> Iterator[str]:
    place = fqn.rfind(".")
    while place > 0:
        yield fqn[:place]
        place = fqn.rfind(".", 0, place)


def _by_module(tensors: Mapping[str, TensorEntry]) -> dict[str, dict[str, TensorEntry]]:
    """The tensors of each module (its name with the dot) by their names in it.

    What lies below a tensor's own name (``weight.absmax``) stands in that tensor's module. None,
    where nothing can be packed: a plain model of a million tensors is not to wait for this.
    """
    groups: dict[str, dict[str, TensorEntry]] = defaultdict(dict)
    kinds = ((fqn.rpartition(".")[2], _kind(entry.dtype)) for fqn, entry in tensors.items())
    if not any(kind and (kind != "i64" or _rows(leaf, kind)) for leaf, kind in kinds):
        return groups
    for fqn, entry in tensors.items():
        owner = next((one for one in islice(_prefixes(fqn), 3) if one in tensors), fqn)
        module = owner[: owner.rfind(".") + 1]
        groups[module][fqn[len(module) :]] = entry
    return groups


def _sorted_out(
    group: Mapping[str, TensorEntry], packed: Mapping[str, _Family], *, at_top: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The tensors of a module that belong to a packed one, which they name; and the doubtful."""
    weights, doubtful = {name: name for name in packed}, {}
    for name in sorted(group.keys() - packed.keys()):
        # By their first letters: commonprefix knows nothing of paths.
        near = max(packed, key=lambda one: (len(commonprefix([one, name])), one))  # noqa: RUF071
        also = packed[near].also
        if _has(name, _SCALE_WORD) or (also and re.fullmatch(also, name)):
            weights[name] = near
        elif group[name].dtype.kind == "float" and not near.endswith(_ZERO):
            # At the top everything stands beside everything: only a weight's own name tells.
            is_beside = not at_top or _has(near, _WEIGHT_WORD) or name.startswith(near)
            if is_beside and not _has(name, _BIAS_WORD) and not _PLAIN.fullmatch(name):
                doubtful[name] = near
    return weights, doubtful


def _packed(group: Mapping[str, TensorEntry]) -> dict[str, _Family]:
    """The packed tensors of a module, with their families."""
    families: dict[str, _Family] = {}
    for name, entry in group.items():
        kind = _kind(entry.dtype)
        if not kind or (_has(name, _SCALE_WORD) and not name.endswith(_ZERO)):
            continue
        for row in _rows(name, kind):
            if not row.beside or any(re.fullmatch(row.beside, other) for other in group):
                families[name] = row
                break
        else:
            by_name = kind in _WORDS and _has(name, _WEIGHT_WORD)
            by_shape = kind in _BYTES and len(entry.shape) >= 2
            if (by_name or by_shape) and not _has(name, _NO_CODES_WORD):
                families[name] = _Family(f"packed {entry.dtype.name}", name, _WORDS)
    codes = {name: family for name, family in families.items() if not name.endswith(_ZERO)}
    return codes or families


@lru_cache(4096)
def _rows(name: str, kind: str) -> tuple[_Family, ...]:
    """The families that a packed tensor of this name in its module may be of."""
    return tuple(r for r in _FAMILIES if kind in r.kinds and re.fullmatch(r.packed, name))


def _kind(dtype: DType) -> str:
    """``i8`` to ``i64`` for integers, ``f8`` and ``f4`` for narrow floats, else nothing."""
    if dtype.kind in ("int", "uint"):
        return f"i{dtype.bits}"
    if dtype.kind == "raw" or (dtype.kind == "float" and dtype.bits < 8):
        return "f4"
    return "f8" if dtype.kind == "float" and dtype.bits == 8 else ""


@lru_cache(4096)
def _has(name: str, word: re.Pattern[str]) -> bool:
    words = re.split(r"[_.:]", name.lower())
    return any(word.fullmatch(one.rstrip("0123456789")) for one in words)
