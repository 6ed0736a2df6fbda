"""Records as JSON, as commands print it and `to_dict` of the library's results gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Union

from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.geometry import Box

Json = Union[None, bool, int, float, str, Sequence["Json"], Mapping[str, "Json"]]  # noqa: UP007 (names itself)


def as_json(value: object) -> Json:
    """A record as a dict of its fields, whatever is in them, as JSON has it.

    What has a ``to_dict`` is what that gives, an element type is its name, a complex number a pair.
    Raises TypeError for what is no value of a record.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return [as_json(item) for item in value]
    if isinstance(value, DType):
        return value.name
    if hasattr(value, "to_dict"):
        given: Json = value.to_dict()
        return given
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if hasattr(value, "_fields") or is_dataclass(value):
        return record_json(value)
    if isinstance(value, complex):
        return [value.real, value.imag]
    raise TypeError(f"{type(value).__name__} is no value of a record")


def record_json(record: object) -> dict[str, Json]:
    """The fields of a dataclass or a NamedTuple by their names, in their order.

    A box in a field is there as its own two fields: ``box=Box((0,), (4,))`` gives
    ``{"offsets": [0], "sizes": [4]}``.
    """
    names: Sequence[str] | None = getattr(record, "_fields", None)
    if names is None and is_dataclass(record):
        names = [field.name for field in fields(record)]
    facts: dict[str, Json] = {}
    for name in names or ():
        value: object = getattr(record, name)
        if isinstance(value, Box):
            facts |= record_json(value)
        else:
            facts[name] = as_json(value)
    return facts
