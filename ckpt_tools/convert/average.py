"""`average`: the weights of several checkpoints of one model, averaged tensor by tensor.

Planned as an export or a reshard of the last one; each item of that plan then reads its box of all
of them, of any formats and meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ckpt_tools import formats
from ckpt_tools.convert.export import ExportOptions, ExportPlan, export_of, format_of
from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan, reshard_of
from ckpt_tools.convert.write import Conversion, Locate, WriteOptions
from ckpt_tools.copying.origin import option_texts
from ckpt_tools.copying.parallel import Tally, ignore_bytes
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.names import NamePatterns
from ckpt_tools.core.options import only_one_of, option
from ckpt_tools.core.plan import FilePlan, Finder, LazyPlans, Mean
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.proof.pairs import EntryDiff, by_fqn, compare_entries, equal_bits
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms import quantized

_AVERAGED = ("float", "complex")


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
        only_one_of({"--weights": self.weights is not None, "--ema": self.ema is not None})
        if self.ema is not None and not 0 <= self.ema <= 1:
            raise UsageError(f"--ema is a decay from 0 to 1, not {self.ema:g}.")
        given = self.weights or (1.0,)
        if not all(one >= 0 for one in given) or not 0 < sum(given) < math.inf:
            listed = ", ".join(f"{one:g}" for one in given)
            raise UsageError(f"--weights are numbers of 0 or more, and not all 0: {listed}.")

    def require_for(self, count: int) -> None:
        """Raise UsageError for fewer than two checkpoints, and for weights of other ones."""
        if count < 2:
            raise UsageError("An average is of two checkpoints or more.")
        if self.weights is not None and len(self.weights) != count:
            given = counted(len(self.weights), "weight")
            raise UsageError(f"{given} for {count} checkpoints: give one for each.")

    def mean_of(self, finders: Sequence[Finder]) -> Mean:
        """The average of one tensor of each checkpoint."""
        shares = self.weights or (1.0, *[1 - (self.ema or 0.0)] * (len(finders) - 1))
        terms = (*zip(shares, finders, strict=True),)
        if self.ema is not None:
            return Mean(terms, keep=self.ema, divisor=1.0)
        return Mean(terms, keep=1.0, divisor=math.fsum(shares))


def average_of(
    indexes: Sequence[CheckpointIndex],
    out: str,
    write: WriteOptions,
    weighting: Weighting,
    mesh: Mesh | None,
    names: NamePatterns,
) -> Conversion[ExportPlan | ReshardPlan]:
    """The average of these, the oldest first, as shards of a mesh, or whole as ``out`` is named.

    Raises UsageError for fewer than two, for weights of others, and for a file of shards. Its
    ``plan`` raises UnsupportedError for checkpoints that are not of one model, or quantized.
    """
    weighting.require_for(len(indexes))
    *others, last = indexes
    form, whole = format_of(out), ExportOptions(include=names.include, exclude=names.exclude)
    whole = whole if form is None else replace(whole, format=form)
    exports = [export_of(one, out, write, whole) for one in indexes]
    plan_last: Callable[[Locate], ExportPlan | ReshardPlan] = exports[-1].plan
    if mesh is not None:
        if form is not None:
            raise UsageError(f"--to-mesh writes a folder, and {out} is the name of a file.")
        shards = ReshardOptions(mesh, only="model", include=names.include, exclude=names.exclude)
        plan_last = reshard_of(last, out, write, shards).plan

    def planned(_: Locate) -> ExportPlan | ReshardPlan:  # all are located here
        return _plan(exports, plan_last(formats.locate), weighting, write)

    return Conversion(last, out, write, planned, (*others,))


def _plan(
    exports: Sequence[Conversion[ExportPlan]],
    plan: ExportPlan | ReshardPlan,
    weighting: Weighting,
    write: WriteOptions,
) -> ExportPlan | ReshardPlan:
    """The plan of the last one, its items averaged: the weights that each export would write."""
    if isinstance(plan, ReshardPlan) and plan.inside:
        raise UnsupportedError(
            f"{plan.chosen.root} has {counted(plan.inside, 'tensor')} inside of objects, which "
            "are copied as they are and not averaged.",
            hint="Leave --to-mesh out: full tensors are written of all of them.",
        )
    plans, differing = [one.plan(formats.locate) for one in exports], set[str]()
    with Files(sizes=write.sizes) as files:
        for one, each in zip(exports, plans, strict=True):
            differing |= _differing(one.index, each, plans[-1], files)
    models = [{one.fqn: one.entry for one in each.targets} for each in plans]
    bare = plans[-1].names
    names = {fqn: bare[own] for fqn, (own,) in plan.origins.items()}
    means = {
        fqn: weighting.mean_of([Finder(model[name]) for model in models])
        for fqn, name in names.items()
        if models[-1][name].dtype.kind in _AVERAGED
    }
    notes = [*plan.notes]
    if kept := len(names) - len(means):
        other = f"; they differ in {some(sorted(differing))}" if differing else ""
        held = f"{counted(kept, 'tensor')} of integers or bools"
        notes.append(f"Takes {held} from the last one, {plan.chosen.root}{other}.")
    files_of = (one._replace(make=partial(_averaged, means, one.make)) for one in plan.files.files)
    return replace(
        plan,
        files=LazyPlans(files_of),
        notes=(*notes,),
        means=means,
        also=tuple(one.chosen for one in plans[:-1]),
        settings={**plan.settings, **option_texts(weighting)},
    )


def _averaged(means: Mapping[str, Mean], make: Callable[[], FilePlan]) -> FilePlan:
    plan = make()
    return plan._replace(items=tuple(one._replace(mean=means.get(one.fqn)) for one in plan.items))


def _differing(index: CheckpointIndex, one: ExportPlan, last: ExportPlan, files: Files) -> set[str]:
    """Tensors that have no mean and are not what they are in the last checkpoint.

    Raises UnsupportedError for quantized weights, and for other names, shapes or types.
    """

    def values(header: EntryDiff, one: TensorEntry, other: TensorEntry) -> EntryDiff:
        skipped = header.status != "same" or one.dtype.kind in _AVERAGED
        if skipped or equal_bits(one, other, files, Tally(ignore_bytes)):
            return header
        return header._replace(status="values")

    if packed := sorted(quantized.recognise(index).members.keys() & one.names.keys()):
        raise UnsupportedError(
            f"{index.root}: {counted(len(packed), 'tensor')} of quantized weights cannot be "
            f"averaged: {some(packed)}."
        )
    here, there = (by_fqn(target.entry for target in plan.targets) for plan in (one, last))
    found = compare_entries(here, there, values, files, threads=None)
    others = [one for one in found if one.status not in ("same", "values")]
    if others:
        faults = [f"{one.name} ({one.a or 'nothing'} and {one.b or 'nothing'})" for one in others]
        raise UnsupportedError(
            f"{index.root} and {last.chosen.root} are not of one model: {some(faults)}.",
            hint="`ckpt-tools diff A B --only model --clean-names` lists what is different; "
            "--exclude leaves it out.",
        )
    return {one.name for one in found if one.status == "values"}
