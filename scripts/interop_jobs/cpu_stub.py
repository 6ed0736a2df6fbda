"""What lets Accelerate run FSDP on the CPU: it takes FSDP for accelerators only."""

from __future__ import annotations

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

STUB = "DistributedType.FSDP set by hand: Accelerate has FSDP for accelerators only"


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
            AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin  # noqa: SLF001

    AcceleratorState.__init__ = begin_with_fsdp
    return STUB
