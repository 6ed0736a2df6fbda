"""A framework's own checkpoint, laid out for it again, has the names that its loader asks for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alone import ALONE
from running import Result, run
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

from ckpt_tools.formats import read_index

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
TITAN = CHECKPOINTS / "torchtitan_llama3_4r" / "ckpt" / "checkpoint_full" / "step-2"
COMPOSER = CHECKPOINTS / "composer-0.32.1-fsdp_sharded" / "ep0-ba1"
LIGHTNING = CHECKPOINTS / "lightning_fsdp_sharded_4r" / "ckpt" / "state.ckpt"
VERL = CHECKPOINTS / "verl_fsdp2_4r" / "ckpt" / "global_step_1" / "actor"
ACCELERATE = CHECKPOINTS / "accelerate_fsdp2_sharded_qwen2_untied_4r" / "ckpt" / "state"
ACCELERATE1 = CHECKPOINTS / "accelerate_fsdp1_full_llama_tied_4r" / "ckpt" / "state"
TRAINER = CHECKPOINTS / "transformers_trainer_fsdp2_4r" / "ckpt" / "checkpoint-2"


def names_of(path: Path) -> set[str]:
    index = read_index(str(path))
    return {entry.fqn for entry in (*index.tensors, *index.objects)}


def lay_out(source: Path, out: Path, layout: str, *more: str) -> str:
    """Run `reshard --layout`; what it told on stderr."""
    command = ["reshard", str(source), "-o", str(out), "--to-mesh", "2", "--layout", layout, *more]
    done = run(*command)
    assert done.exit_code == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("source", "layout", "folder", "gone"),
    [
        (TITAN, "titan", "step-2", "dataloader."),
        (COMPOSER, "composer", "ep0-ba1", None),
        (LIGHTNING, "lightning", "", None),
        (ACCELERATE / "pytorch_model_fsdp_0", "accelerate", "pytorch_model_fsdp_0", None),
        (ACCELERATE / "optimizer_0", "accelerate", "optimizer_0", None),
        (TRAINER / "optimizer_0", "accelerate", "optimizer_0", None),
    ],
    ids=["titan", "composer", "lightning", "accelerate-model", "accelerate-optim", "trainer"],
)
def test_a_framework_finds_all_of_its_own_names_again(
    tmp_path: Path, source: Path, layout: str, folder: str, gone: str | None
) -> None:
    lay_out(source, tmp_path / "out", layout)
    kept = {name for name in names_of(source) if gone is None or not name.startswith(gone)}
    assert names_of(tmp_path / "out" / folder) == kept


def test_verl_gets_rank_files_with_its_own_keys(tmp_path: Path) -> None:
    lay_out(VERL, tmp_path / "out", "verl", "--device-type", "cpu")
    folder = tmp_path / "out" / "global_step_1" / "actor"
    kept = {name for name in names_of(VERL) if ".rng." not in name}
    assert names_of(folder) == kept
    assert json.loads((folder / "fsdp_config.json").read_text()) == {
        "FSDP_version": 2,
        "world_size": 2,
    }
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        there, here = VERL / "huggingface" / name, folder / "huggingface" / name
        assert here.read_bytes() == there.read_bytes()


@pytest.mark.parametrize("part", ["model", "optim"])
def test_verl_gets_a_part_that_is_alone_as_it_gets_it_with_the_others(
    tmp_path: Path, part: str
) -> None:
    for out, more in (("all", []), ("alone", ["--only", part])):
        lay_out(VERL, tmp_path / out, "verl", "--device-type", "cpu", *more)
    for rank in range(2):
        file = Path("global_step_1", "actor", f"{part}_world_size_2_rank_{rank}.pt")
        assert (tmp_path / "alone" / file).read_bytes() == (tmp_path / "all" / file).read_bytes()


@pytest.mark.parametrize(
    ("mesh", "names"), [("2", ("fsdp",)), ("2x2", ("ddp", "fsdp")), ("dp=2", ("dp",))]
)
def test_verl_gets_the_mesh_that_its_own_loader_has(
    tmp_path: Path, mesh: str, names: tuple[str, ...]
) -> None:
    command = ["reshard", str(VERL), "-o", str(tmp_path / "out"), "--to-mesh", mesh]
    placed = ["--placements", "S(0)"] if "=" in mesh else []
    done = run(*command, "--layout", "verl", *placed)
    assert done.exit_code == 0, done.stderr
    found = read_index(str(tmp_path / "out" / "global_step_1" / "actor")).mesh
    assert found is not None
    assert found.dim_names == names


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved", ["ShardedGradScaler", "GradScaler", "ClosureGradScaler"])
def test_composers_gradient_scaler_is_found_by_fsdp1_and_by_fsdp2(
    tmp_path: Path, saved: str
) -> None:
    """On GPUs its Trainer saves it by its class, and that of FSDP2 is another one than FSDP1's."""
    model, scaler = {"weight": torch.ones(4)}, {"scale": 1024.0, "_growth_tracker": 7}
    state = {"model": model, "scaler": {saved: scaler}, "run_name": "run"}
    dcp.save({"state": state}, checkpoint_id=tmp_path / "ep0-ba7", **ALONE)
    lay_out(tmp_path / "ep0-ba7", tmp_path / "out", "composer")
    for asked in ("ShardedGradScaler", "GradScaler", "ClosureGradScaler"):
        found = {"state": {"scaler": {asked: dict.fromkeys(scaler, 0)}}}
        dcp.load(found, checkpoint_id=tmp_path / "out" / "ep0-ba7", **ALONE)
        assert found["state"]["scaler"][asked] == scaler


def test_states_of_the_old_ranks_are_left_out_and_named(tmp_path: Path) -> None:
    command = ["reshard", str(COMPOSER), "-o", str(tmp_path / "a"), "--to-mesh", "4"]
    told = run(*command, "--layout", "composer").stderr
    assert "Left out, state of the old ranks: rng (2 ranks)." in told
    assert "rng" in names_of(tmp_path / "a" / "ep0-ba1")  # an empty list, which its loader asks for
    told = lay_out(TITAN, tmp_path / "b", "titan")
    assert "Left out, state of the old ranks: dataloader (4 data-parallel ranks)." in told
    told = lay_out(ACCELERATE / "optimizer_0", tmp_path / "c", "accelerate")
    assert "of the old ranks: random_states_0.pkl, random_states_1.pkl" in told


def test_states_of_as_many_ranks_stay(tmp_path: Path) -> None:
    assert "rng.1.python" in names_of(COMPOSER)
    lay_out(COMPOSER, tmp_path / "a", "composer")
    assert "rng.1.python" in names_of(tmp_path / "a" / "ep0-ba1")
    command = ["reshard", str(TITAN), "-o", str(tmp_path / "b"), "--to-mesh", "4"]
    told = run(*command, "--layout", "titan").stderr
    assert "dataloader.dp_rank_3" in names_of(tmp_path / "b" / "step-2")
    assert "exclude_from_loading" not in told
    command = ["reshard", str(ACCELERATE / "optimizer_0"), "-o", str(tmp_path / "c")]
    run(*command, "--to-mesh", "4", "--layout", "accelerate")
    assert (tmp_path / "c" / "random_states_3.pkl").exists()


def test_states_of_other_ranks_stay_when_asked_for(tmp_path: Path) -> None:
    lay_out(TITAN, tmp_path / "b", "titan", "--keep-rank-states")
    assert "dataloader.dp_rank_3" in names_of(tmp_path / "b" / "step-2")
    lay_out(ACCELERATE / "optimizer_0", tmp_path / "c", "accelerate", "--keep-rank-states")
    assert (tmp_path / "c" / "random_states_3.pkl").exists()


def test_side_files_of_all_ranks_go_along(tmp_path: Path) -> None:
    lay_out(TRAINER / "optimizer_0", tmp_path / "out", "accelerate")
    for name in ("trainer_state.json", "scheduler.pt"):
        assert (tmp_path / "out" / name).read_bytes() == (TRAINER / name).read_bytes()


@pytest.mark.parametrize(("ranks", "stays"), [("4", True), ("2", False)])
def test_a_position_in_the_data_stays_for_as_many_ranks_and_is_named_else(
    tmp_path: Path, *, ranks: str, stays: bool
) -> None:
    source = shutil.copytree(ACCELERATE, tmp_path / "state")
    source.chmod(0o755)
    torch.save({"_num_yielded": 3}, source / "dl_state_dict.bin")
    command = ["reshard", str(source), "-o", str(tmp_path / "out"), "--layout", "accelerate"]
    told = run(*command, "--to-mesh", ranks).stderr
    assert (tmp_path / "out" / "dl_state_dict.bin").exists() == stays
    assert ("of the old ranks: dl_state_dict.bin, random_states_0" in told) != stays


def test_lightning_gets_the_meta_file_of_a_lightning_source(tmp_path: Path) -> None:
    lay_out(LIGHTNING, tmp_path / "out", "lightning")
    assert (tmp_path / "out" / "meta.pt").read_bytes() == (LIGHTNING / "meta.pt").read_bytes()


@pytest.mark.parametrize(
    ("layout", "container"), [("lightning-fsdp1", "model"), ("lightning-fsdp2", "state_dict")]
)
def test_each_strategy_of_lightnings_trainer_finds_its_own_container(
    tmp_path: Path, layout: str, container: str
) -> None:
    lay_out(LIGHTNING, tmp_path / "out", layout)
    found = read_index(str(tmp_path / "out"))
    tops = {entry.path[0] for entry in found.tensors if entry.section == "model"}
    assert tops == {container}
    assert (tmp_path / "out" / "meta.pt").read_bytes() == (LIGHTNING / "meta.pt").read_bytes()


def test_the_one_file_of_lightnings_trainer_becomes_what_its_sharded_strategies_load(
    tmp_path: Path,
) -> None:
    group = {"lr": 0.1, "params": [0]}
    held = {"state": {0: {"momentum_buffer": torch.ones(4)}}, "param_groups": [group]}
    state = {"state_dict": {"net.w": torch.ones(4)}, "optimizer_states": [held]}
    torch.save(state | {"pytorch-lightning_version": "2.6.6", "epoch": 3}, tmp_path / "last.ckpt")
    (tmp_path / "names.txt").write_text("net.w\n")
    words = ("--param-names", str(tmp_path / "names.txt"))
    lay_out(tmp_path / "last.ckpt", tmp_path / "out", "lightning-fsdp2", *words)
    found = {entry.fqn for entry in read_index(str(tmp_path / "out")).entries}
    assert {"state_dict.net.w", "optimizer_0.state.net.w.momentum_buffer"} <= found
    assert not any(name.startswith("optimizer_states") for name in found)
    assert torch.load(tmp_path / "out" / "meta.pt", weights_only=True)["epoch"] == 3


def test_a_flattened_optimizer_becomes_nested_and_back_again(tmp_path: Path) -> None:
    lay_out(TITAN, tmp_path / "plain", "plain")
    assert "optim.param_groups.0.params" in names_of(tmp_path / "plain")
    lay_out(tmp_path / "plain", tmp_path / "again", "titan")
    again = {n for n in names_of(tmp_path / "again" / "step-1") if n.startswith("optimizer.")}
    assert again == {name for name in names_of(TITAN) if name.startswith("optimizer.")}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["plain", "titan", "lightning"])
def test_groups_that_torch_2_3_kept_as_one_object_are_laid_out_as_those_of_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state, optim = get_state_dict(model, optimizer)
    for name, version in {"today": None, "2.3": "2_3"}.items():
        monkeypatch.setattr(_version, "_derived_version", version)
        dcp.save({"model": state, "optim": optim}, checkpoint_id=tmp_path / name, **ALONE)
        lay_out(tmp_path / name, tmp_path / f"{name}-out", layout)
    assert "optim.param_groups" in names_of(tmp_path / "2.3")
    assert names_of(tmp_path / "2.3-out") == names_of(tmp_path / "today-out")


def test_fsdp1_in_one_file_becomes_what_fsdp2_of_accelerate_loads(tmp_path: Path) -> None:
    lay_out(ACCELERATE1 / "optimizer.bin", tmp_path / "out", "accelerate")
    found = names_of(tmp_path / "out" / "optimizer_0")
    assert found == {f"optimizer.{name}" for name in names_of(ACCELERATE1 / "optimizer.bin")}


def test_a_second_part_leaves_the_first_where_it_is(tmp_path: Path) -> None:
    lay_out(ACCELERATE / "pytorch_model_fsdp_0", tmp_path / "out", "accelerate")
    lay_out(ACCELERATE / "optimizer_0", tmp_path / "out", "accelerate", "--force")
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert names_of(tmp_path / "out" / part) == names_of(ACCELERATE / part)


def whole(source: Path, out: Path, *more: str) -> Result:
    command = ["export", str(source), "-o", str(out), "--layout", "accelerate", *more]
    return run(*command)


@pytest.mark.parametrize("source", [ACCELERATE, ACCELERATE1, TRAINER, TITAN], ids=lambda p: p.name)
def test_model_and_optimizer_become_the_files_of_a_full_state_dict(
    tmp_path: Path, source: Path
) -> None:
    """What ``load_fsdp_model`` and ``load_fsdp_optimizer`` give to FSDP, by torch's own loader."""
    assert whole(source, tmp_path / "out").exit_code == 0
    lay_out(source, tmp_path / "shards", "accelerate")
    wanted: dict[str, object] = {}
    for part, top in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        dcp_to_torch_save(tmp_path / "shards" / part, tmp_path / "wanted.pt")
        wanted |= torch.load(tmp_path / "wanted.pt", weights_only=True)
        assert list(wanted)[-1] == top
    files = ("pytorch_model_fsdp.bin", "optimizer.bin")
    model, optim = (torch.load(tmp_path / "out" / name, weights_only=True) for name in files)
    assert all(isinstance(value, torch.Tensor) for value in model.values())
    assert_equal(model, wanted["model"])
    assert_equal(optim, wanted["optimizer"])
    assert not list((tmp_path / "out").glob("r*"))  # random states of the old ranks
    side = [p.name for p in source.glob("scheduler.*")] + [p.name for p in source.glob("*.json")]
    assert {*files, *side} == {p.name for p in (tmp_path / "out").iterdir()}


def assert_equal(found: object, wanted: object) -> None:
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert isinstance(found, dict)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal(found[key], value)
    elif isinstance(wanted, (list, tuple)):
        assert isinstance(found, (list, tuple))
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--format", "safetensors"], "folder of torch files"),
        (["--keep-names"], "sets the names"),
        (["--rename", "a=b"], "sets the names"),
        (["--check"], "diff CKPT OUT"),
    ],
)
def test_what_a_layout_of_whole_tensors_cannot_have_is_refused(
    tmp_path: Path, more: Sequence[str], told: str
) -> None:
    done = whole(ACCELERATE, tmp_path / "out", *more)
    assert done.exit_code == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())


def test_one_section_of_a_layout_of_whole_tensors_is_one_file(tmp_path: Path) -> None:
    assert whole(ACCELERATE, tmp_path / "out", "--only", "optim").exit_code == 0
    assert not (tmp_path / "out" / "pytorch_model_fsdp.bin").exists()
    assert (tmp_path / "out" / "optimizer.bin").exists()


def test_who_needs_whole_files_for_accelerates_fsdp1_is_told_so(tmp_path: Path) -> None:
    told = lay_out(ACCELERATE, tmp_path / "out", "accelerate")
    assert "export CKPT -o OUT --layout accelerate" in told
    alone = lay_out(ACCELERATE, tmp_path / "model", "accelerate", "--only", "model")
    assert "FSDP1" not in alone


def test_a_nested_optimizer_is_proven_equal_under_its_new_names(tmp_path: Path) -> None:
    assert "44 bit for bit" in lay_out(TITAN, tmp_path / "out", "plain", "--check")


def test_a_numbered_optimizer_stays_so_in_the_order_that_it_stores(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(layer.named_parameters())
    layer(torch.ones(1, 2)).sum().backward()
    adam.step()
    torch.save({"model": layer.state_dict(), "optim": adam.state_dict()}, tmp_path / "a.pt")
    lay_out(tmp_path / "a.pt", tmp_path / "same", "verl")
    lay_out(tmp_path / "a.pt", tmp_path / "stored", "verl", "--param-names", "stored")
    found = [
        {p.relative_to(tmp_path / out): p.read_bytes() for p in (tmp_path / out).rglob("*.pt")}
        for out in ("same", "stored")
    ]
    assert found[0] == found[1]


def test_a_named_optimizer_is_not_numbered_without_an_order(tmp_path: Path) -> None:
    command = ["reshard", str(LIGHTNING), "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    done = run(*command, "--layout", "verl")
    assert done.exit_code == 2
    assert "--param-names FILE" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [["--engine", "dcp"], ["--format", "ranks"]])
def test_what_a_layout_cannot_have_is_refused(tmp_path: Path, more: Sequence[str]) -> None:
    command = ["reshard", str(LIGHTNING), "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    done = run(*command, "--layout", "titan", *more)
    assert done.exit_code == 2
    assert "--layout" in done.stderr


MODEL_MB = 384
LIMIT_MB = 32


@pytest.mark.slow
def test_a_full_state_dict_larger_than_memory_allows_becomes_a_dcp_directory(
    tmp_path: Path,
) -> None:
    """Peak memory is that of the interpreter and of the buffers, whatever the model takes."""
    import torch

    model = {f"blocks.{n}.weight": torch.full((1 << 12, 1 << 13), float(n)) for n in range(3)}
    torch.save({"model": model}, tmp_path / "full.pt")
    del model
    base = _peak_kib(["--version"])
    source, out = str(tmp_path / "full.pt"), str(tmp_path / "out")
    options = ["--to-mesh", "8", "--layout", "plain", "--max-memory", f"{LIMIT_MB}MB"]
    peak = _peak_kib(["reshard", source, "-o", out, *options])
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > MODEL_MB << 20
    assert peak - base < (LIMIT_MB + 64) << 10
    index = read_index(out)
    assert [len(entry.chunks) for entry in index.tensors] == [8, 8, 8]


def _peak_kib(arguments: Sequence[str]) -> int:
    """The peak resident memory of one run of the command line, in KiB."""
    program = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'ckpt_tools', *sys.argv[1:]], check=True,"
        " stdout=subprocess.DEVNULL)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_a_name_that_two_entries_would_have_is_refused(tmp_path: Path) -> None:
    state = {"step": torch.ones(())}
    torch.save(
        {"model": {"train_state.step": torch.ones(2)}, "train_state": state}, tmp_path / "a.pt"
    )
    command = ["reshard", str(tmp_path / "a.pt"), "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    done = run(*command, "--layout", "titan")
    assert done.exit_code == 2
    assert "This layout would call two entries train_state.step." in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_section_that_is_no_optimizer_is_not_laid_out_as_one(tmp_path: Path) -> None:
    torch.save({"optim": {"w": {"exp_avg": torch.ones(2)}}}, tmp_path / "a.pt")
    command = ["reshard", str(tmp_path / "a.pt"), "-o", str(tmp_path / "out"), "--to-mesh", "2"]
    done = run(*command, "--layout", "plain")
    assert done.exit_code == 2
    assert "optim.w.exp_avg: no state dict of an optimizer has it" in done.stderr
