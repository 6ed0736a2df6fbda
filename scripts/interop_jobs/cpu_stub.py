"""What lets Accelerate run FSDP on the CPU: it takes FSDP for accelerators only."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig

STUB = (
    "DistributedType.FSDP set by hand (Accelerate has FSDP for accelerators only); no offload from "
    "the CPU to itself, of which torch's FSDP1 dies"
)


def stub_accelerate(device: torch.device) -> str:
    """Call a CPU job with an FSDP plugin what it is; says what was stubbed."""
    if device.type != "cpu":
        return "nothing"
    begin = AcceleratorState.__init__

    def begin_with_fsdp(
        self: AcceleratorState, *arguments: object, fsdp_plugin: object = None, **more: object
    ) -> None:
        begin(self, *arguments, fsdp_plugin=fsdp_plugin, **more)
        if fsdp_plugin is not None:
            for state in (PartialState, AcceleratorState):
                state._shared_state["distributed_type"] = DistributedType.FSDP  # noqa: SLF001
                state._shared_state["device"] = torch.device("cpu")  # noqa: SLF001
            AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin  # noqa: SLF001

    AcceleratorState.__init__ = begin_with_fsdp
    for config in (StateDictConfig, OptimStateDictConfig):
        config.__setattr__ = lambda self, key, value: object.__setattr__(
            self, key, value and key != "offload_to_cpu"
        )
    return STUB
