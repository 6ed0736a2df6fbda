"""Weighted sums in float64 of what several checkpoints hold of one tensor, rounded once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - imported late, and only to average

from ckpt_tools.copying.cast import Caster, numbers
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.plan import Mean

if TYPE_CHECKING:
    from ckpt_tools.copying.cast import Numbers


def write_mean(raws: Iterable[memoryview], mean: Mean, dtype: DType, out: memoryview) -> None:
    """Average raw elements of a type into ``out``; ``raws`` are those of each term, in order.

    They may share one buffer: each is used before the next one is asked for. 16 bytes of memory
    are taken for each element, 32 for a complex one.
    """
    total: Numbers | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for (weight, _), raw in zip(mean.terms, raws, strict=True):
            part = numbers(raw, dtype)
            if weight != 1:  # most are: a pass over memory less, a tenth of the time
                part *= weight
            if total is not None:
                if mean.keep != 1:
                    total *= mean.keep
                part += total
            total = part
        if total is not None:
            total /= mean.divisor
            write_rounded(total, dtype, out)


def write_rounded(total: Numbers, dtype: DType, out: memoryview) -> None:
    """Write numbers into ``out`` as raw elements of a type."""
    # A complex number is two of these.
    component = BY_NAME[f"float{dtype.bits // 2}"] if dtype.kind == "complex" else dtype
    raw = total.data.cast("B")
    if component.name == "float64":
        out[:] = raw
    else:
        Caster(BY_NAME["float64"], component).cast(raw, out)
