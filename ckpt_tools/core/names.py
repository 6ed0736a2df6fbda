"""Names and sections: wrapper components, containers, and the filters that choose entries.

A path is the place of an entry in the nested state dict, e.g. ``("app", "model", "emb.weight")``;
its fqn is the same joined by dots. A container is the part of a path above the parameter's own
name, and it is known from the path, never from splitting a name. Of a dict without nesting, an
optimizer's state alone is told by its names.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from glob import escape

from ckpt_tools.core.index import SECTIONS, CheckpointIndex, Path, Section
from ckpt_tools.core.optimizer_states import STATES_OF
from ckpt_tools.core.options import option, repeated
from ckpt_tools.errors import AnswerNo, CheckpointError, Instead, NoSuchEntry, UsageError, Way

# Wrapper modules leave one of these components in a parameter's name: torch.compile, FSDP1, and
# torch.distributed.algorithms' checkpoint_wrapper.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# What frameworks call the container of the model's weights and that of the optimizer's state.
_MODEL = frozenset(
    {"model", "module", "state_dict", "model_state_dict", "model_state", "models", "net"}
)
_OPTIM = frozenset(
    {"optim", "optimizer", "optimizers", "optimizer_state_dict", "optimizer_states"}
    | {"optim_state_dict", "optimizer_0"}
)
# Containers that hold the others: Composer nests all in "state", torch's examples in "app".
_OUTER = frozenset({"state", "app", "checkpoint", "trainer", "train_state"})
# fmt: off
_OTHER = frozenset({
    "lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "dataloader", "dataloaders",
    "train_state", "trainer", "rng", "rng_state", "step", "epoch", "global_step", "callbacks",
    "loops", "hparams_name", "hyper_parameters", "pytorch-lightning_version", "extra",
    "extra_state", "timestamp", "train_dataloader", "algorithms", "integrations", "metadata",
    "meta", "grad_scaler", "random_state", "random_states",
})
# fmt: on

# The name of an optimizer's state in a dict without nesting: "optim.state.w.exp_avg".
_KINDS = frozenset({"step"}).union(*STATES_OF.values())
_FLAT_OPTIM = re.compile(
    rf"((?:app\.)?(?:{'|'.join(_OPTIM)})\.(?:[^.]+\.)?)"
    r"(?:(?P<groups>param_groups)\.|state\.(?P<param>.+)\.(?P<kind>[^.]+)\Z)"
)

# What counts the steps of a job, alike on all its ranks, and the containers that hold such counts.
# A dataloader's or a sampler's count is its rank's own.
_STEPS = frozenset({"step", "_step", "global_step", "global_steps", "epoch", "iteration"})
_SCHEDULERS = frozenset({"lr_scheduler", "lr_schedulers", "scheduler", "schedulers"})
_SCHEDULER_STEPS = frozenset({"last_epoch", "_step_count"})
_OF_JOB = _OUTER | {"extra", "extra_state", "timestamp", "meta"}

_FEW = 3  # objects that are left out by name
_MAX_NEAR = 5
# difflib is slow: of more names than these, only those with the same last part are compared.
_MAX_COMPARED = 5_000


def join(path: Path) -> str:
    """The fqn of a path."""
    return ".".join(map(str, path))


def container_of(paths: Iterable[Path]) -> dict[Path, Section]:
    """Which container prefixes of these paths hold the model, and which the optimizer.

    Returns prefixes (without the entry's own last part) with their section. A prefix counts when
    its last component is one of the names that frameworks use, and all components before it are
    outer containers; one more such name is a part of it if all is in that (slime saves
    ``model_state.model``). Under any other name, what holds ``param_groups`` is an optimizer's.
    """
    containers: dict[Path, Section] = {}
    below: dict[Path, set[Path]] = defaultdict(set)
    for path in paths:
        depth = _named_depth(path)
        if depth:
            containers[path[:depth]] = "model" if str(path[depth - 1]) in _MODEL else "optim"
            below[path[:depth]].add(path[depth:-1][:1])
            continue
        groups = (at for at, part in enumerate(path) if _first_word(part) == "param_groups")
        above = path[: next(groups, 0)]
        if above:
            containers[above] = "optim"
    for container, inner in below.items():
        (name,) = inner if len(inner) == 1 else ((),)
        if containers[container] == "model" and name and str(name[0]) in _MODEL:
            containers[container + name] = containers.pop(container)
    return containers


def _named_depth(path: Path) -> int:
    """How many components of a path are a container that frameworks name so; 0 for none."""
    for depth, part in enumerate(path[:-1], 1):
        if is_container_name(part):
            return depth
        if str(part) not in _OUTER:
            break
    return 0


def is_container_name(part: str | int) -> bool:
    """Whether frameworks call a container of weights or of an optimizer's state so."""
    return str(part) in _MODEL or str(part) in _OPTIM


def classify(
    paths: Sequence[Path], *, objects: Collection[Path] = ()
) -> list[tuple[Section, Path]]:
    """The section of each path, and the container prefix that its names stand in.

    ``objects`` are those of the paths that are not tensors. Beside a model container, names outside
    of any container are other state. Without one, the tensors that no container of other state
    holds are the model (TorchTitan saves it so), unless ``state`` and ``param_groups`` of an
    optimizer are at the top, or flattened names that begin so. Names without nesting, as in a
    safetensors file, can be of an optimizer, too (`_flat_optim`).
    """
    containers = container_of(paths)
    has_model = "model" in containers.values()
    bare_optim = any(_first_word(path[0]) == "param_groups" for path in paths)
    flat_optim = _flat_optim({str(path[0]) for path in paths})
    classified: list[tuple[Section, Path]] = []
    for path in paths:
        above = (path[:depth] for depth in range(len(path) - 1, 0, -1))
        container: Path = next((prefix for prefix in above if prefix in containers), ())
        section: Section = "other"
        if container:
            section = containers[container]
        elif bare_optim:
            section = "optim" if _first_word(path[0]) in ("state", "param_groups") else "other"
        elif str(path[0]) in flat_optim:
            section = "optim"
        elif not has_model and _may_be_weight(path, objects):
            section = "model"
        classified.append((section, container))
    return classified


def _flat_optim(held: Collection[str]) -> set[str]:
    """Which names are of an optimizer, as ``optim.state.w.exp_avg`` is: by what is kept there, by
    the parameter, which is there, too, or by others of the same optimizer.
    """
    found = [match for match in map(_FLAT_OPTIM.match, held) if match]
    above = ("", *(f"{outer}{name}." for name in _MODEL for outer in ("", "app.")))
    known = {
        match[1]
        for match in found
        if match["groups"]
        or match["kind"] in _KINDS
        or any(container + match["param"] in held for container in above)
    }
    return {match.string for match in found if match[1] in known}


def sections_of(paths: Sequence[Path], *, objects: Collection[Path]) -> dict[Path, Section]:
    """The section of each path, as `classify` gives it."""
    classified = classify(paths, objects=objects)
    return {path: section for path, (section, _) in zip(paths, classified, strict=True)}


def containers_of(index: CheckpointIndex) -> dict[str, Path]:
    """The container prefix of each entry by its name, as `classify` gives it; () for none."""
    objects = {entry.path for entry in index.objects}
    classified = classify([entry.path for entry in index.entries], objects=objects)
    return {e.fqn: prefix for e, (_, prefix) in zip(index.entries, classified, strict=True)}


def _first_word(part: str | int) -> str:
    """A component up to its first dot; flattened, ``param_groups.w.lr`` is one component."""
    return str(part).partition(".")[0]


def _may_be_weight(path: Path, objects: Collection[Path]) -> bool:
    """Whether a name outside of any container can be a model's."""
    if path in objects:
        return str(path[-1]).endswith("_extra_state")
    return str(path[0]) not in _OTHER and "rng_state" not in str(path[0])


def unwrapped(name: str) -> str:
    """The name without the components of wrapper modules, as torch's own state dict calls name it.

    Whole components only: ``gate_orig_mod.weight`` keeps its name. A leading ``module`` stays: it
    may be the model's own (Composer's is), and nothing tells it from that of DDP.
    """
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def clean(name: str) -> str:
    """The name without wrapper components and without a leading DDP ``module``."""
    first, dot, rest = unwrapped(name).partition(".")
    return rest if first == "module" and dot else first + dot + rest


@dataclass(frozen=True, slots=True, kw_only=True)
class NamePatterns:
    """Which names are wanted: those that match, and those that do not."""

    include: tuple[str, ...] = repeated(
        "-i --include",
        "Only names that match this glob, or the regex after `re:`. Repeatable.",
        metavar="GLOB",
        heading="Which entries",
        parse=str,
    )
    exclude: tuple[str, ...] = repeated(
        "-x --exclude",
        "Leave out names that match.",
        metavar="GLOB",
        heading="Which entries",
        parse=str,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters(NamePatterns):
    """Which entries are wanted: name patterns, and a section or None for all."""

    only: Section | None = option(
        None,
        "--only",
        "Only this section.",
        heading="Which entries",
        choices={**{section: section for section in SECTIONS}, "all": None},
    )

    @property
    def wants_all(self) -> bool:
        """Whether nothing is filtered at all."""
        return not (self.include or self.exclude or self.only)


def selector(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """A test for names: in any of ``include`` (all when it is empty) and in none of ``exclude``.

    Patterns are globs on the whole fqn, or regular expressions after ``re:``.
    Raises UsageError for a pattern that cannot be read.
    """
    wanted, unwanted = [*map(matcher, include)], [*map(matcher, exclude)]

    def chosen(fqn: str) -> bool:
        if any(matches(fqn) for matches in unwanted):
            return False
        return not wanted or any(matches(fqn) for matches in wanted)

    return chosen


def idle(texts: Iterable[str], held: Iterable[str]) -> list[str]:
    """The patterns that match none of these names."""
    patterns = dict.fromkeys(texts)
    names = [*held] if patterns else []
    return [text for text in patterns if not any(map(matcher(text), names))]


def matcher(text: str) -> Callable[[str], re.Match[str] | None]:
    """What tells whether a name matches one pattern. Raises UsageError as `selector` does."""
    if not text.startswith("re:"):
        return re.compile(translate(text)).match
    try:
        return re.compile(text[3:]).search
    except re.error as error:
        raise UsageError(f"The regular expression {text[3:]!r} cannot be read: {error}.") from error


def select(index: CheckpointIndex, wanted: Filters) -> CheckpointIndex:
    """The part of a checkpoint that the filters choose, with the problems it has.

    The patterns choose lost names as they would have chosen the entries; which section those were
    in is not known, so a section alone chooses them all, but for parts of a folder (``NAME.*``)
    that hold no model and no optimizer.

    Raises AnswerNo when nothing is left, and what is wrong when that is because all of it is lost.
    """
    chosen, only = selector(wanted.include, wanted.exclude), wanted.only
    entries = index.entries
    fqns = {e.fqn for e in entries if (only is None or e.section == only) and chosen(e.fqn)}
    lost = set(filter(chosen, index.lost))
    if only in ("model", "optim"):
        lost = {n for n in lost if not n.endswith(".*") or is_container_name(n.partition(".")[0])}
    if not fqns:
        index.select(lost).require_whole()
        counts = Counter(entry.section for entry in entries)
        there = ", ".join(f"{count} {section}" for section, count in counts.items()) or "nothing"
        named = wanted.include or wanted.exclude
        held = {entry.section for entry in index.tensors if not named}
        ways = tuple(Way(options=("--only", section)) for section in SECTIONS if section in held)
        raise AnswerNo(
            f"{index.root}: these filters choose no entry; it holds {there}.",
            hint=None if ways else "`ckpt-tools ls` lists the names; --only chooses a section.",
            instead=Instead(index.root, ways) if ways else None,
        )
    return index.select(fqns | lost)


def require_chosen(index: CheckpointIndex) -> None:
    """Raise what keeps what was chosen from being whole, with what could be chosen instead."""
    try:
        index.require_whole()
    except CheckpointError as error:
        options = _whole_part(index) if error.instead is None else ()
        if not options:
            raise
        other = error.concerning(error.about)
        other.instead = Instead(index.root, (Way(options=options),))
        raise other from error.__cause__


def _whole_part(index: CheckpointIndex) -> tuple[str, ...]:
    """Options that leave out what problems are of: a few objects or parts of a folder, which are
    lost under ``NAME.*``, or all but a whole model.
    """
    if not all(problem.about for problem in index.problems):
        return ()
    damaged = index.damaged
    parts = {name for name in index.lost if name.endswith(".*")}
    if len(damaged) <= _FEW and damaged <= parts | {entry.fqn for entry in index.objects}:
        named = [fqn if fqn in parts else escape(fqn) for fqn in sorted(damaged)]
        return tuple(word for name in named for word in ("-x", name))
    model = [entry.fqn for entry in index.entries if entry.section == "model"]
    is_whole = bool(model) and not index.lost and damaged.isdisjoint(model)
    return ("--only", "model") if is_whole else ()


def is_in_param_groups(path: Path) -> bool:
    """Whether a path is of an optimizer's param_groups, which may be flattened into names."""
    flat = _FLAT_OPTIM.match(str(path[0]))
    return bool(flat and flat["groups"]) or any(
        _first_word(part) == "param_groups" for part in path
    )


def is_step(path: Path, section: Section) -> bool:
    """Whether a path counts steps, of the whole job or of an optimizer; all ranks count alike."""
    last = str(path[-1]).rpartition(".")[2]
    above = {str(part) for part in path[:-1] if not isinstance(part, int)}
    if last in _SCHEDULER_STEPS:
        return bool(above) and above <= _OF_JOB | _SCHEDULERS
    return last in _STEPS and (section == "optim" or above <= _OF_JOB)


def no_such_entry(index: CheckpointIndex, fqn: str, noun: str = "entry") -> NoSuchEntry:
    """The error for a name that the checkpoint does not have, with names that are near."""
    names = near_names(index, fqn)
    hint = did_you_mean(names) if names else "`ckpt-tools ls` lists all names."
    return NoSuchEntry(f"{index.root} has no {noun} {fqn!r}.", hint=hint)


def did_you_mean(names: Sequence[str]) -> str:
    """A hint of a few names."""
    return "\n".join(["Did you mean one of these?", *names[:_MAX_NEAR]])


def near_names(index: CheckpointIndex, fqn: str) -> list[str]:
    """A few names that a person may have meant: those that contain it, or are spelled like it."""
    from difflib import get_close_matches  # late: it is for errors only

    names = [entry.fqn for entry in index.tensors] + [entry.fqn for entry in index.objects]
    within = [name for name in names if fqn and fqn in name]
    if within:
        return sorted(within, key=lambda name: (len(name), name))[:_MAX_NEAR]
    if len(names) > _MAX_COMPARED:
        last = fqn.rpartition(".")[2]
        names = [name for name in names if name.endswith(last)][:_MAX_COMPARED]
    return get_close_matches(fqn, names, n=_MAX_NEAR, cutoff=0.6)
