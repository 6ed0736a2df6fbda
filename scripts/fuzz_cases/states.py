"""Random state dicts, and what they are when written out to be compared."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from datetime import date
from fractions import Fraction
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import torch

State = dict[str, object]
Path = tuple[object, ...]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SMALL_FLOATS = tuple(
    getattr(torch, f"float8_{kind}")
    for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
    if hasattr(torch, f"float8_{kind}")  # torch has e8m0fnu since 2.7
)
WHOLES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
WHOLES += (torch.uint16, torch.uint32, torch.uint64, torch.bool)
_COMPLEX = (torch.complex64, torch.complex128, torch.complex32)
# torch copies these only where they are contiguous, and has them since 2.8.
PACKED = (torch.float4_e2m1fn_x2,) if hasattr(torch, "float4_e2m1fn_x2") else ()

_TOPS = ("model", "optim", "extra", "app", "a", "b", "w2", "layers", "step")
_KEYS = ("a", "b", "c", "weight", "bias", "_orig_mod", "x", "y", "x.y", "w", "é", "0", "1")
_ODD_KEYS = (0, 1, 2, -1, True, None, 1.5, (1, 2), ("a", None))
_PLAIN = (
    *(None, True, False, 0, 1, -1, 255, 256, 65536, 1 << 40, -(1 << 70), 0.0, -0.0, 1e-300),
    *(float("nan"), float("inf"), "", "text", "é\n\0", "x" * 300, b"", b"ab", 1 + 2j),
    *(torch.Size([2, 3]), {1, 2}, set(), frozenset({"a"}), (), [], {}, (1, (2,)), [1, [2, "x"]]),
    *(({"a": 1},), (OrderedDict(b=1),), [{}, 1], [[], []], {"lr": 0.1, "betas": (0.9, 0.99)}),
    *(date(2026, 1, 2), PurePosixPath("a/b"), Namespace(lr=0.1, inner=Namespace(x=[1, (2,)]))),
    *(np.arange(6.0).reshape(2, 3), np.array([1, "x", None], dtype=object), deque([1], maxlen=3)),
    *([1, np.int8(3), np.arange(2, dtype="i2")], (Fraction(1, 3), {"at": date(2026, 1, 2)})),
)


def state_dict(rng: random.Random, *, can_be_nan: bool = True) -> State:
    """A small nested state dict with one weight at least."""
    state = _state_dict(rng)
    if can_be_nan:
        return state
    found: State = mapped(state, _as_numbers)  # type: ignore[assignment]
    return found


def _as_numbers(value: torch.Tensor) -> torch.Tensor:
    """Finite values of many sizes where the bytes could be NaN, of which no cast keeps the bits."""
    if value.dtype not in FLOATS:
        return value
    return torch.nan_to_num(value.detach(), nan=0.1, posinf=1e3, neginf=-1e3)


def _state_dict(rng: random.Random) -> State:
    made: list[torch.Tensor] = []
    count = rng.choice((1, 2, 3, 5, 8))
    state: State = {key: _top(rng, made, key) for key in rng.sample(_TOPS, count)}
    state[rng.choice(("w", "model.w", "weight"))] = tensor(rng, made)
    items = list(state.items())
    rng.shuffle(items)
    return OrderedDict(items) if rng.random() < 0.2 else dict(items)


def _top(rng: random.Random, made: list[torch.Tensor], key: str) -> object:
    """Model and optimizer are dicts: DCP pickles a tuple whole, and then neither is one."""
    found = _value(rng, made, depth=1)
    return (
        {"part": found} if key in ("model", "optim") and isinstance(found, list | tuple) else found
    )


def _value(rng: random.Random, made: list[torch.Tensor], *, depth: int) -> object:
    chance = rng.random()
    if chance < 0.45:
        return tensor(rng, made)
    if chance < 0.65 or depth > 3:
        return rng.choice(_PLAIN)
    items = [_value(rng, made, depth=depth + 1) for _ in range(rng.choice((0, 1, 2, 2, 3, 4)))]
    kind = rng.random()
    if kind < 0.2:
        return items
    if kind < 0.3:
        return tuple(items)
    keys: tuple[object, ...] = rng.choice((_KEYS, _KEYS, _KEYS, _KEYS, _ODD_KEYS))
    if rng.random() < 0.05:
        keys = (*_KEYS, *_ODD_KEYS)  # some of which have the same text
    chosen = dict(zip(rng.sample(keys, len(items)), items, strict=True))
    if kind < 0.4:
        return OrderedDict(chosen)
    return defaultdict(int, chosen) if kind < 0.43 else chosen


def is_in_safetensors(value: torch.Tensor) -> bool:
    """Whether safetensors has this type; a single pair of 4-bit floats is no shape there."""
    is_pair = value.dtype in PACKED and value.ndim == 0
    return not is_pair and value.dtype not in (torch.complex128, torch.complex32)


def dtype(rng: random.Random) -> torch.dtype:
    """A type of elements, float32 and bfloat16 more often than others."""
    if rng.random() < 0.4:
        return rng.choice((torch.float32, torch.bfloat16))
    return rng.choice((*FLOATS, *SMALL_FLOATS, *WHOLES, *_COMPLEX, *PACKED))


def tensor(rng: random.Random, made: list[torch.Tensor]) -> torch.Tensor:
    """A tensor of random bytes, or a view of one that was made before, which it is tied to."""
    if made and rng.random() < 0.15:
        return _view(rng, rng.choice(made))
    shape = [rng.choice((0, 1, 2, 3, 4, 5, 7, 8)) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4)))]
    found = filled(rng, shape, dtype(rng))
    if rng.random() < 0.3:
        found = _view(rng, found)
    if found.dtype in FLOATS and rng.random() < 0.1:
        found = torch.nn.Parameter(found.detach(), requires_grad=rng.random() < 0.5)
    made.append(found)
    return found


def filled(rng: random.Random, shape: list[int], kind: torch.dtype) -> torch.Tensor:
    """Random bytes, NaN of every kind among them, as a contiguous tensor."""
    numel = torch.Size(shape).numel()
    if kind == torch.bool:
        return torch.tensor([rng.random() < 0.5 for _ in range(numel)], dtype=kind).reshape(shape)
    size = torch.empty((), dtype=kind).element_size()
    raw = torch.frombuffer(bytearray(rng.randbytes(numel * size) or b"\0" * 16), dtype=torch.uint8)
    return raw[: numel * size].view(kind).reshape(shape)


def _view(rng: random.Random, base: torch.Tensor) -> torch.Tensor:
    """The same storage otherwise: turned, every second row, rows from the second on, spread."""
    found = base.detach()
    if found.dtype in PACKED:
        return found
    way = rng.randrange(7)
    if way == 0 and found.ndim >= 2:
        found = found.transpose(0, 1)
    elif way == 1 and found.ndim >= 1:
        found = found[::2]
    elif way == 2 and found.ndim >= 1:
        found = found[1:]
    elif way == 3 and found.ndim >= 2:
        found = found[:, 1:]
    elif way == 4:
        found = found.expand(3, *found.shape)
    elif way == 5 and found.is_complex() and found.dtype != torch.complex32:
        found = found.conj()
    elif way == 6 and found.dtype in FLOATS[:2]:  # torch itself changes narrower NaN
        found = torch._neg_view(found)  # noqa: SLF001 (what a view of an imaginary part is)
    return found


def spelled(value: object) -> object:
    """A value with every container as its kind and its keys with theirs, to be compared."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), content(value)
    if isinstance(value, Mapping):
        return kind_of(value), [(type(key), key, spelled(item)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return type(value), [spelled(item) for item in value]
    return type(value), repr(value)


def kind_of(value: Mapping[object, object]) -> type:
    """The kind of a dict; a defaultdict comes through as the dict that it is."""
    return dict if isinstance(value, defaultdict) else type(value)


def content(value: torch.Tensor) -> bytes:
    """The elements of a tensor, packed row by row."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    packed = flat.as_strided(flat.shape, (1,))  # one element alone may have any stride
    return packed.view(torch.uint8).numpy().tobytes()


class Leaf(NamedTuple):
    """A tensor or a plain value, and the keys that lead to it."""

    path: Path
    value: object

    @property
    def name(self) -> str:
        """The keys joined by dots."""
        return ".".join(map(str, self.path))


def leaves(value: object, path: Path = ()) -> Iterator[Leaf]:
    """Tensors and plain values of nested dicts, lists and tuples, in their order."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list | tuple) and any(map(has_tensor, value)):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
    else:
        yield Leaf(path, value)


def has_tensor(value: object) -> bool:
    """Whether a tensor is anywhere in it."""
    if isinstance(value, Mapping):
        return any(map(has_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_tensor, value))
    return isinstance(value, torch.Tensor)


def tensors(state: object) -> dict[str, torch.Tensor]:
    """The tensors of a state dict by their names."""
    return {one.name: one.value for one in leaves(state) if isinstance(one.value, torch.Tensor)}


def has_twins(state: object) -> bool:
    """Whether two entries have one name, or two keys of a dict the same text."""
    names = Counter(one.name for one in leaves(state))
    return max(names.values()) > 1 or _texts_agree(state)


def has_wrapped_twins(state: object) -> bool:
    """Whether two tensors have one name without the components of wrappers."""
    names = list(tensors(state))
    bare = {".".join(part for part in name.split(".") if part != "_orig_mod") for name in names}
    return len(bare) < len(names)


def _texts_agree(value: object) -> bool:
    if isinstance(value, Mapping):
        agree = len(set(map(str, value))) < len(value)
        return agree or any(map(_texts_agree, value.values()))
    return isinstance(value, list | tuple) and any(map(_texts_agree, value))


def mapped(value: object, change: object) -> object:
    """The same containers with each tensor changed by a function."""
    if isinstance(value, torch.Tensor):
        return change(value)  # type: ignore[operator]
    if isinstance(value, OrderedDict):
        return OrderedDict((key, mapped(item, change)) for key, item in value.items())
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    return value
