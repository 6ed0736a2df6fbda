"""Values for a person: bits into numbers, slices into boxes, numbers into rows."""

import math

import pytest
import torch

from ckpt_tools.cli.show import Corner, first_corner, lines, nested, parse_slice
from ckpt_tools.copying.cast import decode
from ckpt_tools.core.dtypes import BY_NAME, dtype_named
from ckpt_tools.core.geometry import Box
from ckpt_tools.errors import UsageError

NUMERIC = sorted(name for name, row in BY_NAME.items() if row.kind != "raw")


@pytest.mark.parametrize("name", NUMERIC)
def test_every_bit_pattern_decodes_as_torch_reads_it(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip("torch has float8_e8m0fnu only since 2.7")
    dtype = dtype_named(name)
    if name == "bool":
        data = bytes([0, 1, 1, 0])
    else:
        data = bytes(range(256)) * dtype.itemsize + bytes([0x80, 0x7F] * 4 * dtype.itemsize)
    kind = getattr(torch, name)
    read = torch.frombuffer(bytearray(data), dtype=kind)
    wide = torch.complex128 if dtype.kind == "complex" else torch.float64
    theirs = read.tolist() if dtype.kind in ("int", "uint", "bool") else read.to(wide).tolist()
    ours = decode(data, dtype)
    assert len(ours) == len(theirs)
    assert all(_same(mine, his) for mine, his in zip(ours, theirs, strict=True))


def _same(mine: complex, his: complex) -> bool:
    if isinstance(mine, complex):
        return _same(mine.real, his.real) and _same(mine.imag, his.imag)
    if math.isnan(mine):
        return math.isnan(his)
    return mine == his and math.copysign(1, mine) == math.copysign(1, his)


def test_a_type_without_numbers_gives_its_bytes() -> None:
    assert decode(b"\x01\xff", dtype_named("float4_e2m1fn_x2")) == [1, 255]


@pytest.mark.parametrize(
    ("text", "offsets", "sizes"),
    [
        ("0:4,:8", (0, 0, 0), (4, 8, 2)),
        ("-1", (9, 0, 0), (1, 20, 2)),
        ("[2, 3, 1]", (2, 3, 1), (1, 1, 1)),
        ("-3:", (7, 0, 0), (3, 20, 2)),
        ("5:100", (5, 0, 0), (5, 20, 2)),
    ],
)
def test_a_slice_is_read_as_python_reads_it(
    text: str, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    assert parse_slice(text, (10, 20, 2)) == Box(offsets, sizes)


@pytest.mark.parametrize("text", ["0:4,0:4", "x", "3:2", "10", "-11", "1:2:3"])
def test_a_slice_that_means_nothing_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        parse_slice(text, (10,))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((), ()),
        ((3,), (3,)),
        ((100,), (6,)),
        ((9, 9), (6, 6)),
        ((4, 9, 9), (1, 6, 6)),
        ((0,), (0,)),
    ],
)
def test_the_first_corner_is_small(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    assert first_corner(shape) == Box((0,) * len(shape), sizes)


def test_values_nest_one_list_a_dimension() -> None:
    assert nested(Corner(Box((0, 0), (2, 3)), range(6))) == [[0, 1, 2], [3, 4, 5]]
    assert nested(Corner(Box((), ()), [7])) == 7
    assert nested(Corner(Box((0, 0), (2, 0)), [])) == [[], []]


def test_rows_are_aligned_and_blocks_apart() -> None:
    shown = list(lines(Corner(Box((0, 0, 0), (2, 1, 2)), [1, 20, 3, 4])))
    assert shown == ["  values of [0:2, 0:1, 0:2]", "   1 20", "", "   3  4"]
