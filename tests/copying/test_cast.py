"""Casts: to the bit as torch does them."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from ckpt_tools.copying.cast import Caster
from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.errors import UnsupportedError

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def patterns(name: str) -> np.ndarray:
    """Every bit pattern of a small type; of a large one all special ones and a dense sample."""
    bits = BY_NAME[name].bits
    if bits <= 16:
        return np.arange(1 << bits, dtype=f"<u{bits // 8}")
    rng = np.random.default_rng(0)
    word = f"<u{bits // 8}"
    anything = (
        rng.integers(0, 1 << bits, 1 << 17, dtype=np.uint64, endpoint=False)
        if bits < 64
        else (rng.integers(0, np.iinfo(np.uint64).max, 1 << 17, dtype=np.uint64, endpoint=True))
    )
    floats = f"<f{bits // 8}"
    values = [rng.standard_normal(1 << 15) * 2.0**scale for scale in range(-30, 20, 3)]
    halves = np.arange(1 << 16, dtype="<u2").view("<f2")
    with np.errstate(invalid="ignore"):
        near = halves.astype(floats).view(word)
    upper = np.arange(1 << 16, dtype=np.uint64).astype(word) << (bits - 16)
    parts = [anything.astype(word), np.concatenate(values).astype(floats).view(word)]
    for exact in (near, upper):
        tie = exact + (exact.dtype.type(1) << exact.dtype.type(12 if bits == 32 else 41))
        parts += [exact, exact + 1, exact - 1, tie, tie + 1, tie - 1]
    parts += [upper + 0x8000, upper + 0x8001, upper + 0x7FFF] if bits == 32 else []
    return np.concatenate([part.astype(word) for part in parts])


def by_torch(raw: np.ndarray, source: str, target: str) -> np.ndarray:
    import torch

    values = torch.from_numpy(raw.view("u1")).view(getattr(torch, source))
    return values.to(getattr(torch, target)).view(torch.uint8).numpy()


@pytest.mark.parametrize(("source", "target"), list(permutations(FLOATS, 2)))
def test_a_cast_gives_torchs_bits(source: str, target: str) -> None:
    raw = patterns(source)
    raw = raw[: len(raw) // 64 * 64]  # torch casts the rest one by one, with other NaN bits
    out = bytearray(len(raw) * BY_NAME[target].itemsize)
    Caster(BY_NAME[source], BY_NAME[target]).cast(memoryview(raw.tobytes()), memoryview(out))
    word = f"<u{BY_NAME[target].itemsize}"
    ours, theirs = np.frombuffer(out, word), by_torch(raw, source, target).view(word)
    wrong = np.flatnonzero(ours != theirs)
    shown = [f"{raw[k]:x}: {ours[k]:x}, torch {theirs[k]:x}" for k in wrong[:5]]
    assert not shown, f"{len(wrong)} of {len(raw)}"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("int64", "float32"),
        ("float32", "bool"),
        ("complex64", "complex128"),
        ("float32", "float32"),
    ],
)
def test_what_is_no_cast_between_floats_is_refused(source: str, target: str) -> None:
    with pytest.raises(UnsupportedError, match=f"from {source} to {target}"):
        Caster(BY_NAME[source], BY_NAME[target])


def test_a_cast_of_nothing_is_nothing() -> None:
    Caster(BY_NAME["float32"], BY_NAME["bfloat16"]).cast(memoryview(b""), memoryview(bytearray()))
