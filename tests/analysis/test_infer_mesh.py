"""The mesh that boxes speak of: made ones by hand, and those of real jobs against their truth."""

import json
import re
from pathlib import Path

import pytest
from builders import tensor
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.analysis.infer_mesh import infer
from ckpt_tools.analysis.summary import (
    FoundMesh,
    layout_of,
    mesh_of,
    placement_names,
)
from ckpt_tools.core.layout import Layout, Mesh, Placement, Replicate, Shard
from ckpt_tools.formats import read_index

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def laid(shape: tuple[int, ...], *placements: Placement, order: tuple[int, ...] = ()) -> Layout:
    return Layout(Mesh(shape), placements, order)


def test_as_many_pieces_as_ranks_are_one_dimension() -> None:
    found = infer([tensor("w", (10, 3), layout=laid((4,), S0))], world_size=4)
    assert found is not None
    assert found.mesh == Mesh((4,))


def test_fewer_pieces_than_ranks_are_replicas_of_shards() -> None:
    entry = tensor("w", (16, 3), layout=laid((2, 4), R, S0))
    found = infer([entry], world_size=8)
    assert found is not None
    assert found.mesh == Mesh((2, 4))
    assert found.layout_of(entry) == laid((2, 4), R, S0)


def test_a_grid_of_pieces_is_two_dimensions() -> None:
    entry = tensor("w", (8, 6), layout=laid((4, 2), S0, S1))
    found = infer([entry], world_size=8)
    assert found is not None
    assert found.layout_of(entry) == laid((4, 2), S0, S1)


def test_empty_shards_do_not_hide_the_mesh() -> None:
    entries = [
        tensor("a", (3, 2), layout=laid((8,), S0)),
        tensor("b", (64, 2), layout=laid((8,), S0)),
    ]
    found = infer(entries, world_size=8)
    assert found is not None
    assert found.mesh == Mesh((8,))
    assert found.layout_of(entries[0]) == laid((8,), S0)


def test_a_shard_that_one_rank_holds_whole_is_known_by_the_empty_ones() -> None:
    entries = [
        tensor("a", (1, 2), layout=laid((4,), S0)),
        tensor("b", (64, 2), layout=laid((4,), S0)),
    ]
    found = infer(entries, world_size=4)
    assert found is not None
    assert found.layout_of(entries[0]) == laid((4,), S0)


def test_who_saved_a_box_tells_which_dimension_cuts_first() -> None:
    strided = laid((2, 2), S0, S0, order=(1, 0))
    entries = [
        tensor("a", (10, 7), layout=strided),
        tensor("b", (7, 10), layout=laid((2, 2), S0, S1)),
    ]
    found = infer(entries, world_size=4)
    assert found is not None
    assert found.layout_of(entries[0]) == strided


def test_a_tensor_that_could_lie_two_ways_lies_as_the_others_do() -> None:
    # Of (S(0), R) and (R, S(0)) on 2x2, boxes without ranks fit both.
    others = [tensor(f"a{i}", (8,), layout=laid((2, 2), S0, R)) for i in range(3)]
    grid = tensor("g", (8, 8), layout=laid((2, 2), S0, S1))
    doubtful = tensor("w", (8,), layout=laid((2, 2), S0, R), with_ranks=False)
    found = infer([*others, grid, doubtful], world_size=4)
    assert found is not None
    assert found.layout_of(doubtful) == laid((2, 2), S0, R)


def test_without_a_world_size_the_most_pieces_stand_for_it() -> None:
    found = infer([tensor("w", (12,), layout=laid((3,), S0))], world_size=None)
    assert found is not None
    assert found.mesh == Mesh((3,))


@pytest.mark.parametrize("world_size", [None, 1, 8])
def test_whole_tensors_speak_of_no_mesh(world_size: int | None) -> None:
    assert infer([tensor("w", (12,)), tensor("s", ())], world_size=world_size) is None


def test_a_cut_that_no_layout_gives_has_none() -> None:
    entry = tensor("w", (12,), layout=laid((3,), S0))
    other = tensor("v", (12,), layout=laid((4,), S0), with_ranks=False)
    found = infer([entry, entry, other], world_size=3)
    assert found is not None
    assert found.layout_of(other) is None


@given(
    mesh=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    data=st.data(),
    shape=st.lists(st.integers(1, 12), min_size=1, max_size=3),
)
def test_an_inferred_layout_gives_the_boxes_that_are_there(
    mesh: list[int], data: st.DataObject, shape: list[int]
) -> None:
    options: list[Placement] = [R, *(Shard(dim) for dim in range(len(shape)))]
    placements = [data.draw(st.sampled_from(options)) for _ in mesh]
    entry = tensor("w", shape, layout=laid(tuple(mesh), *placements))
    found = infer([entry], world_size=Mesh(tuple(mesh)).size)
    layout = None if found is None else found.layout_of(entry)
    if layout is not None:
        stored = {chunk.box for chunk in entry.chunks if chunk.box.numel}
        assert {box for box in layout.boxes(shape) if box.numel} == stored


# ------------------------------------------------------------------------------ against real jobs


def _torch_names(placements: list[str]) -> list[str]:
    """What truth.json calls placements, as `placement_names` writes them."""
    return [re.sub(r"\(\)|dim=|sf=", "", name) for name in placements]


# Names of the folders whose truth states placements, and where their DCP directory is.
JOBS = {
    "fsdp2_dcp_1d_4r": "ckpt",
    "fsdp2_dcp_1d_8r": "ckpt",
    "fsdp2_dcp_hsdp_2x4": "ckpt",
    "fsdp2_ep_dcp_2x2": "ckpt",
    "fsdp2_ep_strided_dcp_2x2": "ckpt",
    "fsdp2_shard1_dcp_4r": "ckpt",
    "fsdp2_bf16_fp32optim_dcp_4r": "ckpt",
    "peft_fsdp2_dcp_4r": "ckpt",
    "torchtitan_llama3_4r": "ckpt/checkpoint_full/step-2",
}


@pytest.mark.parametrize("job", JOBS)
def test_what_is_inferred_is_what_the_job_did(job: str) -> None:
    index = read_index(str(REAL / job / JOBS[job]))
    truth = json.loads((REAL / job / "truth.json").read_text())["entries"]
    found = mesh_of(index)
    compared = 0
    for entry in index.tensors:
        stated = truth.get(entry.fqn, {}).get("placements")
        if not stated or set(stated) == {"Replicate()"}:  # stored once, like a plain tensor
            continue
        known = layout_of(entry, found)
        assert known is not None
        assert (known[1], placement_names(known[0])) == ("inferred", _torch_names(stated))
        assert list(known[0].mesh.shape) == truth[entry.fqn]["mesh"]["shape"]
        compared += 1
    assert compared > 1


def test_fsdp_with_tensor_parallelism_is_inferred_on_the_mesh_of_both() -> None:
    index = read_index(str(REAL / "fsdp2_tp_dcp_2x2" / "ckpt"))
    found = mesh_of(index)
    assert found is not None
    assert found.mesh == Mesh((2, 2))
    laid_as = {entry.fqn: _names(layout_of(entry, found)) for entry in index.tensors}
    assert laid_as["model.blocks.0.fc1.weight"] == ["_StridedShard(0, 2)", "Shard(0)"]
    assert laid_as["model.blocks.0.fc2.weight"] == ["Shard(0)", "Shard(1)"]
    assert laid_as["model.blocks.0.norm.weight"] == ["Shard(0)", "Replicate"]  # dp alone


def _names(known: tuple[Layout, str] | None) -> list[str] | None:
    return None if known is None else placement_names(known[0])


def test_what_a_file_states_is_confirmed() -> None:
    index = read_index(str(REAL / "fsdp2_torchsave_hsdp_2x4" / "ckpt"))
    found = mesh_of(index)
    assert isinstance(found, FoundMesh)
    assert (found.mesh.shape, found.status) == ((2, 4), "confirmed")
