"""All that `inspect` says of a checkpoint, as one object.

It opens no file: the step and the time of the save are handed in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckpt_tools.analysis import summary
from ckpt_tools.analysis.infer_mesh import FoundMesh, mesh_json
from ckpt_tools.analysis.summary import CUT_FREELY, UNEVEN, Step
from ckpt_tools.core.index import CheckpointIndex, Count, Entry, Section
from ckpt_tools.core.names import is_in_param_groups
from ckpt_tools.core.optimizer_states import STATES_OF, kind_of, megatron_state
from ckpt_tools.core.records import Json, as_json
from ckpt_tools.core.text import ago, counted, format_size, some, utc
from ckpt_tools.errors import CheckpointError, fault_in

_MOST_IN_HTML = 20  # tensors
_MAX_NAMED = 5
# Hyper-parameters that only optimizers with state of each weight have: Adam and its like, Adadelta,
# RMSprop, Adagrad, Rprop.
_OF_STATEFUL = frozenset({"betas", "rho", "alpha", "lr_decay", "etas"})


class OptimizerSummary(NamedTuple):
    """Which optimizer it seems to be, and the names of the tensors that it keeps."""

    kind: str
    states: tuple[str, ...]


class Verdict(NamedTuple):
    """A yes or a no, and why."""

    yes: bool
    reason: str


class VerdictPart(NamedTuple):
    """A part of the verdict, and whether it is good news."""

    text: str
    kind: Literal["good", "bad", "doubtful", "plain"] = "plain"


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint is: ``nbytes`` of all files. ``saved`` is the date of the newest, in
    seconds since 1970: no format states when it was saved.

    ``problems`` are what headers tell; only `verify` reads every byte. ``placements`` are texts
    with how many tensors lie so, ``files`` how many files there should be, ``ties`` groups of names
    that share a storage.
    """

    root: str
    format: str
    resume: Verdict
    step: Step | None
    saved: float | None
    framework: str | None
    torch_version: str | None
    world_size: int | None
    mesh: FoundMesh | None
    placements: tuple[tuple[str, int], ...]
    sections: Mapping[Section, Count]
    optimizer: OptimizerSummary | None
    files: int
    nbytes: int
    missing: tuple[str, ...]
    problems: tuple[CheckpointError, ...]
    ties: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]

    @property
    def fault(self) -> str | None:
        """The gravest problem in a word or two, None when there is none."""
        return fault_in(self.problems)

    @property
    def is_sharded(self) -> bool:
        """Whether any tensor is in pieces."""
        freely = (CUT_FREELY, UNEVEN)
        return self.mesh is not None or any(text.startswith(freely) for text, _ in self.placements)

    @property
    def whole(self) -> bool:
        """Whether headers tell of no fault."""
        return not self.problems

    @property
    def state(self) -> tuple[VerdictPart, ...]:
        """The part of the verdict that stays true when it is read later: all but the age."""
        parts = [
            VerdictPart("complete by its headers", "good")
            if self.fault is None
            else VerdictPart(self.fault, "bad"),
            VerdictPart("training can resume", "good")
            if self.resume.yes
            else VerdictPart("training cannot resume", "doubtful"),
        ]
        if self.step is not None:
            parts.append(VerdictPart(f"step {self.step.value:,}"))
        return tuple(parts)

    @property
    def verdict(self) -> tuple[VerdictPart, ...]:
        """The short answer: whole or not, resumable or not, step, age."""
        if self.saved is None:
            return self.state
        return (*self.state, VerdictPart(f"files of {ago(time.time() - self.saved)}"))

    def to_dict(self) -> dict[str, Json]:
        """The object of schema ckpt-tools/inspect/1, which `inspect --json` prints."""
        return {
            "schema": "ckpt-tools/inspect/1",
            "path": self.root,
            "format": self.format,
            "framework": self.framework,
            "torch": self.torch_version,
            "world_size": self.world_size,
            "mesh": as_json(self.mesh) or mesh_json(None, None),
            "placements": [
                {"tensors": count, "placements": text} for text, count in self.placements
            ],
            "sections": as_json(self.sections),
            "optimizer": as_json(self.optimizer),
            "step": as_json(self.step),
            "resume": {"possible": self.resume.yes, "reason": self.resume.reason},
            "saved": None if self.saved is None else utc(self.saved),
            "files": {"count": self.files, "nbytes": self.nbytes, "missing": [*self.missing]},
            "complete": self.whole,
            "problems": as_json(self.problems),
            "ties": as_json(self.ties),
            "notes": [*self.notes],
        }

    def __str__(self) -> str:
        """A few lines for a person."""
        lines = [self.root, f"  {', '.join(part.text for part in self.verdict)}"]
        ranks = "" if self.world_size is None else f", {counted(self.world_size, 'rank')}"
        lines.append(f"  {self.format}{ranks}, mesh {self.mesh or 'not stated'}")
        lines += [
            f"  {name}: {counted(one.tensors, 'tensor')}, {counted(one.objects, 'object')}, "
            f"{format_size(one.nbytes)}"
            for name, one in self.sections.items()
            if one.tensors or one.objects
        ]
        if not self.resume.yes:
            lines.append(f"  {self.resume.reason}")
        return "\n".join(lines)

    __repr__ = __str__


def inspect(
    whole: CheckpointIndex,
    chosen: CheckpointIndex | None = None,
    *,
    step: Step | None,
    saved: float | None,
) -> Inspection:
    """What is known of a checkpoint; sections and placements are those of the chosen entries."""
    mesh = summary.mesh_of(whole)
    index = whole if chosen is None else chosen
    return Inspection(
        root=whole.root,
        format=whole.format,
        resume=resume_verdict(whole),
        step=step,
        saved=saved,
        framework=whole.framework,
        torch_version=whole.torch_version,
        world_size=whole.world_size,
        mesh=mesh,
        placements=tuple(summary.placements_of(index, mesh)),
        sections=summary.sections_of(index),
        optimizer=optimizer_of(whole),
        files=len(whole.files),
        nbytes=whole.file_bytes,
        missing=whole.missing,
        problems=whole.problems,
        ties=whole.ties,
        notes=whole.notes,
    )


def optimizer_of(index: CheckpointIndex) -> OptimizerSummary | None:
    """The optimizer, by the names of its state; None when there is no state."""
    entries: list[Entry] = [*index.tensors, *index.unread]
    names = set()
    for entry in entries:
        if entry.section == "optim":
            found = megatron_state(entry.fqn)
            names.add(str(entry.path[-1]).rpartition(".")[2] if found is None else found[1])
    if not names:
        return None
    kind = kind_of(names)
    if kind is None:
        return OptimizerSummary("unknown", tuple(sorted(names)[:_MAX_NAMED]))
    return OptimizerSummary(kind, tuple(sorted(STATES_OF[kind] | (names & {"step"}))))


def resume_verdict(index: CheckpointIndex) -> Verdict:
    """Whether training can resume from this checkpoint, as far as its entries show."""
    if index.problems:
        return _no(index.problems[0].first_line)
    unread = [entry for entry in index.unread if entry.section in ("model", "optim")]
    held = {entry.section for entry in index.tensors} | {entry.section for entry in unread}
    if "model" not in held:
        return _no("the model weights are missing")
    groups = [
        entry
        for entry in index.entries
        if entry.section == "optim" and is_in_param_groups(entry.path)
    ]
    if "optim" not in held and not groups:
        return _no("the optimizer state is missing; the weights can start a new run")
    flawed = [e for e in index.objects if e.flaw is not None and e.section in ("model", "optim")]
    bad = [entry for entry in flawed if entry not in unread]
    if bad:
        shown = some([entry.fqn for entry in bad])
        return _no(f"{shown} cannot be read: {bad[0].flaw}".partition("\n")[0])
    of_megatron = any(megatron_state(e.fqn) for e in index.tensors if e.section == "optim")
    if not groups and not of_megatron:
        return _no(
            "the optimizer's param_groups are missing, and an optimizer cannot load without them"
        )
    words = {str(part).rpartition(".")[2] for group in groups for part in group.path}
    if "optim" not in held and not words.isdisjoint(_OF_STATEFUL):
        return _no(
            "the optimizer has param_groups and none of its tensors, as before its very first step"
        )
    reason = "model and optimizer state are complete by their headers (verify reads the values)"
    if "optim" not in held:
        reason = "the model is complete, and the optimizer keeps no tensors"
    if of_megatron and not groups:
        reason += "; Megatron-core has the optimizer's param_groups in its common state"
    if unread:  # by this program; the job has the library that they are of
        reason += f"; {some([entry.fqn for entry in unread])} not read here: {unread[0].flaw}"
    return Verdict(yes=True, reason=reason.partition("\n")[0])


def _no(reason: str) -> Verdict:
    return Verdict(yes=False, reason=reason)


def html_of(index: CheckpointIndex, facts: str) -> str:
    """For a notebook: the lines of ``facts``, the first as a heading, and the first tensors."""
    from html import escape  # late: only notebooks ask for it

    first, *rest = map(escape, facts.splitlines())
    rows = [
        f"<tr><td>{escape(entry.fqn)}</td><td>{entry.dtype.name}</td>"
        f"<td>{list(entry.shape)}</td><td>{format_size(entry.nbytes)}</td></tr>"
        for entry in index.tensors[:_MOST_IN_HTML]
    ]
    more = len(index.tensors) - len(rows)
    last = f"<p>and {more:,} more tensors</p>" if more > 0 else ""
    head = "<tr><th>name</th><th>dtype</th><th>shape</th><th>size</th></tr>"
    return f"<b>{first}</b><br>{'<br>'.join(rest)}<table>{head}{''.join(rows)}</table>{last}"
