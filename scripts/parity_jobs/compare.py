"""A few steps with everything noted, and how far two such runs lie apart.

``STEPS_BEFORE`` steps were trained before; both runs start from there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from scenarios import STEPS_AFTER, STEPS_BEFORE
from sides import Run, Tensors

# What a different order of summation may make of float32 within three steps, as a part of the
# largest number of the tensor's kind; of bfloat16 arithmetic where a policy asks for it.
FLOAT32_BOUND, BFLOAT16_BOUND = 2e-5, 2e-2


def go_on(run: Run) -> dict[str, Tensors]:
    """What is loaded, then losses, gradients, parameters and optimizer state of each step.

    Where the side accumulates, also each microbatch's gradients: synchronized, and each rank's own.
    """
    noted: dict[str, Tensors] = {
        "loaded": _named("p", run.parameters()) | _named("o", run.optimizer_state()),
        "losses": {},
        "gradients": {},
        "after": {},
    }
    if run.side.accumulate:
        noted["gradients"] |= _microbatches(run)
    for step in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
        noted["losses"][f"{step}"] = run.backward(step).cpu()
        if run.side.orig_params:
            noted["gradients"] |= _named(f"{step}", run.gradients())
        run.step()
        noted["after"] |= _named(f"{step}.p", run.parameters())
        noted["after"] |= _named(f"{step}.o", run.optimizer_state())
    return noted


def _named(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}:{name}": tensor for name, tensor in tensors.items()}


def _microbatches(run: Run) -> Tensors:
    """Gradients of separate microbatches of one step, and of the one that was not synchronized.

    Nothing of it stays: the gradients are dropped, and the optimizer takes no step.
    """
    import tiny

    found: Tensors = {}
    tokens, labels = map(run.part, tiny.batch(STEPS_BEFORE))
    for place, pair in enumerate(zip(tokens.chunk(2), labels.chunk(2), strict=True)):
        run._micro(*pair, sync=True, scale=1.0)  # noqa: SLF001
        found |= _named(f"micro{place}", run.gradients())
        run.optimizer.zero_grad(set_to_none=True)
    run._micro(tokens.chunk(2)[0], labels.chunk(2)[0], sync=False, scale=1.0)  # noqa: SLF001
    own = run.local_gradients()
    if not own:
        raise RuntimeError("A backward pass without synchronization left no gradients.")
    found |= _named("unsynced", {name: _mean(value, run) for name, value in sorted(own.items())})
    # the backward pass with sync that ends an accumulation, so that nothing is left behind
    run._micro(tokens.chunk(2)[1], labels.chunk(2)[1], sync=True, scale=1.0)  # noqa: SLF001
    found |= _named("accumulated", run.gradients())
    run.optimizer.zero_grad(set_to_none=True)
    return found


def _mean(value: torch.Tensor, run: Run) -> torch.Tensor:
    shared = value.to(run.device)
    dist.all_reduce(shared)
    return (shared / dist.get_world_size()).cpu()


def compared(truth: dict[str, Tensors], mine: dict[str, Tensors], *, bf16: bool) -> dict[str, str]:
    """One word for each thing compared: "bit-equal", "≤ 3e-08", or "DIFFERS …"."""
    bound = BFLOAT16_BOUND if bf16 else FLOAT32_BOUND
    said = {"loaded": _apart(truth["loaded"], mine["loaded"], bound=0.0)}
    for what in ("losses", "gradients", "after"):
        said[what] = _apart(truth[what], mine[what], bound=bound)
    return said


def _apart(truth: Tensors, mine: Tensors, *, bound: float) -> str:
    if truth.keys() != mine.keys():
        return f"DIFFERS: only one has {min(truth.keys() ^ mine.keys())}"
    worst, where = 0.0, ""
    for name, expected in truth.items():
        found = mine[name]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"DIFFERS: {name} is {found.dtype} {list(found.shape)}"
        if not torch.equal(found, expected):
            scale = expected.double().abs().max().clamp(min=1e-3)
            apart = float((found.double() - expected.double()).abs().max() / scale)
            if not apart <= worst:
                worst, where = apart, name
    if not where:
        return "bit-equal" if truth else "-"
    return f"≤ {worst:.0e}" if worst <= bound else f"DIFFERS: {where} by {worst:.1e}"
