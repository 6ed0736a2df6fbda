"""CRC-32: as zlib's, whole and in parts, with the faster library and without it."""

import importlib.util
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core import crc


@given(st.binary(), st.integers(0, 0xFFFFFFFF))
def test_it_is_the_crc_of_zlib(data: bytes, start: int) -> None:
    assert crc.crc32(memoryview(data), start) == zlib.crc32(data, start)


@given(st.binary(), st.binary())
def test_combined_parts_are_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    one, other = zlib.crc32(first), zlib.crc32(second)
    assert crc.combine(one, other, length=len(second)) == zlib.crc32(first + second)


def test_a_long_second_part_costs_no_more_than_its_bits() -> None:
    zeros = bytes(1 << 20)
    one, other = zlib.crc32(b"x"), zlib.crc32(zeros)
    assert crc.combine(one, other, length=len(zeros)) == zlib.crc32(b"x" + zeros)


def test_zlib_takes_over_where_isal_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    spec = importlib.util.spec_from_file_location("crc_without_isal", crc.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.crc32 is zlib.crc32
