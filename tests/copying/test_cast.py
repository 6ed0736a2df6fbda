"""Casts: every value as torch gives it."""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations

import numpy as np
import pytest
import torch

from ckpt_tools.copying.cast import Caster, numbers
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import UnsupportedError

FLOATS = [name for name, row in BY_NAME.items() if row.kind == "float"]


@lru_cache
def patterns(name: str) -> np.ndarray:
    """Every bit pattern of a small type; of a large one 2^20 random ones and all special ones."""
    bits = BY_NAME[name].bits
    if bits <= 16:
        return np.arange(1 << bits, dtype=f"<u{bits // 8}")
    rng = np.random.default_rng(0)
    if bits == 64:
        wide = patterns("float32").view("<f4")[-(1 << 20) :]
        with np.errstate(invalid="ignore"):
            exact = wide.astype("<f8").view("<u8")  # and a hair to both sides: rounding twice shows
        random = rng.integers(0, 1 << 64, 1 << 20, dtype=np.uint64)
        return np.concatenate([random, exact, exact + 1, exact - 1])
    random = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint64).astype("<u4")
    weights = (rng.standard_normal(1 << 18) * 0.02).astype("<f4").view("<u4")
    with np.errstate(invalid="ignore"):
        halves = np.arange(1 << 16, dtype="<u2").view("<f2").astype("<f4").view("<u4")
    upper = np.arange(1 << 16, dtype="<u4") << 16
    near = [upper + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    near += [halves + low for low in (0, 1, 0xFFF, 0x1000, 0x1001)] + [halves - 1]
    return np.concatenate([random, weights, *near]).astype("<u4")


def ours(raw: np.ndarray, source: str, target: str, *, block: int = 128 << 10) -> np.ndarray:
    out = bytearray(len(raw) * BY_NAME[target].itemsize)
    caster = Caster(BY_NAME[source], BY_NAME[target], block=block)
    caster.cast(memoryview(raw.view("u1")), memoryview(out))
    return np.frombuffer(out, f"<u{BY_NAME[target].itemsize}")


def as_torch(raw: np.ndarray, name: str) -> torch.Tensor:
    return torch.from_numpy(raw.copy().view("u1")).view(getattr(torch, name))


@pytest.mark.parametrize(("source", "target"), list(permutations(FLOATS, 2)))
def test_a_cast_gives_torchs_values(source: str, target: str) -> None:
    if not hasattr(torch, source) or not hasattr(torch, target):
        pytest.skip("torch has float8_e8m0fnu only since 2.7")
    raw = patterns(source)
    found = ours(raw, source, target)
    by_torch = as_torch(raw, source).to(getattr(torch, target))
    if target == "float8_e4m3fn":  # before 2.13 torch made NaN of what is too large
        numbers = as_torch(raw, source).double()
        by_torch = torch.where(by_torch.isnan(), numbers.clamp(-448, 448), by_torch.double())
        by_torch = by_torch.to(torch.float8_e4m3fn)
    expected = by_torch.view(torch.uint8).numpy().view(found.dtype)
    is_nan = torch.isnan(as_torch(found, target).double()).numpy()
    both_nan = is_nan & torch.isnan(by_torch.double()).numpy()
    wrong = np.flatnonzero((found != expected) & ~both_nan)
    shown = [f"{raw[k]:x}: {found[k]:x}, torch {expected[k]:x}" for k in wrong[:5]]
    assert not shown, f"{len(wrong)} of {len(raw)}"


@pytest.mark.parametrize(("source", "target"), list(permutations(FLOATS, 2)))
def test_a_cast_gives_the_same_bits_in_any_blocks(source: str, target: str) -> None:
    raw = patterns(source)[-5000:]  # NaNs of all bits among them, which `--check` casts again
    every = raw.dtype.type((1 << 8 * raw.itemsize) - 1)
    raw = np.concatenate([raw, every - np.arange(200).astype(raw.dtype)])
    found = ours(raw, source, target)
    assert np.array_equal(found, ours(raw, source, target, block=7))
    shifted = memoryview(b"\0" + raw.tobytes())[1:]  # elements at odd addresses
    out = bytearray(found.nbytes)
    Caster(BY_NAME[source], BY_NAME[target]).cast(shifted, memoryview(out))
    assert out == found.tobytes()


def test_what_is_too_large_becomes_what_torch_makes_of_it() -> None:
    values = np.array([448, 464, 465, -1e30, np.inf, np.nan], "<f4").view("<u4")
    assert ours(values, "float32", "float8_e4m3fn").tolist()[:5] == [0x7E, 0x7E, 0x7E, 0xFE, 0x7E]
    assert ours(values, "float32", "float8_e4m3fnuz").tolist()[3:] == [0x80] * 3
    assert ours(values, "float32", "float8_e5m2").tolist()[3:5] == [0xFC, 0x7C]
    assert ours(values, "float32", "float8_e8m0fnu").tolist() == [136, 136, 136, 227, 255, 255]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("int64", "float32"),
        ("float32", "bool"),
        ("complex64", "complex128"),
        ("float32", "float32"),
        ("float4_e2m1fn_x2", "float32"),
        ("bfloat16", "float6_e2m3fn_x4"),
    ],
)
def test_what_is_no_cast_between_floats_is_refused(source: str, target: str) -> None:
    with pytest.raises(UnsupportedError, match=f"from {source} to {target}"):
        Caster(BY_NAME[source], BY_NAME[target])


def test_a_cast_of_nothing_is_nothing() -> None:
    Caster(BY_NAME["float32"], BY_NAME["bfloat16"]).cast(memoryview(b""), memoryview(bytearray()))


@pytest.mark.parametrize(("source", "target"), list(permutations(FLOATS, 2)))
def test_a_cast_says_whether_a_finite_value_became_infinite(source: str, target: str) -> None:
    caster = Caster(BY_NAME[source], BY_NAME[target], block=64)
    every = patterns(source)[:: 1 if BY_NAME[source].bits < 32 else 4001].copy()
    with np.errstate(all="ignore"):
        before = numbers(memoryview(every.view("u1")), BY_NAME[source])
        after = numbers(memoryview(ours(every, source, target).view("u1")), BY_NAME[target])
    lost = np.isinf(after) & np.isfinite(before)
    for some in (lost, ~lost):
        raw = every[some]
        out = memoryview(bytearray(len(raw) * BY_NAME[target].itemsize))
        assert caster.cast(memoryview(raw.view("u1")), out) == (some is lost and bool(lost.any()))
    for one in every[lost][:8]:  # alone among zeros, in the last, short block
        raw = np.append(np.zeros(70, every.dtype), one)
        out = memoryview(bytearray(len(raw) * BY_NAME[target].itemsize))
        assert caster.cast(memoryview(raw.view("u1")), out)
