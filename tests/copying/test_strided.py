"""Strided copies: as few steps as the memory allows, and blocks that waste little."""

from __future__ import annotations

from ckpt_tools.copying.strided import (
    Dim,
    StridedCopy,
    blocks_of,
    copy_of,
    span_of,
    steps,
)
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import ByteRange, Chunk
from ckpt_tools.core.plan import ReadItem


def copy(
    sizes: tuple[int, ...],
    box: Box,
    *,
    within: Box | None = None,
    strides: tuple[int, ...] | None = None,
) -> StridedCopy:
    chunk = Chunk(Box.whole(sizes), ByteRange("f", 100, 1 << 40), strides)
    return copy_of(ReadItem(chunk, box), box, within=within or box, itemsize=4)


def test_a_whole_chunk_is_one_run() -> None:
    whole = Box.whole((4, 5, 6))
    assert copy((4, 5, 6), whole)[1:] == (100, 0, 480, 4, ())


def test_whole_rows_are_one_run() -> None:
    rows = Box((1, 0), (2, 5))
    assert copy((4, 5), rows, within=Box.whole((4, 5)))[1:] == (120, 20, 40, 4, ())


def test_columns_are_one_step_a_row() -> None:
    columns = Box((0, 1), (4, 2))
    assert copy((4, 5), columns)[1:] == (104, 0, 8, 4, (Dim(4, 20, 8),))


def test_leading_dimensions_are_joined() -> None:
    columns = Box((0, 0, 1), (4, 5, 2))
    assert copy((4, 5, 6), columns).dims == (Dim(20, 24, 8),)


def test_a_transposed_chunk_is_read_in_the_order_of_the_file() -> None:
    assert copy((4, 5), Box.whole((4, 5)), strides=(1, 4)).dims == (Dim(5, 16, 4), Dim(4, 4, 20))


def test_a_dimension_of_one_element_does_not_matter() -> None:
    assert copy((1, 5), Box.whole((1, 5)), strides=(999, 1)).dims == ()


def test_an_element_that_is_spread_is_read_for_every_place_of_it() -> None:
    spread = copy((3,), Box.whole((3,)), strides=(0,))
    assert list(steps(spread.dims)) == [(0, 0), (0, 4), (0, 8)]


def test_narrow_rows_close_together_are_one_block() -> None:
    columns = copy((1000, 64), Box((0, 0), (1000, 32)))
    assert list(blocks_of(columns, limit=1 << 20, gap=16 << 10)) == [columns]


def test_rows_far_apart_are_read_one_by_one() -> None:
    columns = copy((1000, 1 << 20), Box((0, 0), (1000, 32)))
    blocks = list(blocks_of(columns, limit=1 << 30, gap=16 << 10))
    assert [block[1:] for block in blocks[:2]] == [(100, 0, 128, 4, ()), (4194404, 128, 128, 4, ())]
    assert len(blocks) == 1000


def test_a_block_is_no_larger_than_its_buffer() -> None:
    columns = copy((1000, 64), Box((0, 0), (1000, 32)))
    blocks = list(blocks_of(columns, limit=4096, gap=16 << 10))
    assert [block.dims[0].size for block in blocks] == [16] * 62 + [8]
    assert max(map(span_of, blocks)) <= 4096
    assert (blocks[1].source, blocks[1].target) == (100 + 16 * 256, 16 * 128)
