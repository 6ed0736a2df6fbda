"""Weighted sums of the elements that several checkpoints hold of one tensor, in float64.

Rounded once, to the tensor's own type. What is read from where is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np  # noqa: TID253 - imported late, and only to average

from ckpt_tools.copying.cast import Caster, numbers
from ckpt_tools.core.dtypes import BY_NAME, DType
from ckpt_tools.core.plan import Mean

if TYPE_CHECKING:
    from ckpt_tools.copying.cast import Numbers

# A complex number is two of these, and weights are real.
_COMPONENTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


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
    component = BY_NAME[_COMPONENTS.get(dtype.name, dtype.name)]
    raw = total.data.cast("B")
    if component.name == "float64":
        out[:] = raw
    else:
        Caster(BY_NAME["float64"], component).cast(raw, out)
