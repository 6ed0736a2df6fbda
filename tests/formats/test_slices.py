"""One rank's slices are never a whole model; steps, epochs, seeds and copies of one are."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from running import run
from safetensors.torch import load_file, save_file

import ckpt_tools
from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import CheckpointError, IncompleteError, UnsupportedError, UsageError
from ckpt_tools.formats import ReadOptions, slices, torch_file

State = Mapping[str, object]
WHOLE = {
    f"layers.{layer}.{name}": torch.arange(float(numel)).view(shape) + layer
    for layer in range(2)
    for name, shape, numel in (("weight", (10, 6), 60), ("bias", (10,), 10))
}
NORM = torch.ones(6)


def save(path: Path, state: State) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file({k: v for k, v in state.items() if isinstance(v, torch.Tensor)}, path)
    else:
        torch.save(dict(state), path)


def rows(rank: int, world: int) -> dict[str, torch.Tensor]:
    """The rows that torch gives to a rank, and a tensor that every rank has."""
    cut = {name: tensor.chunk(world)[rank].clone() for name, tensor in WHOLE.items()}
    return {**cut, "norm.weight": NORM}


def stage(number: int) -> dict[str, torch.Tensor]:
    """The whole tensors of one layer."""
    return {name: t for name, t in WHOLE.items() if name.startswith(f"layers.{number}.")}


def model(seed: int) -> dict[str, torch.Tensor]:
    return {name: tensor + seed for name, tensor in WHOLE.items()}


def problem(path: Path) -> CheckpointError | None:
    index = formats.read_index(str(path))
    assert all(not one.about for one in index.problems)
    return index.problems[0] if index.problems else None


# ------------------------------------------------------------------------------ slices of one rank

BY_SIBLINGS = [
    "model/pp_00/tp_00/sdp_{rank:02}.pt",  # fairseq2
    "model/pp_00/tp_{rank:02}/sdp_00.pt",
    "optimizer/pp_00/tp_00/sdp_{rank:02}.pt",
    "model-rank-{rank}-part-0.safetensors",  # vLLM
    "mp_rank_{rank:02}_model.pt",
    "mp_rank_{rank:02}_model_states.pt",  # DeepSpeed
    "iter_0000005/mp_rank_{rank:02}/model_rng.pt",  # Megatron
    "mp_rank_00_{rank:03}/model.pt",
    "tp_rank_{rank:02}_pp_rank_000/model_weights.ckpt",  # NeMo
    "model_tp{rank}_pp0.pt",  # InternLM
    "rank{rank}.safetensors",  # TensorRT-LLM
    "tp{rank}_sharded_checkpoint.safetensors",  # Neuron
    "ckpt_rank-0000000{rank}-of-00000002.pth",
    "checkpoint_last-model_part-{rank}.pt",  # metaseq
    "sharded_model_{rank}.pt",
    "weights.{rank}-of-2.pth",
    "consolidated.0{rank}.safetensors",
    "rank_{rank}/model.safetensors",
    "step_100/rank_{rank}.pt",
]


@pytest.mark.parametrize("world", [2, 4])  # even rows, and shapes that differ
@pytest.mark.parametrize("name", BY_SIBLINGS)
def test_slices_of_a_rank_are_known_by_what_is_beside_them(
    tmp_path: Path, name: str, world: int
) -> None:
    name = name.replace("of-00000002", f"of-0000000{world}").replace("of-2", f"of-{world}")
    files = [tmp_path / name.format(rank=rank) for rank in range(world)]
    for rank, file in enumerate(files):
        save(file, rows(rank, world))
    for file in files:
        found = problem(file)
        assert isinstance(found, UnsupportedError)
        assert "slices of one rank" in found.message
        others = {os.path.relpath(one, file.parent) for one in files if one != file}
        assert any(other in found.message for other in others)
        assert found.hint is not None
        assert "by its own name" not in found.hint
        assert "-x" not in found.hint


XLA = {
    "model": {"_fsdp_wrapped_module._fsdp_shard.weight": torch.ones(30)},
    "shard_metadata": {"shard_info": {"": {"_fsdp_shard.weight": {"_orig_name": "weight"}}}},
}
FAIRSCALE = {
    "model": {"decoder.layers.0.flat_param_0": torch.ones(30), "decoder.version": torch.ones(1)},
    "shard_metadata": {"param_metadata": [{"fsdp_path": "decoder.layers.0", "params": {}}]},
}
BY_CONTENT = [
    ("m_rank-00000000-of-00000004.pth", XLA, "consolidate_sharded_ckpts"),
    ("renamed.pt", XLA, "consolidate_sharded_ckpts"),
    ("checkpoint_last-shard0.pt", FAIRSCALE, "consolidate_shard_weights"),
    ("a.pt", {"model": FAIRSCALE["model"]}, "consolidate_shard_weights"),
    ("a.pt", {"model": WHOLE, "shard_metadata": {"rank": 0}}, "consolidate_shard_weights"),
    ("mp_rank_00_model_states.pt", {"module": WHOLE, "mp_world_size": 2}, "Megatron-LM"),
    ("m.pt", {"model": WHOLE, "args": Namespace(tensor_model_parallel_size=2)}, "Megatron-LM"),
]


@pytest.mark.parametrize(("name", "state", "tool"), BY_CONTENT)
def test_slices_of_a_rank_are_known_by_what_they_hold(
    tmp_path: Path, name: str, state: State, tool: str
) -> None:
    save(tmp_path / name, state)
    found = problem(tmp_path / name)
    assert isinstance(found, UnsupportedError)
    assert tool in str(found.hint)


@pytest.mark.parametrize("key", ["unsharded_shape", "local_global_slices_pairs", "shard_dim"])
def test_slices_of_a_rank_are_known_by_their_header(tmp_path: Path, key: str) -> None:
    file = tmp_path / "model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors"
    save_file({"data": torch.ones(3, 2)}, file, metadata={key: "(6, 2)"})
    for path in (file, tmp_path):
        index = formats.read_index(str(path))
        assert f"as {key} says" in index.problems[0].message
        assert "nanotron" in str(index.problems[0].hint)


@pytest.mark.parametrize("split", [torch.chunk, torch.tensor_split])
def test_shapes_that_add_up_tell_without_a_word_in_the_name(tmp_path: Path, split: object) -> None:
    assert callable(split)
    for rank in range(4):
        cut = {name: split(tensor, 4)[rank].clone() for name, tensor in WHOLE.items()}
        save(tmp_path / f"ckpt_{rank}.pt", cut)
    for rank in range(4):
        assert isinstance(problem(tmp_path / f"ckpt_{rank}.pt"), UnsupportedError)


def test_a_rank_that_is_damaged_hides_nothing(tmp_path: Path) -> None:
    for rank in range(3):
        save(tmp_path / f"sdp_{rank}.pt", rows(rank, 3))
    (tmp_path / "sdp_2.pt").write_bytes(b"PK\x03\x04")
    for rank in range(2):
        assert isinstance(problem(tmp_path / f"sdp_{rank}.pt"), UnsupportedError)


# -------------------------------------------------------------------------------- parts of a model


def test_a_part_says_where_the_others_are_and_a_glob_joins_them(tmp_path: Path) -> None:
    folder, out = tmp_path / "epochs", tmp_path / "out.safetensors"
    for epoch in range(2):
        for number in range(2):
            state = {name: t + epoch for name, t in stage(number).items()}
            save(folder / f"hf_model_000{number + 1}_{epoch}.pt", state)  # torchtune
    part = folder / "hf_model_0001_0.pt"
    found = problem(part)
    assert isinstance(found, IncompleteError)
    assert "hf_model_0002_0.pt" in found.message
    assert "hf_model_0001_1.pt" not in found.message
    result = run("export", part, "-o", out)
    assert result.exit_code == 3
    glob = str(folder / "hf_model_*_0.pt")
    assert f"export '{glob}'" in result.stderr
    assert run("export", glob, "-o", out).exit_code == 0
    written = load_file(out)
    assert written.keys() == WHOLE.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in WHOLE.items())


@pytest.mark.parametrize("lost", ["m-00001-of-00003.pt", "m-00002-of-00003.pt", "m_1.pt", "m_2.pt"])
def test_a_glob_of_parts_says_which_one_is_lost(tmp_path: Path, lost: str) -> None:
    stem, number, end = lost.partition(lost[2:7] if "of" in lost else lost[2])
    for at in range(1, 4):
        if at != int(number):
            name = f"{stem}{at:0{len(number)}}{end}"
            save(tmp_path / name, {f"layers.{at}.w": torch.ones(2)})
    index = formats.read_index(str(tmp_path / f"{stem}*{end}"))
    with pytest.raises(IncompleteError, match=f"without {int(number)}\\."):
        index.require_whole()


def test_files_that_a_glob_chooses_for_other_reasons_are_not_joined(tmp_path: Path) -> None:
    save(tmp_path / "encoder.pt", stage(0))
    save(tmp_path / "decoder.pt", stage(1))
    with pytest.raises(UsageError, match="a rank in its name"):
        formats.read_index(str(tmp_path / "*.pt"))


@pytest.mark.parametrize(
    "name",
    ["pp_rank_{at}.pt", "model-rank-0-part-{at}.safetensors", "pp_{at:02}/tp_00/sdp_00.pt"],
)
def test_a_stage_or_a_part_of_a_rank_is_a_part(tmp_path: Path, name: str) -> None:
    for at in range(2):
        save(tmp_path / name.format(at=at), stage(at))
    for at in range(2):
        assert isinstance(problem(tmp_path / name.format(at=at)), IncompleteError)


def test_one_of_n_whose_others_are_lost_is_a_part(tmp_path: Path) -> None:
    save(tmp_path / "m_rank-0-of-4.pt", rows(0, 4))
    found = problem(tmp_path / "m_rank-0-of-4.pt")
    assert isinstance(found, IncompleteError)
    assert "one of 4 files" in found.message


# ------------------------------------------------------------------------------------ whole models

WHOLE_NAMES = [
    "step_{}00.pt",
    "step-{}.safetensors",
    "epoch={}-step={}0.ckpt",
    "epoch_{}.pt",
    "model_{}.pt",
    "model_{}.safetensors",
    "{}.pt",
    "checkpoint-{}.pt",
    "ckpt_{}.bin",
    "pytorch_model_{}.bin",
    "seed_{}.pt",
    "seed{}_shard0.pt",
    "fold{}.pth",
    "ema_0.{}.pt",
    "step_{}_rank_0.pt",
    "ep0-ba{}-rank0.pt",
    "rank0_{}00.pt",
    "step_{}/model.pt",
    "run_{}/rank_0.pt",
    "department_{}.pt",
    "llama-3.{}-8b.pt",
]


@pytest.mark.parametrize("name", WHOLE_NAMES)
def test_steps_epochs_seeds_and_averages_are_whole(tmp_path: Path, name: str) -> None:
    files = [tmp_path / name.replace("{}", str(at)) for at in range(1, 4)]
    for at, file in enumerate(files):
        save(file, model(at))
    for file in files:
        assert problem(file) is None


@pytest.mark.parametrize("name", ["rank_{}.pt", "model_shard{}.pth", "tp_0{}/model.pt"])
def test_copies_that_every_rank_saved_are_whole(tmp_path: Path, name: str) -> None:
    for rank in range(2):
        own = {"model": WHOLE, "rng": {"cpu": torch.full((4,), rank)}}
        save(tmp_path / name.format(rank), own)
    for rank in range(2):
        assert problem(tmp_path / name.format(rank)) is None


@pytest.mark.parametrize("ranks", [(8, 16), (1, 2)])
def test_the_rank_of_an_adapter_is_none_of_a_job(tmp_path: Path, ranks: tuple[int, int]) -> None:
    for rank in ranks:
        state = {"q.lora_A.weight": torch.ones(rank, 6), "q.lora_B.weight": torch.ones(6, rank)}
        save(tmp_path / f"lora_rank_{rank}.safetensors", state)
    for rank in ranks:
        assert problem(tmp_path / f"lora_rank_{rank}.safetensors") is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"w": torch.ones(8, 4)}, {"w": torch.ones(16, 8)}),  # another width
        ({"emb": torch.ones(7, 4)}, {"emb": torch.ones(8, 4)}),  # a grown vocabulary
        ({"emb": torch.ones(9, 4)}, {"emb": torch.ones(3, 4)}),
        (stage(0), {**stage(0), **stage(1)}),  # another depth
        ({"unet.down.weight": torch.ones(2)}, {"text.emb.weight": torch.ones(2)}),
    ],
)
def test_other_models_beside_one_are_whole(tmp_path: Path, first: State, second: State) -> None:
    save(tmp_path / "model_0.pt", first)
    save(tmp_path / "model_1.pt", second)
    assert problem(tmp_path / "model_0.pt") is None
    assert problem(tmp_path / "model_1.pt") is None


@pytest.mark.parametrize(
    "state",
    [
        {"module": WHOLE, "mp_world_size": 1},
        {"model": WHOLE, "args": Namespace(tensor_model_parallel_size=1)},
        {"model": WHOLE, "config": {"tensor_model_parallel_size": 2, "shard_spec": 1}},
        {"args": Namespace(tensor_model_parallel_size=2), "rng_state": torch.ones(2)},
    ],
)
def test_one_model_parallel_rank_is_whole(tmp_path: Path, state: State) -> None:
    save(tmp_path / "mp_rank_00_model_states.pt", state)
    assert problem(tmp_path / "mp_rank_00_model_states.pt") is None


def test_what_only_one_rank_has_for_itself_is_no_model(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / f"rng_rank_{rank}.pt", {"rng_state": {"cpu": torch.full((4,), rank)}})
    assert problem(tmp_path / "rng_rank_0.pt") is None


# ------------------------------------------------------------------------- folders, commands, costs


def test_a_folder_of_slices_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / f"step_5/model/pp_00/tp_00/sdp_0{rank}.pt", rows(rank, 2))
        save(tmp_path / f"step_5/data/dp_0{rank}.pt", {"position": rank})
    result = run("export", tmp_path / "step_5", "-o", tmp_path / "out.safetensors")
    assert result.exit_code == 3
    assert "slices of one rank" in result.stderr
    assert "fairseq2" in result.stderr
    assert not any("sdp" in line for line in result.stderr.splitlines() if "export" in line)


def test_a_folder_of_parts_and_models_names_both(tmp_path: Path) -> None:
    save(tmp_path / "run" / "a" / "model.pt", WHOLE)
    for number in range(2):
        save(tmp_path / "run" / "b" / f"hf_model_000{number + 1}_0.pt", stage(number))
    result = run("export", tmp_path / "run", "-o", tmp_path / "out.safetensors")
    assert result.exit_code == 3
    offered = [line for line in result.stderr.splitlines() if "ckpt-tools export" in line]
    assert len(offered) == 2
    assert "hf_model_*_0.pt" in offered[0]
    assert "a/model.pt" in offered[1]


def test_a_safetensors_folder_of_slices_says_so(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / f"model-rank-{rank}-part-0.safetensors", rows(rank, 2))
    found = problem(tmp_path)
    assert isinstance(found, UnsupportedError)
    assert "slices of one rank" in found.message
    assert "sharded_state" in str(found.hint)


def test_rank_files_of_slices_are_not_to_be_mended_by_filters(tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path / "plain" / f"model_rank_{rank}.pt", rows(rank, 2))
        save(tmp_path / "xla" / f"m_rank-0000000{rank}-of-00000002.pth", XLA)
    (found,) = formats.read_index(str(tmp_path / "plain")).problems
    assert found.hint == slices.JOINED_BY_OWNER
    for path in (tmp_path / "xla", tmp_path / "xla" / "m_rank-*-of-00000002.pth"):
        first = formats.read_index(str(path)).problems[0]
        assert "consolidate_sharded_ckpts" in str(first.hint)


def test_numbers_may_count_from_zero(tmp_path: Path) -> None:
    for number in range(2):
        save(tmp_path / f"model-0000{number}-of-00002.safetensors", stage(number))
    assert problem(tmp_path) is None
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    found = problem(tmp_path)
    assert found is not None
    assert "model-00001-of-00002.safetensors does not exist" in found.message


@pytest.mark.parametrize("name", ["sdp_0{}.pt", "model-rank-{}-part-0.safetensors"])
def test_every_command_that_uses_it_refuses_and_the_others_show_it(
    tmp_path: Path, name: str
) -> None:
    for rank in range(2):
        save(tmp_path / name.format(rank), rows(rank, 2))
    path, out = tmp_path / name.format(0), tmp_path / "out"
    for command in (
        ("export", path, "-o", out),
        ("export", path, "-o", out, "-i", "norm.weight"),
        ("reshard", path, "-o", out, "--to-mesh", "2"),
        ("fingerprint", path),
    ):
        result = run(*command)
        assert (result.exit_code, "slices of one rank" in result.stderr) == (3, True)
        assert not out.exists()
    for command in (("inspect", path), ("ls", path)):
        result = run(*command)
        assert (result.exit_code, "slices of one rank" in result.stderr) == (3, True)
        assert "layers" in result.stdout or "REFUSED" in result.stdout
        assert "nothing sharded" not in result.stdout
    assert not json.loads(run("inspect", path, "--json").stdout)["complete"]
    with pytest.raises(UnsupportedError, match="slices of one rank"):
        ckpt_tools.open_checkpoint(str(path))["norm.weight"][:]


def test_at_most_two_others_are_read_and_only_where_names_say_so(tmp_path: Path) -> None:
    for at in range(40):
        save(tmp_path / f"model_{at}.pt", model(at))
        save(tmp_path / f"step_{at}.pt", model(at))
    read: list[str] = []

    def reading(path: str, options: ReadOptions) -> CheckpointIndex:
        read.append(os.path.basename(path))
        return torch_file.FORMAT.read_index(path, options=options)

    for at in (20, 21):
        index = formats.read_index(str(tmp_path / f"model_{at}.pt"))
        assert slices.checked(index, reading, ReadOptions()) == index
    assert sorted(read) == ["model_0.pt", "model_39.pt"]
    index = formats.read_index(str(tmp_path / "step_20.pt"))
    slices.checked(index, reading, ReadOptions())
    assert len(read) == 2
