"""Whatever level of a framework's folders is pointed at, each command is right on the first try.

It does what it is asked for, or its refusal repeats the command as it would be right, and that is.
"""

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from reader_contract import DATA, TrueTensor, truth_of
from running import run

REAL = DATA / "checkpoints"
FRAMEWORKS = ("accelerate", "composer", "dcp_hf", "hf_sharded", "lightning", "peft")
FRAMEWORKS += ("torchtitan", "transformers", "verl")
FOLDERS = sorted(path.name for path in REAL.iterdir() if path.name.startswith(FRAMEWORKS))
NOT_SAVED = ("truth.*", "PROVENANCE.md", "peer_*")
COMMANDS = (
    ["inspect", "{}"],
    ["verify", "{}"],
    ["export", "{}", "-o", "out"],
    ["reshard", "{}", "-o", "out", "--to-mesh", "2"],
)
# FSDP1 under verl saves its optimizer as flat pieces without a layout, which nobody can put
# together: inspect and verify say so, and export has the model.
HURT = {("verl_fsdp1_4r", "inspect"): 3, ("verl_fsdp1_4r", "verify"): 1}


def levels(top: str) -> Iterator[str]:
    for folder, below, _ in os.walk(top):
        below.sort()
        yield folder


def told(result: Result) -> list[list[str]]:
    """The commands that a refusal gives."""
    lines = [line.strip() for line in result.stderr.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("ckpt-tools ")]


# Is saved as another folder is, of a model whose embeddings are not tied.
ALIKE = "accelerate_fsdp2_sharded_qwen2_untied_4r"


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name == ALIKE else []) for name in FOLDERS
    ]
)
def saved(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """A framework's folders as it left them, in the current one, and which they are."""
    name: str = request.param
    ignore = shutil.ignore_patterns(*NOT_SAVED)
    shutil.copytree(REAL / name, tmp_path / "run", symlinks=True, ignore=ignore)
    monkeypatch.chdir(tmp_path)
    return name, "run"


def test_each_command_is_right_at_each_level(saved: tuple[str, str]) -> None:
    name, top = saved
    for level in levels(top):
        for words in COMMANDS:
            result = run(*[word.format(level) for word in words])
            shutil.rmtree("out", ignore_errors=True)
            hurt = HURT.get((name, words[0]))
            lies_beside = os.path.basename(level) == "huggingface"
            if hurt is not None and not lies_beside:
                assert result.exit_code == hurt, (level, words, result.stderr)
                assert "optim.state.0" in result.output
                continue
            if result.exit_code == 0:
                continue
            assert told(result), (level, words, result.stderr)
            for command in told(result):
                assert command[1] == words[0]
                _assert_right(command, HURT.get((name, words[0]), 0))


def _assert_right(command: list[str], exit_code: int) -> None:
    """The command that was told does it; or, of a hurt checkpoint, the one that it tells then."""
    result = run(*command[1:])
    shutil.rmtree("out", ignore_errors=True)
    if result.exit_code != exit_code:
        assert told(result), (command, result.stderr)
        assert run(*told(result)[0][1:]).exit_code == exit_code, (command, result.stderr)
        shutil.rmtree("out", ignore_errors=True)


def test_the_model_comes_out_true_and_stays_so_in_other_shards(saved: tuple[str, str]) -> None:
    name, top = saved
    truth = truth_of(REAL / name)
    for level in levels(top):
        if run("export", level, "-o", "out.safetensors").exit_code:
            continue
        found = truth_of_file(Path("out.safetensors"))
        if "_hf" not in level and "_modelonly" not in level:  # TorchTitan's other names, and bf16
            _assert_true(found, truth)
        resharded = run("reshard", level, "-o", "out", "--to-mesh", "2", "--only", "model")
        assert resharded.exit_code == 0
        assert model_of("out") == model_of(level), level
        shutil.rmtree("out")
        os.remove("out.safetensors")


def truth_of_file(path: Path) -> dict[str, TrueTensor]:
    """The tensors of one safetensors file."""
    folder = path.parent / "as_truth"
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder / "truth.safetensors")
    return truth_of(folder)


def bare(fqn: str) -> str:
    """The name without what PEFT's own files leave out."""
    return fqn.replace(".default", "").replace(".modules_to_save", "")


def _assert_true(found: dict[str, TrueTensor], truth: dict[str, TrueTensor]) -> None:
    named = {f".{bare(fqn)}": tensor for fqn, tensor in truth.items()}
    assert found
    for fqn, tensor in found.items():
        same = [one for name, one in named.items() if name.endswith(f".{bare(fqn)}")]
        assert same, fqn
        assert any((one.shape, one.data) == (tensor.shape, tensor.data) for one in same), fqn


def model_of(path: str) -> object:
    """The fingerprint of the model, which no sharding changes."""
    result = run("fingerprint", path, "--only", "model", "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)["sections"]


def test_actor_and_critic_are_two_models_to_choose_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = REAL / "verl_fsdp2_4r" / "ckpt" / "global_step_1" / "actor"
    for model in ("actor", "critic"):
        shutil.copytree(source, tmp_path / "run" / "global_step_1" / model)
    for level in ("run", "run/global_step_1"):
        listed = run("inspect", level)
        assert listed.exit_code == 0
        assert all(name in listed.stdout for name in ("actor", "critic"))
        assert run("verify", level).stdout.count(": complete") == 2
        for words in COMMANDS[2:]:
            result = run(*[word.format(level) for word in words])
            assert result.exit_code == 3
            assert [Path(told[2]).name for told in told(result)] == ["critic", "actor"]
            for command in told(result):
                _assert_right(command, 0)


def test_a_part_alone_is_answered_with_the_whole_and_with_what_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REAL / "transformers_trainer_fsdp2_4r" / "ckpt", tmp_path / "run")
    for part in ("optimizer_0", "optimizer_0/.metadata", "optimizer_0/__0_0.distcp"):
        result = run("export", f"run/checkpoint-2/{part}", "-o", "out", "--only", "model")
        assert result.exit_code == 1
        assert told(result) == [
            ["ckpt-tools", "export", "run/checkpoint-2", "-o", "out", "--only", "model"],
            ["ckpt-tools", "export", f"run/checkpoint-2/{part}", "-o", "out", "--only", "optim"],
        ]


def test_a_file_of_one_rank_is_answered_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REAL / "peft_fsdp2_adapter_torchsave_4r" / "ckpt", tmp_path / "run")
    result = run("export", "run/adapter_rank2.pt", "-o", "out")
    assert result.exit_code == 3
    assert told(result) == [["ckpt-tools", "export", "run", "-o", "out"]]


@pytest.mark.parametrize(
    ("folder", "glob"),
    [
        ("hf_sharded_safetensors/ckpt", "*.safetensors"),
        ("dcp_hf_sharded_4r/ckpt", "shard-*"),
        ("fsdp2_dcp_1d_4r/ckpt", "*.distcp"),
    ],
)
def test_a_glob_of_all_files_of_a_folder_is_the_folder(folder: str, glob: str) -> None:
    source = str(REAL / folder)
    by_glob, by_folder = (run("fingerprint", path) for path in (f"{source}/{glob}", source))
    assert by_glob.exit_code == 0, by_glob.stderr
    assert by_glob.stdout == by_folder.stdout


def test_a_glob_of_some_files_of_a_folder_is_refused_with_the_folder() -> None:
    source = REAL / "hf_sharded_safetensors" / "ckpt"
    result = run("fingerprint", f"{source}/model-0000[12]*.safetensors")
    assert result.exit_code == 2
    assert "2 of the 3 files" in result.stderr
    assert told(result) == [["ckpt-tools", "fingerprint", str(source)]]
