"""What optimizers keep for a parameter, by the keys in their state.

Names only, from the optimizers of torch 2.13 and of packages that people train with. Adam and AdamW
keep the same keys: only the code that built the optimizer knows which it was.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# The keys that each keeps, a counter of steps not counted. The first whose keys are all there is
# meant, so those with more keys come first.
STATES_OF = {
    "Adam or AdamW with amsgrad": frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    "NAdam": frozenset({"exp_avg", "exp_avg_sq", "mu_product"}),
    "Adam or AdamW": frozenset({"exp_avg", "exp_avg_sq"}),
    "AdamW, schedule-free": frozenset({"z", "exp_avg_sq"}),
    "Adam or AdamW in 8 bits": frozenset({"state1", "state2", "qmap1", "qmap2"}),
    "SGD or Lion in 8 bits": frozenset({"state1", "qmap1"}),
    "Adamax": frozenset({"exp_avg", "exp_inf"}),
    "Adafactor": frozenset({"row_var", "col_var"}),
    "Adadelta": frozenset({"square_avg", "acc_delta"}),
    "RMSprop": frozenset({"square_avg"}),
    "Rprop": frozenset({"prev", "step_size"}),
    "ASGD": frozenset({"ax", "eta", "mu"}),
    "Lion, or another that keeps one average": frozenset({"exp_avg"}),
    "SGD with momentum, or Muon": frozenset({"momentum_buffer"}),
    "Adagrad": frozenset({"sum"}),
    "SGD, schedule-free": frozenset({"z"}),
}

# State that has the parameter's own shape, in every optimizer of torch that has it; in some others
# it is one number.
LIKE_PARAMETER = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "sum"}
)


_OF_MEGATRON = re.compile(r"(?:optimizer\.)?state\.(exp_avg|exp_avg_sq|fp32_param)\.(.+)")


def megatron_state(name: str) -> tuple[str, str] | None:
    """The parameter, and what is kept for it, of a state as Megatron-core's torch_dist calls it.

    ``optimizer.state.exp_avg.decoder.weight`` gives ``("decoder.weight", "exp_avg")``; others have
    the parameter first.
    """
    match = _OF_MEGATRON.fullmatch(name)
    return None if match is None else (match[2], match[1])


def kind_of(keys: Collection[str]) -> str | None:
    """The name of the optimizer that keeps these keys, None when none is known to."""
    return next((name for name, states in STATES_OF.items() if states <= set(keys)), None)
