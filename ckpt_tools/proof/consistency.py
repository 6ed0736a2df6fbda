"""Does the optimizer's state fit the model: is there state for each parameter, and the reverse?

Names only. Frozen parameters have no state, so missing state is a note and no problem; and a model
may split what its optimizer has in one. State for unknown parameters is a problem only when it is
most of the state: model and optimizer are then not of one save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import CheckpointError
from ckpt_tools.proof.canonical_names import Inside, owner_of

_MAX_CONTAINERS = 2
_BY_NUMBER = "Optimizer state is kept by number, so its parameters are not known."


class Consistency(NamedTuple):
    """What does not fit: problems, and notes."""

    problems: tuple[CheckpointError, ...] = ()
    notes: tuple[str, ...] = ()


def compare_model_and_optimizer(
    index: CheckpointIndex, inside: Mapping[str, Inside]
) -> Consistency:
    """Compare the model's names with those that the optimizer's state is for.

    Nothing is compared when either is absent, or when the state is numbered (a plain
    ``optimizer.state_dict()``).
    """
    model = {e.fqn: _own_names(inside[e.fqn].name) for e in index.tensors if e.section == "model"}
    state = _states(index, inside)
    if not model or not state:
        return Consistency()
    if all(name.isdecimal() for name in state):
        return Consistency(notes=(_BY_NUMBER,))
    tied = {fqn for group in index.ties for fqn in group}
    unknown = state.keys() - set().union(*model.values())
    bare = [fqn for fqn in model.keys() - tied if model[fqn].isdisjoint(state)]
    notes = _notes([inside[fqn].name for fqn in bare], state)
    if not unknown:
        return Consistency(notes=tuple(notes))
    fault = (
        f"{index.root} has optimizer state for {len(unknown)} parameters that it does not have: "
        f"{some(sorted(unknown))}."
    )
    if 2 * len(unknown) < len(state):  # as when the model's state dict splits a fused weight
        return Consistency(notes=(*notes, fault))
    error = CheckpointError(
        fault,
        hint="The weights are of another save or another model, or their names were changed.",
        about=sorted(fqn for owner in unknown for fqn in state[owner].values()),
    )
    return Consistency((error,), tuple(notes))


def _own_names(name: str) -> set[str]:
    """What an optimizer may call a weight: its name without one or two containers above it.

    ``{"policy": model.state_dict(), "optim": …}`` has a ``policy`` that no optimizer knows.
    """
    parts = name.split(".")
    return {".".join(parts[depth:]) for depth in range(min(len(parts), _MAX_CONTAINERS + 1))}


def _notes(bare: Collection[str], state: Mapping[str, Mapping[str, str]]) -> list[str]:
    notes = []
    if bare:
        notes.append(
            f"No optimizer state for {counted(len(bare), 'tensor')} of the model "
            f"({some(sorted(bare))}): normal for buffers and frozen parameters."
        )
    kinds = {frozenset(fqns) for fqns in state.values()}
    for kind in kinds:
        fuller = next((other for other in kinds if kind < other), None)
        if fuller is not None:
            owners = [name for name, fqns in state.items() if frozenset(fqns) == kind]
            lacking = ", ".join(sorted(fuller - kind))
            shown = some(sorted(owners))
            notes.append(
                f"No {lacking} for {counted(len(owners), 'parameter')}, others have: {shown}."
            )
    return sorted(notes)


def _states(index: CheckpointIndex, inside: Mapping[str, Inside]) -> dict[str, dict[str, str]]:
    """The optimizer's tensors by parameter and by what they are (``exp_avg``)."""
    states: dict[str, dict[str, str]] = {}
    for entry in index.tensors:
        owned = owner_of(inside[entry.fqn])
        if owned is not None:
            owner, kind = owned
            states.setdefault(owner, {})[kind] = entry.fqn
    return states
