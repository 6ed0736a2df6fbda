"""Reads maps from TOML text, and finds the built-in ones.

    name = "mine"
    drop = ["rope.freqs"]                 # names that have no place on the other side
    requires = ["layers.{n}.q_norm.weight"]   # names that must be there
    forbids = ["layers.{n}.q_proj.bias"]  # names that must not be there
    model_types = ["llama"]               # those of config.json that the map is for; none: any
    keep_rest = false                     # whether names without a rule stay as they are

    [[rule]]
    from = "layers.{n}.attention.wq.weight"    # {n} a number, {m*} any text
    to = "model.layers.{n}.self_attn.q_proj.weight"
    rotary = "pairs-to-halves"            # rows of each head of head_dim rows; from -> to

    [[rule]]
    from = ["{m*}.gate_proj.weight", "{m*}.up_proj.weight"]
    to = "{m*}.gate_up_proj.weight"       # side by side along `dim`, of `sizes`, in `groups`

    [[rule]]
    from = "{m*}.experts.{e}.w1.weight"
    to = "{m*}.experts.w1"
    stack = "e"                           # the placeholder that numbers a new first dimension
    transpose = true
    parallel = 0                          # how tensor-parallel parts are cut; "same": they are not
    parallel_length = "norm.weight"       # a tensor as long as the whole is there

Each map can be read both ways. This room knows the text, not what a map does to tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources

from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.maps.model import ROTARY, Rotary, Rule, TensorMap, placeholders

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAP_KEYS = frozenset({"name", "drop", "requires", "forbids", "model_types", "keep_rest", "rule"})
_RULE_KEYS = frozenset(
    {"from", "to", "rotary", "head_dim", "transpose", "dim", "sizes", "groups", "stack"}
    | {"from_shape", "to_shape", "parallel", "parallel_length"}
)
# The other side of every built-in map: Hugging Face's names, or PEFT's for adapters.
_TO_HF, _FROM_HF = "-to-hf", "hf-to-"
_BACK = "back:"


def builtin_names() -> list[str]:
    """The names of the built-in maps, one for each direction."""
    return sorted(_builtin_files())


def builtins_to_hf() -> list[TensorMap]:
    """The built-in maps that lead to Hugging Face's names."""
    return [_builtin(name) for name in _builtin_files() if name.endswith(_TO_HF)]


def find(text: str) -> TensorMap:
    """The map that ``NAME``, ``FILE`` or ``back:FILE`` means; the last is read from to to from.

    Raises UsageError when there is none, or when it cannot be read.
    """
    if text in _builtin_files():
        return _builtin(text)
    path = text.removeprefix(_BACK)
    try:
        with open(path, encoding="utf-8") as file:
            content = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"There is no map {text!r}, neither a built-in one nor a file.",
            hint=f"Built in are: {', '.join(builtin_names())}.",
        ) from error
    tensor_map = parse(content, name=os.path.basename(path))
    return tensor_map.back if text.startswith(_BACK) else tensor_map


def _builtin_files() -> dict[str, str]:
    """The file of each built-in map, by the names of its two directions."""
    folder = resources.files("ckpt_tools.transforms.maps")
    files = sorted(file.name for file in folder.iterdir() if file.name.endswith(".toml"))
    sides = [(file.removesuffix(".toml"), file) for file in files]
    return {name: file for side, file in sides for name in (side + _TO_HF, _FROM_HF + side)}


def _builtin(name: str) -> TensorMap:
    file = resources.files("ckpt_tools.transforms.maps").joinpath(_builtin_files()[name])
    tensor_map = parse(file.read_text("utf-8"), name=name)
    return replace(tensor_map.back if name.startswith(_FROM_HF) else tensor_map, name=name)


def parse(text: str, *, name: str) -> TensorMap:
    """The map in this TOML text; ``name`` is for errors when it has none of its own.

    Raises UsageError, with the rule's number, for what cannot be meant.
    """
    try:
        read: Mapping[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"The map {name} cannot be read: {error}.") from error
    table = _Table(read, f"The map {name}")
    table.refuse_others(_MAP_KEYS)
    rows = read.get("rule", [])
    if not isinstance(rows, list) or not rows:
        raise UsageError(f"The map {name} has no [[rule]].")
    rules = tuple(_rule(row, f"The map {name}, rule {n}") for n, row in enumerate(rows, 1))
    return TensorMap(
        name=table.text("name", name),
        rules=rules,
        drop=table.texts("drop"),
        requires=table.texts("requires"),
        forbids=table.texts("forbids"),
        model_types=table.texts("model_types"),
        keeps_rest=table.flag("keep_rest"),
    )


class _Table:
    """A TOML table whose values are of the types that are asked for, or a UsageError."""

    def __init__(self, content: Mapping[str, object], where: str) -> None:
        self._content, self._where = content, where

    def refuse_others(self, known: frozenset[str]) -> None:
        """Raise for keys that mean nothing: a misspelt one must not be passed over."""
        others = sorted(set(self._content) - known)
        if others:
            raise UsageError(
                f"{self._where} has unknown keys: {', '.join(others)}.",
                hint=f"Known are {', '.join(sorted(known))}.",
            )

    def text(self, key: str, default: str) -> str:
        """A string, or the default for one that does not exist; an integer counts as one."""
        value = self._content.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise self._wrong(key, "a string")
        return str(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings, or one alone."""
        value = self._content.get(key, [])
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) or not isinstance(one, (str, int)) for one in values):
            raise self._wrong(key, "a string or a list of them")
        return tuple(map(str, values))

    def number(self, key: str) -> int:
        """A whole number of 0 or more; 0 when it does not exist."""
        value = self._content.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, "a number of 0 or more")
        return value

    def flag(self, key: str) -> bool:
        """True or false; false when it does not exist."""
        value = self._content.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def _wrong(self, key: str, wanted: str) -> UsageError:
        return UsageError(f"{self._where}: `{key}` is to be {wanted}.")


def _rule(row: object, where: str) -> Rule:
    if not isinstance(row, dict):
        raise UsageError(f"{where} is not a table.")
    table = _Table(row, where)
    table.refuse_others(_RULE_KEYS)
    sources, targets = table.texts("from"), table.texts("to")
    stack = table.text("stack", "")
    rule = Rule(
        sources=sources,
        targets=targets,
        rotary=_rotary(table.texts("rotary"), where, parts=max(len(sources), len(targets))),
        head_dim=table.text("head_dim", "head_dim"),
        transpose=table.flag("transpose"),
        dim=table.number("dim"),
        sizes=table.texts("sizes"),
        groups=table.text("groups", "1"),
        stack=stack or None,
        parallel=_parallel(table.texts("parallel"), where),
        parallel_length=table.text("parallel_length", "") or None,
        source_shape=table.texts("from_shape"),
        target_shape=table.texts("to_shape"),
    )
    _check(rule, where)
    return rule


def _parallel(texts: Sequence[str], where: str) -> tuple[int, ...] | None:
    """Along which dimensions tensor-parallel parts are cut; none when each has the whole."""
    if not texts:
        return None
    if list(texts) == ["same"]:
        return ()
    if len(texts) > 2 or not all(text.isdecimal() for text in texts):
        raise UsageError(f'{where}: `parallel` is to be a dimension, two of them, or "same".')
    return tuple(map(int, texts))


def _rotary(texts: Sequence[str], where: str, *, parts: int) -> tuple[Rotary, ...]:
    known: dict[str, Rotary] = {one: one for one in ROTARY}
    if any(text not in known for text in texts):
        raise UsageError(
            f"{where}: `rotary` is to be one of {', '.join(filter(None, ROTARY))}, "
            'or "" for a part that stays.'
        )
    if len(texts) not in (0, 1, parts):
        raise UsageError(f"{where}: `rotary` says {len(texts)} ways for {parts} parts.")
    ways = tuple(known[text] for text in texts)
    return ways * parts if len(ways) == 1 else ways


def _check(rule: Rule, where: str) -> None:
    """Raise UsageError for a rule that cannot be carried out, or not back."""
    if not rule.sources or not rule.targets or min(len(rule.sources), len(rule.targets)) > 1:
        raise UsageError(f"{where}: one name on one side, one or more on the other.")
    if rule.sizes and len(rule.sizes) != rule.parts:
        raise UsageError(f"{where}: {len(rule.sizes)} sizes for {rule.parts} parts.")
    one, *others = [placeholders(text) for text in (*rule.sources, *rule.targets)]
    many = rule.sources if rule.gathers else rule.targets
    if rule.stack is not None:
        numbered = [rule.stack in placeholders(text) for text in many]
        alone = rule.targets[0] if rule.gathers else rule.sources[0]
        if not all(numbered) or rule.stack in placeholders(alone):
            raise UsageError(
                f"{where}: `{{{rule.stack}}}` must be in every name of one side, and only there."
            )
        one, others = one - {rule.stack}, [names - {rule.stack} for names in others]
    if any(names != one for names in others):
        raise UsageError(f"{where}: the names do not have the same placeholders.")
