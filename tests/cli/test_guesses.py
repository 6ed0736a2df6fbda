"""What people type before they have read the help does what they mean, or says what to type."""

import json
import shutil
from pathlib import Path

import pytest
from launching import BIN, torchrun
from running import run

from ckpt_tools import __version__
from ckpt_tools.cli import cli, guesses

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = str(REAL / "fsdp2_dcp_1d_4r" / "ckpt")
COMPOSER = REAL / "composer-0.32.1-monolith" / "ep0-ba1-rank0.pt"
RANKS = REAL / "fsdp2_torchsave_hsdp_2x4" / "ckpt"


@pytest.mark.parametrize(
    ("guess", "meant"),
    [
        (("list", DCP), ("ls", DCP)),
        (("tree", DCP), ("ls", "--tree", DCP)),
        (("check", "--quick", DCP), ("verify", "--quick", DCP)),
        (("validate", "--quick", DCP), ("verify", "--quick", DCP)),
        (("compare", DCP, DCP), ("diff", DCP, DCP)),
        (("cat", DCP, "step"), ("show", DCP, "step")),
        (("checksum", DCP), ("fingerprint", DCP)),
        (("help",), ("--help",)),
        (("help", "export"), ("export", "--help")),
        (("help", "info"), ("inspect", "--help")),
        (("version",), ("--version",)),
    ],
    ids=lambda words: " ".join(words).replace(DCP, "CKPT"),
)
def test_a_guessed_command_that_only_looks_is_run(
    guess: tuple[str, ...], meant: tuple[str, ...]
) -> None:
    done = run(*guess)
    assert done.exit_code == 0
    assert done.stdout == run(*meant).stdout


def test_info_is_inspect_and_version_is_the_version() -> None:
    assert "training can resume" in run("info", DCP).stdout
    assert run("version").stdout.strip().endswith(__version__)


@pytest.mark.parametrize("word", ["convert", "merge", "consolidate", "split", "unshard"])
def test_a_guessed_command_that_would_write_is_answered_with_the_right_one(word: str) -> None:
    done = run(word, DCP, "-o", "out")
    assert done.exit_code == 2
    assert f"Unknown command '{word}'." in done.stderr
    assert "`ckpt-tools export" in done.stderr or "`ckpt-tools reshard" in done.stderr


def test_a_misspelled_command_is_answered_with_the_one_that_is_near() -> None:
    assert "Did you mean `ckpt-tools inspect`?" in run("inpsect", DCP).stderr
    assert "Commands: inspect, ls," in run("zzzzzz").stderr


def test_every_guess_means_a_command_that_is_there() -> None:
    names = cli.list_commands(None)
    assert all(
        guesses.command_line([word])[0] in [*names, "--version"] for word in guesses._COMMANDS
    )
    assert not set(names) & {*guesses._COMMANDS, *guesses._WRITERS, "help"}


@pytest.mark.parametrize("name", ["--out", "--output-dir", "--output-path", "--output_dir"])
def test_the_output_has_the_names_that_other_tools_give_it(name: str, tmp_path: Path) -> None:
    assert run("export", DCP, name, tmp_path / "out").exit_code == 0
    assert run("export", DCP, f"{name}={tmp_path / 'two'}").exit_code == 0
    assert (tmp_path / "two" / "model.safetensors").exists()
    assert run("reshard", DCP, name, tmp_path / "three", "--to-mesh", "2").exit_code == 0
    assert (tmp_path / "three" / ".metadata").exists()


@pytest.mark.parametrize("command", ["inspect", "ls", "layout", "verify", "fingerprint", "stats"])
@pytest.mark.parametrize("name", ["-o", "--out", "--output", "--output-dir"])
def test_the_output_of_a_report_is_stdout_and_the_error_says_so(command: str, name: str) -> None:
    done = run(command, DCP, name, "report.txt")
    assert done.exit_code == 2
    assert "`> FILE` writes that into a file" in done.stderr
    assert ("--html FILE" in done.stderr) == (command in ("inspect", "layout"))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["ls", "--dtype", "float16"], "an option of export, reshard."),
        (["export", "--world-size", "8"], "--to-mesh here, an option of layout, reshard, average."),
        (["verify", "--overwrite"], "--force here, an option of"),
        (["stats", "--max_shard_size", "5GB"], "--max-shard-size here, an option of export."),
    ],
)
def test_an_option_of_another_command_names_that_command(words: list[str], answer: str) -> None:
    done = run(*words, DCP)
    assert done.exit_code == 2
    assert answer in done.stderr


@pytest.mark.parametrize(
    ("command", "forms"), [("inspect", "--json."), ("ls", "--json and --csv."), ("stats", "--csv.")]
)
def test_the_format_of_a_report_is_answered_with_its_options(command: str, forms: str) -> None:
    done = run(command, DCP, "--format", "json")
    assert done.exit_code == 2
    assert f"{command} has no --format." in done.stderr
    assert forms in done.stderr


@pytest.mark.parametrize("name", cli.list_commands(None))
def test_what_is_missing_is_answered_with_an_example(name: str) -> None:
    done = run(name)
    assert done.exit_code == 2
    assert f"For example: ckpt-tools {name} " in done.stderr or name == "completion"
    if name in ("export", "reshard"):
        assert "For example: ckpt-tools" in run(name, DCP, "somewhere").stderr


def test_a_path_without_a_command_is_answered_with_inspect() -> None:
    assert f"`ckpt-tools inspect {DCP}`" in run(DCP).stderr


@pytest.mark.parametrize(
    "name", [n for n in cli.list_commands(None) if n not in ("browse", "completion")]
)
def test_every_command_that_prints_an_answer_has_it_as_json(name: str) -> None:
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    assert any("--json" in param.opts for param in command.params)


def test_overwrite_is_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("export", DCP, "-o", out).exit_code == 0
    assert run("export", DCP, "-o", out).exit_code == 2
    assert run("export", DCP, "-o", out, "--overwrite").exit_code == 0


def test_world_size_is_a_mesh_of_one_dimension(tmp_path: Path) -> None:
    done = run("reshard", DCP, "-o", tmp_path / "out", "--world-size", "8", "--dry-run", "--json")
    assert json.loads(done.stdout)["mesh"]["shape"] == [8]


def test_an_option_and_a_guess_for_it_are_not_both_taken(tmp_path: Path) -> None:
    words = ["-o", tmp_path / "out", "--world-size", "8", "--to-mesh", "2x4"]
    done = run("reshard", DCP, *words)
    assert done.exit_code == 2
    assert "--world-size means --to-mesh here, and --to-mesh is given, too." in done.stderr


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["export", "--format", "hf"], ["'safetensors'", "`ckpt-tools export"]),
        (["export", "--format", "dcp"], ["`ckpt-tools reshard"]),
        (["export", "--format=gguf"], ["convert_hf_to_gguf.py"]),
        (["reshard", "--to-mesh", "2", "--format", "hf"], ["`ckpt-tools export"]),
        (["reshard", "--to-mesh", "2", "--layout", "torchtitan"], ["'titan'"]),
    ],
)
def test_a_format_or_layout_that_is_none_is_answered_with_those_that_are(
    words: list[str], answers: list[str]
) -> None:
    done = run(*words, DCP, "-o", "out")
    assert done.exit_code == 2
    assert all(answer in done.stderr for answer in answers)


def test_a_value_that_begins_like_an_option_is_left_alone() -> None:
    ls = cli.get_command(None, "ls")  # type: ignore[arg-type]
    assert ls is not None
    assert guesses.arguments(ls, ["--", "--out"]) == ["--", "--out"]


@pytest.mark.parametrize("name", ["x.gguf", "x.onnx"])
def test_the_name_of_a_file_that_is_not_written_asks(name: str, tmp_path: Path) -> None:
    done = run("export", DCP, "-o", tmp_path / name)
    assert done.exit_code == 2
    assert f"does not write .{name.partition('.')[2]} files" in done.stderr
    assert not list(tmp_path.iterdir())
    assert run("export", DCP, "-o", f"{tmp_path / name}/").exit_code == 0


def test_reshard_does_not_make_a_folder_with_the_name_of_a_file(tmp_path: Path) -> None:
    done = run("reshard", DCP, "-o", tmp_path / "model.safetensors", "--to-mesh", "2")
    assert done.exit_code == 2
    assert "`ckpt-tools export`" in done.stderr


def test_a_size_without_a_unit_asks_for_one(tmp_path: Path) -> None:
    done = run("export", DCP, "-o", tmp_path / "out", "--max-shard-size", "5")
    assert done.exit_code == 2
    assert "5 of what? Write 5GB, 5GiB or 5MB." in done.stderr
    assert run("export", DCP, "-o", tmp_path / "out", "--max-shard-size", "5000").exit_code == 0


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_size_of_shards_is_refused_where_there_are_none(tmp_path: Path, name: str) -> None:
    done = run("export", DCP, "-o", tmp_path / name, "--max-shard-size", "5KB")
    assert done.exit_code == 2
    assert "--max-shard-size is for a folder of safetensors" in done.stderr
    assert not any(tmp_path.iterdir())
    assert run("export", DCP, "-o", tmp_path / name, "--max-shard-size", "5GB").exit_code == 0


@pytest.mark.parametrize("way", [["--adapter", "--lora-alpha", "1"], ["--layout", "accelerate"]])
def test_so_it_is_for_an_adapter_and_a_layout(tmp_path: Path, way: list[str]) -> None:
    done = run("export", DCP, "-o", tmp_path / "out", "--max-shard-size", "5KB", *way)
    assert done.exit_code == 2
    assert "--max-shard-size is for a folder of safetensors" in done.stderr


# ----------------------------------------------------------------------------------- unquoted globs


@pytest.mark.parametrize("command", ["inspect", "ls", "layout"])
def test_an_unquoted_glob_of_rank_files_is_answered_with_the_quoted_one(command: str) -> None:
    files = sorted(RANKS.glob("*rank*"))
    done = run(command, *files)
    assert done.exit_code != 0
    assert "quoted glob" in done.stderr


def test_two_saves_of_one_rank_are_two_checkpoints(tmp_path: Path) -> None:
    saves = [tmp_path / f"ep{step}-ba1-rank0.pt" for step in (0, 1)]
    for save in saves:
        shutil.copy(COMPOSER, save)
    done = run("diff", *saves)
    assert done.exit_code == 0, done.stderr


def test_several_paths_where_one_is_expected_say_quote_it(tmp_path: Path) -> None:
    done = run("ls", DCP, tmp_path)
    assert done.exit_code == 2
    assert "a quoted glob of rank files" in done.stderr


# ------------------------------------------------------------------------------------------ help


def test_options_stand_under_headings_where_there_are_many() -> None:
    shown = run("export", "--help").stdout
    for heading in ("Output:", "Which entries:", "Names:", "Hugging Face folder:", "LoRA:"):
        assert f"\n{heading}\n" in shown
    assert "\nOptions:\n" in run("show", "--help").stdout


@pytest.mark.parametrize("name", cli.list_commands(None))
def test_every_option_stands_in_the_help_once(name: str) -> None:
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    shown = run(name, "--help").stdout.partition("Examples:")[2]
    for option in command.params:
        if option.param_type_name == "option":
            assert sum(f"{option.opts[-1]} " in f"{line} " for line in _heads(shown)) == 1


def _heads(shown: str) -> list[str]:
    """The lines of the help that begin an option."""
    return [
        line.strip().partition("  ")[0] for line in shown.splitlines() if line.startswith("  -")
    ]


@pytest.mark.torchrun
@pytest.mark.slow
def test_torchrun_takes_the_path_of_the_program(tmp_path: Path) -> None:
    words = ["reshard", DCP, "-o", tmp_path / "out", "--to-mesh", "2"]
    done = torchrun(2, BIN / "ckpt-tools", *words)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / ".metadata").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("ls", DCP),
        ("inspect", DCP),
        ("layout", DCP),
        ("stats", DCP),
        ("fingerprint", DCP),
        ("diff", DCP, DCP),
        ("verify", DCP, "--against", DCP),
        ("export", DCP, "-o", "out", "--dry-run"),
        ("reshard", DCP, "-o", "out", "--to-mesh", "2", "--dry-run"),
        ("average", DCP, DCP, "-o", "out", "--dry-run"),
    ],
    ids=lambda words: words[0],
)
def test_what_leaves_nothing_out_is_said_with_what_is_near(command: tuple[str, ...]) -> None:
    done = run(*command, "-x", "*emb.wieght", "-x", "*scale", "-x", "*.zz")
    assert done.exit_code == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("Note: ")] == [
        f"Note: -x '*emb.wieght' matches nothing in {DCP}. Did you mean app.model.emb.weight?",
        f"Note: -x '*.zz' matches nothing in {DCP}. `ckpt-tools ls` lists the names.",
    ]
    assert "Note: " not in run(*command, "-x", "*emb.wieght", "--quiet").stderr


@pytest.mark.parametrize("other", ["checkpoint", "fingerprint"])
def test_what_leaves_something_out_of_one_side_is_not_said(other: str, tmp_path: Path) -> None:
    assert run("export", DCP, "-o", tmp_path / "a", "-x", "*scale").exit_code == 0
    assert run("fingerprint", DCP, "--write", tmp_path / "a.json").exit_code == 0
    there = DCP if other == "checkpoint" else tmp_path / "a.json"
    for pattern, is_said in (("*scale", False), ("*scael", True)):
        done = run("verify", tmp_path / "a", "--against", there, "-x", pattern)
        assert ("Note: " in done.stderr) == is_said
