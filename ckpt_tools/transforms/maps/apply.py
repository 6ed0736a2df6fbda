"""Applies a map to the entries of a checkpoint, and checks it from both sides.

Every source name is used once, every name of the result is made once; whatever a map does not know
is refused and listed. Tensors become views of the same bytes; nothing is read. A map is chosen by
the names alone, and only when they leave no doubt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_tools.core.index import TensorEntry
from ckpt_tools.core.text import counted, some
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.base import TransformedTensor, TransformResult
from ckpt_tools.transforms.maps import views
from ckpt_tools.transforms.maps.model import (
    Rule,
    TensorMap,
    evaluate,
    filled,
    is_known,
    pattern,
    placeholders,
)
from ckpt_tools.transforms.maps.toml import builtin_names, builtins_to_hf

_ON_HUB = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class MapTransform:
    """Applies a map; None: the one built-in map to Hugging Face's names that knows every name.

    ``values`` are what it may ask for, e.g. ``head_dim``; ``model_type`` is that of the model's
    config.json, None where nothing says it.
    """

    tensor_map: TensorMap | None
    values: Mapping[str, int]
    model_type: str | None = None

    def __call__(self, made: tuple[TransformedTensor, ...], *_: object) -> TransformResult:
        """The entries under their new names; as they are when they are Hugging Face's already.

        Raises UsageError for a model that the map is not for, for names that it does not know, or
        that two rules claim, for parts that are not there, for shapes that do not fit, and for
        values that it asks for and was not given; without a map, when no map, or more than one,
        knows all names.
        """
        if self.tensor_map is not None:
            return self._applied(self.tensor_map, made)
        names = [one.entry.fqn for one in made]
        known = []
        for one in builtins_to_hf():
            if one.keeps_rest or _misfits(one, names):
                continue
            sources = [text for rule in one.rules for text in rule.sources]
            patterns = [*map(pattern, (*sources, *one.drop))]
            if all(any(each.fullmatch(name) for each in patterns) for name in names):
                known.append(one)
        if len(known) == 1:
            outcome = self._applied(known[0], made)
            chosen = f"--map auto chose {known[0].name}: the only map that knows all names."
            return outcome._replace(notes=(chosen, *outcome.notes))
        if _ON_HUB in names and not known:
            return TransformResult(made, ("--map auto: the names are Hugging Face's already.",))
        fitting = ", ".join(one.name for one in known) or "no built-in map"
        raise UsageError(
            f"--map auto is not certain: {fitting} would fit all {len(names)} names.",
            hint=f"Name the map: {', '.join(builtin_names())}, or a file of your own.",
        )

    def _applied(self, tensor_map: TensorMap, made: Sequence[TransformedTensor]) -> TransformResult:
        reasons = _misfits(tensor_map, [one.entry.fqn for one in made])
        types, own = tensor_map.model_types, self.model_type
        if own and types and own not in types:
            known = ", ".join(types)
            reasons.append(f"config.json says model_type {own!r}, and the map is for {known}")
        if reasons:  # its rules may fit all the same
            raise UsageError(
                f"The map {tensor_map.name} is not for this model: {'; '.join(reasons)}.",
                hint="Choose another map (--map auto looks for one by the names), or a part that "
                "it is for; --force-map uses it anyway.",
            )
        groups, kept, dropped = _sorted_out(tensor_map, made, values=self.values)
        out: list[TransformedTensor] = []
        for group in groups:
            try:
                out += [_gathered(group)] if group.rule.gathers else _scattered(group)
            except UsageError as error:
                raise error.at(f"The rule for {', '.join(group.rule.sources)}") from error
        if not out:
            raise UsageError(f"The map {tensor_map.name} has a rule for none of these names.")
        before = sum(len(group.tensors) for group in groups)
        notes = [f"Map {tensor_map.name}: {counted(before, 'tensor')} became {len(out)}."]
        turned = [group for group in groups if any(group.rule.rotary)]
        if turned:
            sizes = sorted({evaluate(group.rule.head_dim, self.values) for group in turned})
            rows, tensors = ", ".join(map(str, sizes)), counted(len(turned), "tensor")
            notes.append(f"Rotary rows are reordered for {tensors}, in heads of {rows}.")
        if kept:
            notes.append(f"It keeps {counted(len(kept), 'other name')} unchanged.")
        if dropped:
            shown = some(sorted(dropped), 10)
            notes.append(f"It leaves out {counted(len(dropped), 'tensor')}: {shown}.")
        return TransformResult((*out, *kept), tuple(notes))


def _misfits(tensor_map: TensorMap, names: Sequence[str]) -> list[str]:
    """What of these names keeps them from being those that the map is for, a phrase for each."""
    misfits = [
        f"there is no {text}"
        for text in tensor_map.requires
        if not any(map(pattern(text).fullmatch, names))
    ]
    for text in tensor_map.forbids:
        first = next(filter(pattern(text).fullmatch, names), None)
        misfits += [f"there is {first}"] if first else []
    return misfits


@dataclass(slots=True)
class _RuleMatch:
    """The sources of one rule that belong together, by part and by place in the stack."""

    rule: Rule
    bound: Mapping[str, str]
    values: Mapping[str, int]
    tensors: dict[tuple[int, int], TransformedTensor] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """How often the parts alternate along their dimension."""
        return evaluate(self.rule.groups, self.values)

    @property
    def sizes(self) -> list[int]:
        """The declared sizes of the parts; none when they are equal."""
        return [evaluate(text, self.values) for text in self.rule.sizes]

    def name(self, text: str, layer: int) -> str:
        """A name of the rule, for one layer of the stack."""
        number = {self.rule.stack: str(layer)} if self.rule.stack else {}
        return filled(text, {**self.bound, **number})


def _sorted_out(
    tensor_map: TensorMap, made: Sequence[TransformedTensor], *, values: Mapping[str, int]
) -> tuple[list[_RuleMatch], list[TransformedTensor], list[str]]:
    """The entries in the groups of their rules, those that are kept, and names that are dropped.

    Raises UsageError for names without a rule.
    """
    groups: dict[tuple[int, tuple[tuple[str, str], ...]], _RuleMatch] = {}
    dropped: list[str] = []
    others: list[TransformedTensor] = []
    for one in made:
        name = one.entry.fqn
        claims = [
            (number, part, match.groupdict())
            for number, rule in enumerate(tensor_map.rules)
            for part, text in enumerate(rule.sources)
            if (match := pattern(text).fullmatch(name)) is not None
        ]
        if len(claims) > 1:
            raise UsageError(f"{name}: {len(claims)} rules of the map {tensor_map.name} claim it.")
        if claims:
            number, part, bound = claims[0]
            rule = tensor_map.rules[number]
            layer = int(bound.pop(rule.stack)) if rule.stack in bound else 0
            key = number, tuple(sorted(bound.items()))
            group = groups.setdefault(key, _RuleMatch(rule, bound, values))
            group.tensors[part, layer] = one
        elif any(pattern(text).fullmatch(name) for text in tensor_map.drop):
            dropped.append(name)
        else:
            others.append(one)
    if others and not tensor_map.keeps_rest:
        unknown = sorted(one.entry.fqn for one in others)
        raise UsageError(
            f"The map {tensor_map.name} has no rule for {counted(len(unknown), 'name')}: "
            f"{some(unknown, 10)}.",
            hint="Leave them out with --exclude, or write a rule for them.",
        )
    return list(groups.values()), others, dropped


def _gathered(group: _RuleMatch) -> TransformedTensor:
    """The one tensor that the parts of a group make. Raises UsageError for missing parts."""
    rule, stacked = group.rule, []
    for layer in range(1 + max(layer for _, layer in group.tensors)):
        parts = dict(enumerate(rule.sources))
        absent = [name for part, name in parts.items() if (part, layer) not in group.tensors]
        if absent:
            shown = sorted(group.name(name, layer) for name in absent)
            raise UsageError(f"parts are missing: {some(shown, 10)}.")
        entries = [views.view_of(group.tensors[part, layer].entry) for part in parts]
        stacked.append(_joined(entries, group))
    view = stacked[0] if rule.stack is None else views.stack(stacked)
    sources = [group.tensors[key] for key in sorted(group.tensors, key=lambda key: key[::-1])]
    origins = tuple(origin for one in sources for origin in one.origins)
    _check_shape(view, rule.target_shape, values=group.values)
    return TransformedTensor(view, origins).named(filled(rule.targets[0], group.bound))


def _joined(parts: list[TensorEntry], group: _RuleMatch) -> TensorEntry:
    """Parts side by side: in each group the first of every part, in the next the second…"""
    dim, count = group.rule.dim, group.groups
    ready = []
    for number, part in enumerate(parts):
        _check_shape(part, group.rule.source_shape, values=group.values)
        view = _rotated(part, group, number=number)
        ready.append(views.transpose(view) if group.rule.transpose else view)
    if len(ready) == 1:
        return ready[0]
    if any(dim >= len(part.shape) or part.shape[dim] % count for part in ready):
        shapes = ", ".join(str(list(part.shape)) for part in ready)
        raise UsageError(f"{shapes} do not divide into {count} groups along {dim}.")
    sizes = [part.shape[dim] for part in ready]
    if group.sizes and group.sizes != sizes:
        raise UsageError(f"parts of {sizes} along {dim}, the map says {group.sizes}.")
    pieces = [
        views.narrow(part, dim, start=index * size // count, size=size // count)
        for index in range(count)
        for part, size in zip(ready, sizes, strict=True)
    ]
    return views.concat(pieces, dim)


def _scattered(group: _RuleMatch) -> Iterator[TransformedTensor]:
    """The parts that the one tensor of a group falls into."""
    rule, source = group.rule, group.tensors[0, 0]
    whole = views.view_of(source.entry)
    _check_shape(whole, rule.source_shape, values=group.values)
    unstacks = rule.stack is not None and rule.stack in placeholders(rule.targets[0])
    if unstacks and not whole.shape:
        raise UsageError("a scalar is not a stack.")
    for layer in range(whole.shape[0] if unstacks else 1):
        one = views.unstack(whole, layer) if unstacks else whole
        for number, part in enumerate(_split(one, group)):
            view = views.transpose(part) if rule.transpose else part
            view = _rotated(view, group, number=number)
            _check_shape(view, rule.target_shape, values=group.values)
            name = group.name(rule.targets[number], layer)
            yield TransformedTensor(view, source.origins).named(name)


def _split(whole: TensorEntry, group: _RuleMatch) -> list[TensorEntry]:
    """The parts that lie side by side in a tensor."""
    parts, dim, count = len(group.rule.targets), group.rule.dim, group.groups
    if parts == 1:
        return [whole]
    if dim >= len(whole.shape):
        raise UsageError(f"{list(whole.shape)} has no dimension {dim} to split.")
    sizes = group.sizes or [whole.shape[dim] // parts] * parts
    if sum(sizes) != whole.shape[dim] or any(size % count for size in sizes):
        raise UsageError(
            f"{list(whole.shape)} does not fall into {sizes} along {dim}, in {count} groups."
        )
    split, start, step = [], 0, whole.shape[dim] // count
    for size in (size // count for size in sizes):
        starts = (index * step + start for index in range(count))
        pieces = [views.narrow(whole, dim, start=place, size=size) for place in starts]
        split.append(views.concat(pieces, dim))
        start += size
    return split


def _rotated(view: TensorEntry, group: _RuleMatch, *, number: int) -> TensorEntry:
    """A part with its rows reordered as the rule says for it."""
    rotary = group.rule.rotary
    if number >= len(rotary) or not rotary[number]:
        return view
    head_dim = evaluate(group.rule.head_dim, group.values)
    if rotary[number] == "pairs-to-halves":
        return views.rotary_to_halves(view, head_dim)
    return views.rotary_to_pairs(view, head_dim)


def _check_shape(view: TensorEntry, wanted: Sequence[str], *, values: Mapping[str, int]) -> None:
    """Raise UsageError when a declared shape is not the tensor's.

    ``_``, and what needs a value that was not given, stand for any size.
    """
    if not wanted:
        return
    fits = len(wanted) == len(view.shape) and all(
        not is_known(text, values) or evaluate(text, values) == size
        for text, size in zip(wanted, view.shape, strict=True)
    )
    if not fits:
        raise UsageError(f"shape {list(view.shape)}, the map says [{', '.join(wanted)}].")
