"""`average`: the weights of several checkpoints of one model, averaged tensor by tensor.

Planned as an export or a reshard of the last one; each item of that plan then reads its box of all
of them, of any formats and meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from ckpt_tools import formats
from ckpt_tools.convert.export import ExportOptions, format_of, plan_export, renamed, single_file_of
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.reshard import ReshardOptions, plan_reshard
from ckpt_tools.convert.write import Conversion, Locate, WriteOptions
from ckpt_tools.copying.origin import option_texts, with_states
from ckpt_tools.copying.read import first_difference
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.names import Filters, select
from ckpt_tools.core.options import option
from ckpt_tools.core.plan import FilePlan, Finder, LazyPlans, Mean
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms import quantized

_AVERAGED = frozenset({"float", "complex"})
# A model's tensors by their names without containers and wrappers.
_Model = Mapping[str, TensorEntry]


def _parse_weights(text: str) -> tuple[float, ...]:
    """The weights in a list such as ``1,2,1``. Raises ValueError."""
    return tuple(map(float, text.split(",")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """How much each checkpoint counts: all alike without ``weights`` and ``ema``.

    Weights are divided by their sum. A moving average of decay d is a₁ = x₁ and
    aₖ = d·aₖ₋₁ + (1 - d)·xₖ. Raises UsageError for what is no such number.
    """

    weights: tuple[float, ...] | None = option(
        None,
        "--weights",
        "One weight, 0 or more, for each checkpoint: 1,2,1. They are divided by their sum.",
        metavar="LIST",
        parse=_parse_weights,
    )
    ema: float | None = option(
        None,
        "--ema",
        "An exponential moving average, the oldest first: D of the average so far and 1 - D of the "
        "next checkpoint.",
        metavar="D",
    )

    def __post_init__(self) -> None:
        if self.weights is not None and self.ema is not None:
            raise UsageError("--weights and --ema cannot be used together.")
        if self.ema is not None and not 0 <= self.ema <= 1:
            raise UsageError(f"--ema is a decay from 0 to 1, not {self.ema:g}.")
        given = self.weights or (1.0,)
        if not all(math.isfinite(one) and one >= 0 for one in given) or not sum(given):
            listed = ", ".join(f"{one:g}" for one in given)
            raise UsageError(f"--weights are numbers of 0 or more, and not all 0: {listed}.")

    def mean_of(self, finders: Sequence[Finder]) -> Mean:
        """The average of one tensor of each checkpoint."""
        if self.ema is not None:
            shares = [1.0, *[1 - self.ema] * (len(finders) - 1)]
            return Mean((*zip(shares, finders, strict=True),), keep=self.ema, divisor=1.0)
        weights = self.weights or (1.0,) * len(finders)
        return Mean((*zip(weights, finders, strict=True),), keep=1.0, divisor=math.fsum(weights))

    def __str__(self) -> str:
        """What it is, for a note."""
        if self.ema is not None:
            return f"a moving average of decay {self.ema:g}, the oldest first"
        shares = ", ".join(f"{one:g}" for one in self.weights or ())
        return f"weights {shares}" if shares else "all alike"


def average_of(
    indexes: Sequence[CheckpointIndex],
    out: str,
    write: WriteOptions,
    weighting: Weighting,
    mesh: Mesh | None,
) -> Average:
    """The average of these, the oldest first, as shards of a mesh, or whole as ``out`` is named.

    Raises UsageError for fewer than two, for weights of others, and for a file of shards.
    """
    form, count = format_of(out), len(indexes)
    if count < 2:
        raise UsageError("An average is of two checkpoints or more.")
    if weighting.weights is not None and len(weighting.weights) != count:
        given = counted(len(weighting.weights), "weight")
        raise UsageError(f"{given} for {count} checkpoints: give one for each.")
    if mesh is not None and form is not None:
        raise UsageError(f"--to-mesh writes a folder, and {out} is the name of a file.")
    *before, last = indexes
    whole = ExportOptions() if form is None else ExportOptions(format=form)
    target = whole if mesh is None else ReshardOptions(mesh, only="model")
    return Average(last, out, write, (*before,), weighting, target)


@dataclass(frozen=True, slots=True)
class Average(Conversion[Plan]):
    """The weights of ``before`` and of the last checkpoint, averaged, as ``target`` says."""

    before: tuple[CheckpointIndex, ...]
    weighting: Weighting
    target: ExportOptions | ReshardOptions

    @property
    def others(self) -> tuple[CheckpointIndex, ...]:
        """All checkpoints but the last."""
        return self.before

    def plan(self, locate: Locate) -> Plan:  # noqa: ARG002 (all are located here)
        """The plan of the last one, its items averaged.

        Raises UnsupportedError for checkpoints that are not of one model, or quantized, and what
        planning an export or a reshard raises.
        """
        plan, names = self._plan_of_last()
        every = (*self.before, self.index)
        with Files(sizes=self.write.sizes) as files:
            models = [_model_of(index, files) for index in every]
            for index, model in zip(self.before, models, strict=False):
                _require_alike(index.root, model, self.index.root, models[-1])
            kept = {name for name in names.values() if models[-1][name].dtype.kind not in _AVERAGED}
            differing = [name for name in sorted(kept) if _differs(name, models, files)]
        means = {
            fqn: self.weighting.mean_of([Finder(model[name]) for model in models])
            for fqn, name in names.items()
            if name not in kept
        }
        files_of = partial(_averaged, means)
        averaged = f"{counted(len(means), 'tensor')} of {len(every)} checkpoints"
        notes = [f"Averages {averaged} in float64, {self.weighting}; rounds once."]
        if kept:
            other = f"; they differ in {some(differing)}" if differing else ""
            held = counted(len(kept), "tensor")
            notes.append(
                f"Takes {held} of integers or bools from the last one, {self.index.root}{other}."
            )
        return replace(
            plan,
            files=LazyPlans(
                one._replace(make=partial(files_of, one.make)) for one in plan.files.files
            ),
            notes=(*plan.notes, *notes),
            means=means,
            also=tuple(select(index, Filters(only="model")) for index in self.before),
        )

    def _plan_of_last(self) -> tuple[Plan, Mapping[str, str]]:
        """How the last one alone would be written, and the bare name of each target."""
        index, target = self.index, self.target
        chosen = select(index, Filters(only="model"))
        bare = {
            one.origins[0]: one.entry.fqn
            for one in renamed(index, chosen.tensors, keep_names=False)[0]
        }
        if isinstance(target, ExportOptions):
            single_file = single_file_of(self.out, target.format)
            exported = plan_export(index, target, single_file=single_file, check=self.write.check)
            return exported, {fqn: bare[names[0]] for fqn, names in exported.origins.items()}
        resharded = plan_reshard(index, target)
        if resharded.inside:
            raise UnsupportedError(
                f"{index.root} has {counted(resharded.inside, 'tensor')} inside of objects, which "
                "are copied as they are and not averaged.",
                hint="Leave --to-mesh out: full tensors are written of all of them.",
            )
        return resharded, {one.fqn: bare[one.fqn] for one in resharded.targets}

    def settings(self, plan: Plan) -> dict[str, str]:  # noqa: ARG002 (the plan says no more)
        """The options, the weights, and the state of each other checkpoint."""
        texts = option_texts(self.target) | option_texts(self.weighting)
        for number, index in enumerate(self.before, 1):
            states = [str(file.state) for file in sorted(with_states(index.files))]
            texts[f"checkpoint {number}"] = sha256(repr(states).encode()).hexdigest()[:32]
        return texts

    def record(self, plan: Plan, folder: str, statement: str) -> None:
        """Write the proof where an export or a reshard has it."""
        from ckpt_tools.convert import check as checking

        if isinstance(self.target, ExportOptions):
            checking.record_in_headers(folder, plan.files, statement)
        else:
            checking.record_beside(folder, statement, source=self.index)


def _averaged(means: Mapping[str, Mean], make: Callable[[], FilePlan]) -> FilePlan:
    plan = make()
    return plan._replace(items=tuple(one._replace(mean=means.get(one.fqn)) for one in plan.items))


def _model_of(index: CheckpointIndex, files: Files) -> _Model:
    """The located weights of a checkpoint by their bare names.

    Raises what keeps them from being whole, and UnsupportedError for quantized ones.
    """
    located = formats.locate(select(index, Filters(only="model")), files)
    located.require_chosen()
    members = quantized.recognise(index).members
    packed = sorted(entry.fqn for entry in located.tensors if entry.fqn in members)
    if packed:
        raise UnsupportedError(
            f"{index.root}: {counted(len(packed), 'tensor')} of quantized weights cannot be "
            f"averaged: {some(packed)}."
        )
    bare, _ = renamed(index, located.tensors, keep_names=False)
    return {one.entry.fqn: one.entry for one in bare}


def _require_alike(root: str, model: _Model, last_root: str, last: _Model) -> None:
    """Raise UnsupportedError unless both have the same names, shapes and types."""
    compare = "`ckpt-tools diff A B --only model` lists what is different."
    alone = sorted(model.keys() ^ last.keys())
    if alone:
        raise UnsupportedError(
            f"{root} and {last_root} are not of one model: only one of them has {some(alone)}.",
            hint=compare,
        )
    for name, entry in model.items():
        one, other = (f"{x.dtype.name} {list(x.shape)}" for x in (entry, last[name]))
        if one != other:
            raise UnsupportedError(
                f"{name} is {one} in {root} and {other} in {last_root}.", hint=compare
            )


def _differs(name: str, models: Sequence[_Model], files: Files) -> bool:
    """Whether any checkpoint has other elements in a tensor than the last one."""
    last = models[-1][name]
    box = Box.whole(last.shape)
    return any(
        first_difference(model[name], last, box, files=files) is not None for model in models[:-1]
    )
