"""Formats and frameworks are named in the tables of their rooms, and in no branch outside."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.transforms import frameworks

PACKAGE = Path(ckpt_tools.__file__).parent
HOMES = ("formats", "transforms")
NAMES = (
    {form.name for form in formats.FORMATS}
    | {*get_args(frameworks.FrameworkLayout)}
    | {"transformers", "torchtitan", "olmo"}  # only found, by `formats.frameworks`
)
# Engines, of which one has the name of a format; torch's own DCP reads that format alone.
EXCEPTIONS = {("distributed", "dcp")}


def branches(tree: ast.AST) -> Iterator[ast.expr]:
    """What a value is compared with, or looked up by: in comparisons, cases, subscripts, and dicts
    of which each key is a name; a record of JSON has other keys, too.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Compare(left=left, comparators=others):
                yield from (left, *others)
            case ast.Subscript(value=ast.Name(id="Literal")):
                pass  # a type
            case ast.MatchValue(value=value) | ast.Subscript(slice=value):
                yield value
            case ast.Dict(keys=keys) if keys and all(map(named, keys)):
                yield from filter(None, keys)
            case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]):
                yield key
            case _:
                pass


def named(node: ast.expr | None) -> set[str]:
    """The names of formats and frameworks that a literal is or holds."""
    if node is None or isinstance(node, ast.Dict | ast.Call | ast.Compare):
        return set()
    return {
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value in NAMES
    }


def found(tree: ast.AST) -> set[str]:
    return {name for branch in branches(tree) for name in named(branch)}


def test_no_branch_outside_their_rooms_asks_for_a_format_or_a_framework_by_name() -> None:
    asked = {
        (room, name)
        for path in PACKAGE.rglob("*.py")
        if (room := path.relative_to(PACKAGE).parts[0]) not in HOMES
        for name in found(ast.parse(path.read_text("utf-8")))
    }
    assert asked == EXCEPTIONS


@pytest.mark.parametrize(
    "code",
    [
        "if form == 'ranks': pass",
        "if layout not in (None, 'plain', 'verl'): pass",
        "ends = {'dcp': 1, 'torch': 2}[form]",
        "rules['verl']()",
        "rules.get('verl')",
        "match form:\n    case 'dcp' | 'ranks':\n        pass",
    ],
)
def test_a_branch_by_name_is_seen(code: str) -> None:
    assert found(ast.parse(code))


def test_a_record_with_such_a_key_is_no_branch() -> None:
    assert not found(ast.parse("{'torch': version, 'ckpt_tools': own}"))


def test_choices_are_those_of_the_tables() -> None:
    assert set(frameworks.layouts("shards")) == set(get_args(frameworks.FrameworkLayout))
    for writes in get_args(formats.Writes):
        known = {form.name for form in formats.targets(writes)}
        for layout in frameworks.layouts(writes):
            assert set(frameworks.row_of(layout).formats(writes)) <= known
