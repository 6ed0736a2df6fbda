"""Does the optimizer's state fit the model: is there state for each parameter, and the reverse? And
do the data files fit each other: are they of one save?

Names and sizes only, but for the optimizer's counts of steps. Frozen parameters have no state, so
missing state is a note and no problem. State for unknown parameters is a problem only when it is
most of the state: model and optimizer are then not of one save. And a model may split what its
optimizer has in one (TorchTitan):

    model       attention.wq.weight [16,16], attention.wk.weight [8,16], attention.wv.weight [8,16]
    optimizer   attention.wqkv.weight [32,16]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from posixpath import basename

from ckpt_tools.core.index import ByteRange, CheckpointIndex, LocatedIndex, TensorEntry
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import CheckpointError
from ckpt_tools.proof.canonical_names import Inside, owner_of
from ckpt_tools.storage.reader import Files

_MAX_CONTAINERS = 2
_MAX_STEPS = 16  # counts of steps that are read of one file
# The optimizer's tensors by parameter and by what they are (``exp_avg``).
_States = dict[str, dict[str, str]]
_BY_NUMBER = "Optimizer state is kept by number, so its parameters are not known."


def compare_model_and_optimizer(
    index: CheckpointIndex, inside: Mapping[str, Inside]
) -> tuple[list[CheckpointError], list[str]]:
    """What does not fit, as problems and as notes: the model's names, and those that the
    optimizer's state is for.

    Nothing is compared when either is absent, when a part of them is not read here, or when the
    state is numbered (a plain ``optimizer.state_dict()``).
    """
    model: dict[str, set[str]] = {}
    for entry in index.tensors:
        if entry.section == "model":
            # An optimizer may know its name without one or two containers above it: it has no
            # "policy" of {"policy": model.state_dict(), "optim": …}.
            parts = inside[entry.fqn].name.split(".")
            most = min(len(parts), _MAX_CONTAINERS + 1)
            model[entry.fqn] = {".".join(parts[depth:]) for depth in range(most)}
    state = _states_of(index, inside)
    if not model or not state or index.unread:
        return [], []
    if all(name.isdecimal() for name in state):
        return [], [_BY_NUMBER]
    tied = {fqn for group in index.ties for fqn in group}
    unknown = state.keys() - set().union(*model.values())
    bare = {fqn for fqn in model.keys() - tied if state.keys().isdisjoint(model[fqn])}
    split = _split_in_model(index, {fqn: model[fqn] for fqn in bare}, unknown, state)
    unknown -= split.keys()
    bare = bare.difference(*split.values())
    notes = _notes([inside[fqn].name for fqn in bare], state, split)
    if not unknown:
        return [], notes
    fault = (
        f"{index.root} has optimizer state for {counted(len(unknown), 'parameter')} that it does "
        f"not have: {some(sorted(unknown))}."
    )
    if 2 * len(unknown) < len(state):
        return [], [*notes, fault]
    error = CheckpointError(
        fault,
        hint="The weights are of another save or another model, or their names were changed.",
        about=sorted(fqn for owner in unknown for fqn in state[owner].values()),
    )
    return [error], notes


def compare_steps(
    index: LocatedIndex, files: Files, *, is_good: Callable[[ByteRange], bool]
) -> list[str]:
    """A note when data files may be of two saves: the optimizer's counts of steps are alike in each
    file, and differ between files.

    A save over an older one that was interrupted leaves such a mix, and nothing else tells it: the
    names, places and lengths are the same, and each item has its own checksum.
    """
    counts: dict[str, list[tuple[TensorEntry, ByteRange]]] = defaultdict(list)
    for entry in index.tensors:
        if entry.section == "optim" and entry.numel == 1 and entry.fqn.endswith(".step"):
            held = [chunk for chunk in entry.chunks if chunk.box.numel and chunk.codec is None]
            if len(held) == 1 and is_good(held[0].data):
                counts[held[0].data.path].append((entry, held[0].data))
    if len(counts) < 2:
        return []
    found: dict[bytes, tuple[str, TensorEntry]] = {}
    for path, own in sorted(counts.items()):
        read = {
            files.read(path, data.offset, entry.dtype.itemsize): (basename(path), entry)
            for entry, data in islice(own, _MAX_STEPS)
        }
        if len(read) > 1:
            return []
        found |= read
    if len(found) < 2:
        return []
    from ckpt_tools.copying.cast import decode  # late: numpy comes with it

    steps = {decode(value, one.dtype)[0]: (name, one) for value, (name, one) in found.items()}
    shown = sorted(f"{step:.9g} in {name} ({one.fqn})" for step, (name, one) in steps.items())
    note = (
        f"The optimizer counts different steps: {some(shown, 2)}. Either the files are of "
        f"{len(steps)} saves, as after a save over an older one that was interrupted, or these "
        "parameters were trained for different times."
    )
    return [note] if len(steps) > 1 else []


def _split_in_model(
    index: CheckpointIndex,
    bare: Mapping[str, Collection[str]],
    unknown: Collection[str],
    state: _States,
) -> dict[str, list[str]]:
    """The parameters of the optimizer that are several tensors of the model, with these.

    ``bare`` are tensors without a state, with what an optimizer may call them. They stand in one
    module, under the parameter's own last name, and together have as many elements as its state.
    """
    beside: dict[tuple[str, str], list[str]] = defaultdict(list)
    for fqn, own_names in sorted(bare.items()):
        for place in set(map(_place, own_names)):
            beside[place].append(fqn)
    numel = {entry.fqn: entry.numel for entry in index.tensors}
    split = {}
    for owner in sorted(unknown):
        parts, most = beside[_place(owner)], max(numel[fqn] for fqn in state[owner].values())
        if len(parts) > 1 and sum(numel[fqn] for fqn in parts) == most:
            split[owner] = parts
    return split


def _place(name: str) -> tuple[str, str]:
    """The module that the module of a parameter stands in, and the last part of its name."""
    module, _, last = name.rpartition(".")
    return module.rpartition(".")[0], last


def _notes(bare: Collection[str], state: _States, split: Mapping[str, Sequence[str]]) -> list[str]:
    notes = []
    if split:
        said = [f"{owner} is {', '.join(parts)}" for owner, parts in split.items()]
        notes.append(
            f"The optimizer has one state for what is split in the model: {some(said, 2)}."
        )
    if bare:
        notes.append(
            f"No optimizer state for {counted(len(bare), 'tensor')} of the model "
            f"({some(sorted(bare))}): normal for buffers and frozen parameters."
        )
    kinds = {frozenset(held) for held in state.values()}
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


def _states_of(index: CheckpointIndex, inside: Mapping[str, Inside]) -> _States:
    """The state of each parameter that the optimizer has any of."""
    states: _States = {}
    for entry in index.tensors:
        owned = owner_of(inside[entry.fqn])
        if owned is not None:
            owner, kind = owned
            states.setdefault(owner, {})[kind] = entry.fqn
    return states
