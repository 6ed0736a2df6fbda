"""Whether two objects of checkpoints are the same: by value when they are plain, else by bytes."""

from __future__ import annotations

import math

from ckpt_tools import formats
from ckpt_tools.core.index import ObjectEntry, PlainValue
from ckpt_tools.storage.reader import Files

_MAX_COMPARED = 64 << 20


def compare_objects(a: ObjectEntry, b: ObjectEntry, files: Files) -> tuple[bool | None, str]:
    """Whether two objects are equal and, if not, why; None when it cannot be told.

    Plain values are equal when they are equal in Python and of the same types, with keys of the
    same types; only an OrderedDict equals a dict, and a NaN another. What is not opened is compared
    by its pickle: equal bytes are equal, different ones cannot be told.
    """
    if a.opened and b.opened:
        same = _same(a.value, b.value)
        return same, "" if same else f"{a.value!r} and {b.value!r}"
    if a.opened != b.opened:
        return False, "one is a plain value, the other is not"
    here, there = formats.object_bytes(a, files), formats.object_bytes(b, files)
    if here is None and there is None and _of_equal_pickles(a, b, files):
        return True, ""
    if here is None or there is None:
        return None, "not opened, and without bytes of its own to compare"
    if here == there:
        return True, ""
    return None, "not opened; the pickled bytes differ, which need not mean that the values do"


def _of_equal_pickles(a: ObjectEntry, b: ObjectEntry, files: Files) -> bool:
    """Whether two are the same part of two equal pickles (NumPy's arrays are in the pickle)."""
    alike = a.codec is None and b.codec is None and a.path == b.path
    return (
        alike
        and 0 < a.data.length == b.data.length <= _MAX_COMPARED
        and files.read(*a.data) == files.read(*b.data)
    )


def _same(a: PlainValue, b: PlainValue) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        same_keys = {(type(key), key) for key in a} == {(type(key), key) for key in b}
        return same_keys and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and a == b
