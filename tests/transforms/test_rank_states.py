"""What belongs to the ranks that saved goes along only where the target has as many."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path as FilePath

import pytest
from running import run

from ckpt_tools.core.dtypes import BY_NAME
from ckpt_tools.core.index import ByteRange, CheckpointIndex, ObjectEntry, Path, TensorEntry
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.names import join
from ckpt_tools.errors import AnswerNo
from ckpt_tools.formats import read_index
from ckpt_tools.storage.reader import Files
from ckpt_tools.transforms.frameworks import layouts, row_of
from ckpt_tools.transforms.rank_states import (
    EVERY_RANK,
    ONE_FILE,
    TargetRanks,
    without_left_out,
    without_old_ranks,
)

CHECKPOINTS = FilePath(__file__).parents[1] / "data" / "checkpoints"
TITAN = CHECKPOINTS / "torchtitan_llama3_4r" / "ckpt" / "checkpoint_full" / "step-2"
VERL = CHECKPOINTS / "verl_fsdp2_4r" / "ckpt" / "global_step_1" / "actor"
NOWHERE = ByteRange("", 0, 0)
WEIGHT = TensorEntry("model.w", ("model", "w"), "model", BY_NAME["float32"], (2,), ())

# Paths of four ranks' states, and what they are called when they are left out.
OF_FOUR: dict[str, tuple[list[Path], str]] = {
    "torchtitan": (
        [*(("dataloader", f"dp_rank_{n}") for n in range(4)), ("dataloader", "world_size")],
        "dataloader (4 data-parallel ranks)",
    ),
    "keys with dots": (
        [(f"dataloader.dp_rank_{n}",) for n in range(4)],
        "dataloader (4 data-parallel ranks)",
    ),
    "composer": ([("rng", n, "torch") for n in range(4)], "rng (4 ranks)"),
    "files of ranks": (
        [("extra", "rng", "cpu"), *(("extra", "rng", "numpy", f"rank_{n}") for n in range(4))],
        "extra.rng (4 ranks)",
    ),
    "a value that differed": ([("seen", f"rank_{n}") for n in range(4)], "seen.rank_* (4 ranks)"),
    "random states by number": ([(f"rng_state_{n}",) for n in range(4)], "rng_state_* (4 ranks)"),
    "torchdata": (
        [("train_dataloader", "_snapshot", "_snapshot_step"), ("train_dataloader", "_iterator")],
        "train_dataloader (4 ranks)",
    ),
    "torchdata under another name": (
        [("rows", "_num_yielded"), ("rows", "_sampler_iter_state")],
        "rows (4 ranks)",
    ),
}
# What looks a little like it.
OF_NO_RANK: list[Path] = [
    ("rng", "torch"),
    ("rng_state",),
    ("dataloader", "epoch"),
    ("rank",),
    ("lora_rank_8",),
    ("sampler", "seed"),
    ("rng", 0),
]


def checkpoint(*paths: Path, world_size: int | None = 4) -> CheckpointIndex:
    objects = [ObjectEntry(join(path), path, "other", NOWHERE) for path in paths]
    return CheckpointIndex(
        root="ckpt",
        format="dcp",
        tensors=(WEIGHT,),
        objects=tuple(sorted(objects, key=lambda entry: entry.fqn)),
        world_size=world_size,
    )


def left(index: CheckpointIndex, target: TargetRanks) -> int:
    return len(without_old_ranks(index, target)[0].objects)


@pytest.mark.parametrize("kind", OF_FOUR)
def test_states_of_four_ranks_are_for_four_ranks(kind: str) -> None:
    paths, name = OF_FOUR[kind]
    index = checkpoint(*paths)
    kept, notes = without_old_ranks(index, TargetRanks.of_mesh(parse_mesh("2")))
    assert kept.objects == ()
    assert kept.tensors == index.tensors
    assert name in notes[0]
    assert "--keep-rank-states" in notes[0]
    assert left(index, TargetRanks.of_mesh(parse_mesh("4"))) == len(paths)
    assert left(index, TargetRanks.of_mesh(parse_mesh("2x2"))) == len(paths)
    assert left(index, EVERY_RANK) == len(paths)
    assert left(index, ONE_FILE) == 0


@pytest.mark.parametrize(
    ("ranks", "world_size", "said"),
    [(4, 4, "random states of 4 ranks"), (1, 1, "random states of 1 rank")],
)
def test_what_was_left_out_is_known_from_both_checkpoints(
    ranks: int, world_size: int, said: str
) -> None:
    source = checkpoint(*(("rng", n, "torch") for n in range(ranks)), world_size=world_size)
    with Files() as files:
        for world, left_out in ((2, [said]), (ranks, []), (None, [said] if ranks > 1 else [])):
            left, _, gone = without_left_out(source, checkpoint(world_size=world), files)
            assert list(map(str, gone)) == left_out
            assert len(left.objects) == (0 if left_out else ranks)
        kept = checkpoint(("rng", 0, "torch"), world_size=2)
        assert without_left_out(source, kept, files) == (source, kept, ())


def test_states_of_ranks_are_known_by_their_container_where_they_pass_for_weights() -> None:
    """Without a container of the model, all that is no known other state is taken for it."""
    path = ("train", "dataloader", "dp_rank_3", "position")
    position = replace(WEIGHT, fqn=join(path), path=path)
    index = replace(checkpoint(), tensors=(WEIGHT, position))
    kept, notes = without_old_ranks(index, TargetRanks.of_mesh(parse_mesh("2")))
    assert kept.tensors == (WEIGHT,)
    assert "train.dataloader (4 data-parallel ranks)" in notes[0]


def test_what_a_layout_has_no_place_for_is_not_offered_to_be_kept() -> None:
    index = checkpoint(*OF_FOUR["torchtitan"][0], *OF_FOUR["composer"][0])
    two = TargetRanks.of_mesh(parse_mesh("2"))
    said = {
        layout: without_old_ranks(index, two, places=row_of(layout).places)[1]
        for layout in layouts("shards")
    }
    assert said["plain"][0].endswith("--keep-rank-states keeps them.")
    assert said["titan"][0].endswith("--keep-rank-states keeps dataloader.")
    assert said["composer"][0].endswith("--keep-rank-states keeps rng.")
    assert "--keep-rank-states" not in said["verl"][0]
    assert "--keep-rank-states" not in said["accelerate"][0]


def test_data_positions_follow_the_ranks_that_read_rows() -> None:
    paths, _ = OF_FOUR["torchtitan"]
    four_by_two = TargetRanks.of_mesh(parse_mesh("dp_shard=4,tp=2"))
    assert left(checkpoint(*paths), four_by_two) == len(paths)
    paths, _ = OF_FOUR["composer"]
    assert left(checkpoint(*paths), four_by_two) == 0


@pytest.mark.parametrize("path", OF_NO_RANK, ids=join)
def test_what_was_saved_once_for_all_stays(path: Path) -> None:
    index = checkpoint(path)
    assert without_old_ranks(index, TargetRanks.of_mesh(parse_mesh("2"))) == (index, [])


def test_a_state_of_an_unknown_number_of_ranks_is_for_no_mesh() -> None:
    paths, _ = OF_FOUR["torchdata"]
    index = checkpoint(*paths, world_size=None)
    assert left(index, TargetRanks.of_mesh(parse_mesh("4"))) == 0
    assert left(index, ONE_FILE) == len(paths)


def test_states_of_ranks_alone_are_no_output() -> None:
    index = checkpoint(*OF_FOUR["composer"][0])
    with pytest.raises(AnswerNo, match="all that is chosen is state of the ranks"):
        without_old_ranks(index.select({e.fqn for e in index.objects}), ONE_FILE)


def test_a_reshard_names_what_each_rank_holds_whole_and_could_be_cut(tmp_path: FilePath) -> None:
    command = ["reshard", str(TITAN), "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    note = next(line for line in run(*command).stderr.splitlines() if "12" in line)
    weights = ", ".join(f"layers.0.attention.qkv_linear.w{one}.weight" for one in "kqv")
    assert note == (
        f"15 tensors replicated on each rank: 12 scalars, {weights}; --place shards them."
    )


def test_a_plain_reshard_takes_no_positions_of_other_ranks_along(tmp_path: FilePath) -> None:
    def names_after(mesh: str, *more: str) -> set[str]:
        out = tmp_path / mesh / str(len(more))
        command = ["reshard", str(TITAN), "-o", str(out), "--to-mesh", mesh, *more]
        done = run(*command)
        assert done.exit_code == 0, done.stderr
        assert ("Left out, state of the old ranks: dataloader" in done.stderr) == (
            mesh == "2" and not more
        )
        return {entry.fqn for entry in read_index(str(out)).objects if "dataloader" in entry.fqn}

    assert names_after("4") == {
        *(f"dataloader.dp_rank_{n}" for n in range(4)),
        "dataloader.world_size",
    }
    assert names_after("2") == set()
    assert len(names_after("2", "--keep-rank-states")) == 5


def test_a_file_for_any_ranks_has_no_states_of_four(tmp_path: FilePath) -> None:
    command = ["export", str(VERL), "--only", "all", "--keep-names", "-o"]
    done = run(*command, tmp_path / "a.pt")
    assert "Left out, state of the old ranks: extra_state.rng (4 ranks)." in done.stderr
    found = {entry.fqn for entry in read_index(str(tmp_path / "a.pt")).entries}
    assert not [fqn for fqn in found if ".rng." in fqn]
    run(*command, tmp_path / "b.pt", "--keep-rank-states")
    kept = {entry.fqn for entry in read_index(str(tmp_path / "b.pt")).entries}
    assert "extra_state.rng.random.rank_3" in kept
