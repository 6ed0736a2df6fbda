"""Sizes for tests: the default ones, and tiny ones that send a tensor of 1 KB every way."""

from dataclasses import astuple, replace

import pytest
from hypothesis import strategies as st

from ckpt_tools.core.sizes import Sizes

DEFAULT = Sizes()
TINY = Sizes(
    task=512,
    slab=256,
    stream=128,
    long_run=96,
    kernel_copy=64,
    direct_from=1 << 60,
    direct_least=0,
    thread_memory=1 << 10,
    thread_work=256,
    plans=1 << 10,
    plan_files=1,
    most_plans=4 << 10,
    long_row=16,
    near=32,
    fetched_gap=48,
    fetched=1 << 10,
    gap=64,
    pieces=2,
    proof_group=512,
    checked=512,
    checked_edge=128,
    numbers=32,
    reported=256,
    met=1 << 10,
    sample=64,
)
# Past the page cache, which only whole blocks of 4,096 bytes can go.
DIRECT = replace(TINY, task=32 << 10, slab=16 << 10, direct_from=0)


def any_sizes() -> st.SearchStrategy[Sizes]:
    """Records whose fields are each the tiny one, the default, or between."""
    fields = {
        name: st.sampled_from(sorted({least, most, (least + most) // 2}))
        for name, least, most in zip(Sizes.__slots__, astuple(TINY), astuple(DEFAULT), strict=True)
    }
    return st.builds(Sizes, **fields)


def use(sizes: Sizes, patch: pytest.MonkeyPatch) -> None:
    """Have these be the default ones of this process."""
    patch.setattr(Sizes.__init__, "__defaults__", astuple(sizes))
