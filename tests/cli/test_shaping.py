"""The options of names and tensors, as the commands take them."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from reader_contract import DATA
from running import run
from safetensors.numpy import load_file, save_file

from ckpt_tools import formats
from ckpt_tools.transforms import hf_architecture

REAL = DATA / "checkpoints"
TITAN = REAL / "torchtitan_llama3_4r" / "ckpt" / "checkpoint_full"
HUB = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(6, 2),
    "model.norm.weight": np.ones(2, np.float32),
}


def ran(*words: object) -> Result:
    result = run(*words)
    assert result.exit_code == 0, result.stderr
    return result


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    save_file(HUB, folder / "model.safetensors")
    return folder


def names(path: Path) -> list[str]:
    return [entry.fqn for entry in formats.read_index(str(path)).tensors]


def test_export_takes_them_in_their_order(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(
        'keep_rest = true\n[[rule]]\nfrom = "model.norm.weight"\nto = "n.weight"\n'
    )
    words = ("--map", tmp_path / "m.toml", "--rename", "^n=norm", "--rename", "^model=m")
    more = ("--vocab-size", 5, "--dtype", "bf16", "--dtype-for", "norm*=fp32")
    result = ran("export", hub, "-o", tmp_path / "out.safetensors", *words, *more, "--json")
    told = json.loads(result.stdout)
    assert told["origins"] == {
        "m.embed_tokens.weight": ["model.embed_tokens.weight"],
        "norm.weight": ["model.norm.weight"],
    }
    index = formats.read_index(str(tmp_path / "out.safetensors"))
    assert {(e.fqn, e.dtype.name, e.shape) for e in index.tensors} == {
        ("m.embed_tokens.weight", "bfloat16", (5, 2)),
        ("norm.weight", "float32", (2,)),
    }


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("export", "--dtype", "bf16", "--dtype-for"), "--dtype-for 'norm.*'"),
        (("reshard", "--to-mesh", "2", "--dtype-for"), "--dtype-for 'norm.*'"),
        (("reshard", "--to-mesh", "2", "--place"), "--place 'norm.*'"),
    ],
)
def test_a_pattern_that_matches_no_tensor_is_named(
    words: tuple[str, ...], option: str, hub: Path, tmp_path: Path
) -> None:
    value = "S(0)" if words[-1] == "--place" else "fp32"
    more = (words[-1], f"*norm.*={value}", words[-1], f"norm.*={value}", "-o", tmp_path / "out")
    notes = ran(words[0], hub, *words[1:-1], *more).stderr.splitlines()
    named = [note for note in notes if "matches no tensor" in note]
    assert named == [f"{option} matches no tensor; a glob is for the whole name."]


def test_a_config_beside_the_source_tells_the_values(tmp_path: Path) -> None:
    ran("export", TITAN, "-o", tmp_path / "hf", "--map", "auto", "--map-value", "head_dim=4")
    (tmp_path / "hf" / "config.json").write_text('{"head_dim": 4}')
    words = ("reshard", tmp_path / "hf", "--to-mesh", 2, "--map", "hf-to-torchtitan-llama3")
    ran(*words, "-o", tmp_path / "by_config")
    assert run("diff", tmp_path / "by_config", TITAN, "--only", "model").exit_code == 0
    (tmp_path / "hf" / "config.json").unlink()
    result = run(*words, "-o", tmp_path / "untold")
    assert result.exit_code == 2
    assert "--map-value head_dim=N" in result.stderr
    assert not (tmp_path / "untold").exists()


def test_reshard_takes_a_map_untie_and_under(hub: Path, tmp_path: Path) -> None:
    words = ("--to-mesh", 2, "--untie", "--rename", "^model=m", "--under", "app.model")
    ran("reshard", hub, "-o", tmp_path / "out", *words)
    assert names(tmp_path / "out") == [
        "app.model.lm_head.weight",
        "app.model.m.embed_tokens.weight",
        "app.model.m.norm.weight",
    ]
    ran("export", tmp_path / "out", "-o", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert np.array_equal(found["lm_head.weight"], HUB["model.embed_tokens.weight"])


def test_under_takes_objects_and_containers_along(tmp_path: Path) -> None:
    source = REAL / "fsdp2_dcp_1d_4r" / "ckpt"
    ran("reshard", source, "-o", tmp_path / "plain", "--to-mesh", 2)
    ran("reshard", source, "-o", tmp_path / "under", "--to-mesh", 2, "--under", "run.state")
    plain, under = (formats.read_index(str(tmp_path / name)) for name in ("plain", "under"))
    assert plain.objects
    assert {e.path for e in under.entries} == {("run", "state", *e.path) for e in plain.entries}
    assert under.nesting.get("run", "state") == plain.nesting.map(lambda fqn: f"run.state.{fqn}")
    ran("diff", tmp_path / "plain", tmp_path / "under", "--rename", r"b:^run\.state\.=")


def test_names_of_an_optimizer_with_groups_are_not_changed(tmp_path: Path) -> None:
    words = ("reshard", REAL / "fsdp2_dcp_1d_4r" / "ckpt", "-o", tmp_path / "out", "--to-mesh", 2)
    result = run(*words, "--rename", "blocks=layers")
    assert result.exit_code == 2
    assert "keep the old names" in result.stderr
    assert "--only model" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_a_sharded_job_held_whole_stays_whole_under_other_names(tmp_path: Path) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    source = REAL / "fsdp2_dcp_1d_4r" / "ckpt"
    ran("reshard", source, "-o", plain, "--to-mesh", 2, "--only", "model")
    words = ("--only", "model", "--rename", "^=x.", "--under", "app.model")
    ran("reshard", source, "-o", other, "--to-mesh", 2, *words)
    boxes = {
        e.fqn: {chunk.box for chunk in e.chunks} for e in formats.read_index(str(plain)).tensors
    }
    assert {
        e.fqn.replace("app.model.x.", "app.model."): {chunk.box for chunk in e.chunks}
        for e in formats.read_index(str(other)).tensors
    } == boxes


def test_only_the_copy_engine_knows_other_names(hub: Path, tmp_path: Path) -> None:
    words = ("reshard", hub, "-o", tmp_path / "out", "--to-mesh", 1, "--engine", "dcp")
    result = run(*words, "--rename", "a=b")
    assert result.exit_code == 2
    assert "need --engine copy" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--map", "nonsense"), "no map 'nonsense'"),
        (("--map-value", "head_dim"), "NAME=N"),
        (("--rename", "x"), "RE=REPL"),
        (("--dtype-for", "x=int8"), "GLOB=TYPE"),
        (("--allow-mismatch",), "--hf-assets, which is not given"),
        (("--hf-assets", "."), "no config.json"),
        (("--adapter-name", "x"), "LoRA options need"),
        (("--adapter", "--merge-lora", "--lora-alpha", "1"), "cannot be used together"),
        (("--vocab-size", "7"), "fewer than --vocab-size"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_written(
    hub: Path, tmp_path: Path, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(hub)
    result = run("export", hub, "-o", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_assets_and_adapters_ask_for_a_folder(hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    for words in (("--hf-assets", hub), ("--adapter", "--lora-alpha", 1)):
        assert run("export", hub, "-o", out, *words).exit_code == 2
    assert not out.exists()


def test_a_long_wait_for_transformers_is_announced(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_architecture, "find_spec", lambda _: True)
    monkeypatch.setattr(hf_architecture, "by_transformers", lambda *_: None)
    (hub / "config.json").write_text("{}")
    result = run("export", hub, "-o", tmp_path / "out", "--hf-assets", hub)
    assert "importing it may take half a minute" in result.stderr


def test_a_dry_run_of_a_map_writes_nothing(tmp_path: Path) -> None:
    words = ("--map", "auto", "--map-value", "head_dim=4", "--dry-run", "--json")
    told = json.loads(ran("export", TITAN, "-o", tmp_path / "out", *words).stdout)
    assert "model.layers.0.self_attn.q_proj.weight" in told["origins"]
    assert not list(tmp_path.iterdir())
