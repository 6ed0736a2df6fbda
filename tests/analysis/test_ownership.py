"""Who holds which box, what each rank has in bytes, and what a reshard moves."""

import builders
import pytest

from ckpt_tools.analysis.ownership import (
    after,
    bytes_held,
    holdings_of,
    moved,
)
from ckpt_tools.analysis.summary import mesh_of, skew_of
from ckpt_tools.core.geometry import Box
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.layout import Layout, Mesh, Replicate, Shard

HSDP = Layout(Mesh((2, 2), ("dp_replicate", "dp_shard")), (Replicate(), Shard(0)))
LINE = Layout(Mesh((4,)), (Shard(0),))


def _index(*layouts: Layout | None, shape: tuple[int, ...] = (8, 3)) -> CheckpointIndex:
    tensors = [builders.tensor(f"w{n}", shape, layout=one) for n, one in enumerate(layouts)]
    return builders.index(*tensors, world_size=4)


def test_replicas_are_held_by_every_rank_that_the_layout_gives_them_to() -> None:
    index = _index(HSDP)
    held = holdings_of(index, mesh_of(index)).tensors[0]
    assert [(p.box, p.holders) for p in held.pieces] == [
        (Box((0, 0), (4, 3)), (0, 2)),
        (Box((4, 0), (4, 3)), (1, 3)),
    ]


def test_without_a_layout_a_piece_is_held_by_who_saved_it() -> None:
    index = _index(LINE, None)
    held = holdings_of(index, mesh_of(index)).tensors[1]
    assert [p.holders for p in held.pieces] == [(0,)]


def test_a_tensor_on_part_of_the_mesh_is_held_by_ranks_of_the_whole() -> None:
    tp = Layout(Mesh((2,), ("tp",)), (Shard(0),))
    from dataclasses import replace

    whole = replace(builders.tensor("a", (8, 3), layout=HSDP), layout=HSDP)
    part = replace(
        builders.tensor("b", (4,), layout=tp),
        layout=Layout(Mesh((2,), ("dp_shard",)), (Shard(0),)),
    )
    index = replace(builders.index(whole, part, world_size=4), mesh=HSDP.mesh)
    held = holdings_of(index, mesh_of(index)).tensors[1]
    assert [p.holders for p in held.pieces] == [(0, 2), (1, 3)]


def test_formats_without_ranks_show_files() -> None:
    from dataclasses import replace

    entry = builders.tensor("w", (4,), with_ranks=False)
    found = holdings_of(replace(builders.index(entry), root="."), None)
    assert found.unit == "file"
    assert bytes_held(found) == [16]


def test_tensors_that_are_cut_alike_share_their_pieces() -> None:
    index = _index(HSDP, HSDP, LINE)
    first, second, third = holdings_of(index, mesh_of(index)).tensors
    assert first.pieces is second.pieces
    assert first.pieces is not third.pieces


def test_bytes_held_count_replicas_each_time() -> None:
    index = _index(HSDP, HSDP)
    assert bytes_held(holdings_of(index, mesh_of(index))) == [96, 96, 96, 96]


def test_empty_pieces_are_held_by_nobody() -> None:
    index = _index(LINE, shape=(2, 3))
    found = holdings_of(index, mesh_of(index))
    assert bytes_held(found) == [12, 12, 0, 0]


@pytest.mark.parametrize(("totals", "skew"), [([4, 4], 1.0), ([6, 2], 1.5), ([0, 0], None)])
def test_skew_is_the_fullest_over_the_average(totals: list[int], skew: float | None) -> None:
    assert skew_of(totals) == skew


def test_the_same_layout_moves_nothing() -> None:
    index = _index(LINE)
    before = holdings_of(index, mesh_of(index))
    change = moved(before, after(before, LINE.mesh, {"w0": LINE}))
    assert change.nbytes == 0


def test_what_moves_is_what_a_rank_did_not_have() -> None:
    index = _index(LINE)  # two rows of 12 bytes each
    before = holdings_of(index, mesh_of(index))
    change = moved(before, after(before, HSDP.mesh, {"w0": HSDP}))
    # rank 0 has rows 0-1 of 0-3, rank 1 none of 4-7, rank 2 none of 0-3, rank 3 rows 6-7 of 4-7
    assert change.by_rank == (24, 48, 48, 24)
    assert change.by_tensor == (144,)


def test_a_tensor_without_a_layout_is_held_whole_by_every_new_rank() -> None:
    index = _index(LINE, None)
    target = after(holdings_of(index, mesh_of(index)), Mesh((2,)), {"w1": None})
    assert [held.fqn for held in target.tensors] == ["w1"]
    assert [p.holders for p in target.tensors[0].pieces] == [(0, 1)]


def test_new_ranks_have_everything_to_get() -> None:
    index = _index(LINE)
    before = holdings_of(index, mesh_of(index))
    eight = Layout(Mesh((8,)), (Shard(0),))
    change = moved(before, after(before, eight.mesh, {"w0": eight}))
    assert change.by_rank[4:] == (12, 12, 12, 12)
