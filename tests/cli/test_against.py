"""`verify OUT --against SRC` right after a reshard: the same, without the states of old ranks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from reader_contract import DATA
from running import run

REAL = DATA / "checkpoints"
RANDOM = "random states of 4 ranks"
# The source, the layout of docs/frameworks.md, where the output is in OUT, what is left out.
FRAMEWORKS = {
    "accelerate": (
        "accelerate_fsdp2_sharded_llama_tied_4r/ckpt/state",
        ("--layout", "accelerate"),
        "",
        RANDOM,
    ),
    "accelerate, full": (
        "accelerate_fsdp1_full_llama_tied_4r/ckpt/state",
        ("--layout", "accelerate"),
        "",
        RANDOM,
    ),
    "trainer": (
        "transformers_trainer_fsdp2_4r/ckpt/checkpoint-2",
        ("--layout", "accelerate"),
        "",
        RANDOM,
    ),
    "torchtitan": (
        "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
        ("--layout", "titan"),
        "step-2",
        "dataloader of 4 data-parallel ranks",
    ),
    "torchtitan, plain": (
        "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
        (),
        "",
        "dataloader of 4 data-parallel ranks",
    ),
    "composer": (
        "composer-0.32.1-fsdp_sharded/ep0-ba1",
        ("--layout", "composer"),
        "ep0-ba1",
        "random states of 2 ranks",
    ),
    "verl": (
        "verl_fsdp2_4r/ckpt/global_step_1/actor",
        ("--layout", "verl"),
        "global_step_1/actor",
        RANDOM,
    ),
}


def resharded(kind: str, out: Path, mesh: str, *more: str) -> tuple[Path, Path, str]:
    """The source, the output of the documented command, and what is said to be left out."""
    source, layout, folder, left_out = FRAMEWORKS[kind]
    done = run("reshard", REAL / source, "-o", out, "--to-mesh", mesh, *layout, *more)
    assert done.exit_code == 0, done.stderr
    return REAL / source, out / folder, left_out


@pytest.mark.parametrize("mesh", ["3", pytest.param("8", marks=pytest.mark.slow), "2x4"])
@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_an_output_for_other_ranks_is_the_same(kind: str, mesh: str, tmp_path: Path) -> None:
    source, out, left_out = resharded(kind, tmp_path / "out", mesh)
    before = sorted(os.walk(tmp_path))
    done = run("verify", out, "--against", source)
    assert done.exit_code == 0, done.stdout
    assert "the same, bit for bit" in done.stdout
    assert f"; left out on purpose: {left_out}\n" in done.stdout
    assert sorted(os.walk(tmp_path)) == before


@pytest.mark.parametrize("mesh", ["4", "2x2"])
@pytest.mark.parametrize("kind", ["accelerate", "trainer", "torchtitan"])
def test_an_output_for_as_many_ranks_has_all(kind: str, mesh: str, tmp_path: Path) -> None:
    source, out, _ = resharded(kind, tmp_path / "out", mesh)
    done = run("verify", out, "--against", source)
    assert done.exit_code == 0, done.stdout
    assert "left out" not in done.stdout


def test_an_export_for_any_ranks_is_the_same(tmp_path: Path) -> None:
    source = REAL / FRAMEWORKS["trainer"][0]
    done = run("export", source, "-o", tmp_path / "out", "--layout", "accelerate")
    assert done.exit_code == 0, done.stderr
    done = run("verify", tmp_path / "out", "--against", source)
    assert done.exit_code == 0, done.stdout
    assert f"; left out on purpose: {RANDOM}\n" in done.stdout


def test_what_was_kept_is_compared(tmp_path: Path) -> None:
    source, out, _ = resharded("torchtitan", tmp_path / "out", "2", "--keep-rank-states")
    done = run("verify", out, "--against", source, "--json")
    assert done.exit_code == 0, done.stdout
    assert json.loads(done.stdout)["against"]["left_out"] == []


@pytest.mark.parametrize(
    ("mesh", "gone", "missing"),
    [
        ("2", ["scheduler.bin"], "scheduler.last_epoch"),
        ("4", ["scheduler.bin"], "scheduler.last_epoch"),
        ("4", ["random_states_3.pkl"], "random_states.rank_3.torch_manual_seed"),
        (
            "4",
            [f"random_states_{n}.pkl" for n in range(4)],
            "random_states.rank_0.torch_manual_seed",
        ),
    ],
)
def test_all_else_that_is_missing_is_a_difference(
    mesh: str, gone: list[str], missing: str, tmp_path: Path
) -> None:
    source, out, _ = resharded("accelerate", tmp_path / "out", mesh)
    for name in gone:
        (out / name).unlink()
    done = run("verify", out, "--against", source, "--json")
    assert done.exit_code == 1
    against = json.loads(done.stdout)["against"]
    assert missing in {one["name"] for one in against["differences"]}
    assert bool(against["left_out"]) == (mesh == "2")


def test_a_part_of_the_states_was_not_left_out_on_purpose(tmp_path: Path) -> None:
    source = REAL / FRAMEWORKS["torchtitan"][0]
    words = ("--to-mesh", "2", "--keep-rank-states", "-x", "*.dp_rank_3")
    assert run("reshard", source, "-o", tmp_path / "out", *words).exit_code == 0
    done = run("verify", tmp_path / "out", "--against", source)
    assert done.exit_code == 1
    assert "dataloader.dp_rank_3, an object, is missing" in done.stdout
    assert "left out" not in done.stdout


def test_json_says_what_was_left_out(tmp_path: Path) -> None:
    source, out, _ = resharded("trainer", tmp_path / "out", "2")
    against = json.loads(run("verify", out, "--against", source, "--json").stdout)["against"]
    assert against["same"] is True
    assert against["left_out"] == [{"name": "rng_state", "of": "ranks", "ranks": 4}]


def test_bytes_without_checksums_are_proven_only_by_a_comparison_that_finds_them_the_same() -> None:
    ckpt, other = (REAL / name / "ckpt" for name in ("fsdp2_dcp_hsdp_2x4", "fsdp2_dcp_1d_4r"))
    for against, same in ((ckpt, True), (other, False)):
        result = run("verify", ckpt, "--against", against)
        assert result.exit_code == (0 if same else 1)
        assert ("compared are proven below" in result.stdout) == same
        assert ("not all of it is the same below" in result.stdout) != same
        assert (f"complete, but not the same as {against}" in result.stdout) != same


def test_verify_of_a_run_names_what_each_checkpoint_has_lost(tmp_path: Path) -> None:
    for step in ("step-1", "step-2"):
        shutil.copytree(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt", tmp_path / step)
    (tmp_path / "step-2" / "__2_0.distcp").unlink()
    lines = run("verify", tmp_path).stdout.splitlines()
    assert lines[0] == f"{tmp_path}/step-1: complete"
    assert lines[1].startswith(f"{tmp_path}/step-2: NOT COMPLETE")
    assert all(line.startswith("  lost  ") for line in lines[2:])
    assert "(rank 2)" in lines[2]
