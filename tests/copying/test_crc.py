"""CRC-32 of parts: as zlib's of the whole."""

from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.copying.crc import combine


@given(st.binary(), st.binary())
def test_combined_parts_are_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    assert combine(crc32(first), crc32(second), length=len(second)) == crc32(first + second)


def test_a_long_second_part_costs_no_more_than_its_bits() -> None:
    zeros = bytes(1 << 20)
    assert combine(crc32(b"x"), crc32(zeros), length=len(zeros)) == crc32(b"x" + zeros)
