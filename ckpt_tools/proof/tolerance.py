"""When two values count as the same."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.core.options import option


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Values are the same when they are at most ``atol + rtol * |b|`` apart.

    With both at zero they are compared bit by bit: a NaN's bits and a zero's sign count, too.
    """

    rtol: float = option(0.0, "--rtol", "Relative tolerance.", metavar="X", at_least=0)
    atol: float = option(0.0, "--atol", "Absolute tolerance.", metavar="X", at_least=0)

    @property
    def is_bitwise(self) -> bool:
        """Whether bits are compared rather than values."""
        return self.rtol == 0.0 and self.atol == 0.0
