"""What lets frameworks run FSDP on the CPU: they take it for accelerators only."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import OptimStateDictConfig, StateDictConfig

NO_OFFLOAD = "no offload from the CPU to itself, of which torch's FSDP1 dies"
STUB = f"DistributedType.FSDP set by hand (Accelerate has it for accelerators only); {NO_OFFLOAD}"


def stub_offload() -> None:
    """Let no config of a state dict offload to the CPU."""
    for config in (StateDictConfig, OptimStateDictConfig):
        config.__setattr__ = lambda self, key, value: object.__setattr__(
            self, key, value and key != "offload_to_cpu"
        )


def stub_accelerate(device: torch.device) -> str:
    """Call a CPU job with an FSDP plugin what it is; says what was stubbed."""
    if device.type != "cpu":
        return "nothing"
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

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
    stub_offload()
    return STUB
