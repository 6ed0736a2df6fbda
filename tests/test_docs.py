"""The generated pages are those of the commands as they are."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from running import run

from ckpt_tools.cli import cli

ROOT = Path(__file__).parent.parent
REAL = ROOT / "tests" / "data" / "checkpoints"
# What the page on frameworks calls the saved folders.
SAVED = {
    "run7/step-1000": "fsdp2_dcp_hsdp_2x4/ckpt",
    "DIR": "accelerate_fsdp2_sharded_llama_tied_4r/ckpt/state",
    "OUTPUT_DIR/checkpoint-S": "transformers_trainer_fsdp2_4r/ckpt/checkpoint-2",
    "NAME.ckpt": "lightning_fsdp_sharded_4r/ckpt",
    "checkpoint/step-S": "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
    "SAVE_FOLDER/epN-baM": "composer-0.32.1-fsdp_sharded/ep0-ba1",
    "global_step_S/actor": "verl_fsdp2_4r/ckpt/global_step_1/actor",
}
PAGE = (ROOT / "docs" / "frameworks.md").read_text()
OF_FRAMEWORKS = re.findall(r"^    ckpt-tools (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_command_has_the_page_that_it_generates(docs: ModuleType) -> None:
    written = {path.stem: path.read_text() for path in (ROOT / "docs" / "man").glob("*.md")}
    assert written == dict(docs.pages()), "run scripts/docs"


def test_each_page_has_examples(docs: ModuleType) -> None:
    for name, text in docs.pages():
        assert f"    ckpt-tools {name}" in text.split("## Examples")[1] or name == "completion"


@pytest.mark.parametrize("name", cli.list_commands(None))
def test_each_help_ends_in_examples(name: str) -> None:
    shown = run(name, "--help").stdout
    assert "Examples:" in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_the_site_has_every_page_of_docs() -> None:
    listed = (ROOT / "scripts" / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted(re.findall(r"- (\S+\.md)$", listed, re.MULTILINE))


@pytest.mark.parametrize("command", OF_FRAMEWORKS)
def test_each_command_of_the_page_on_frameworks_runs_as_it_stands(
    command: str, tmp_path: Path
) -> None:
    name, saved, *more = shlex.split(command)
    more = [{"N": "2"}.get(word, word) for word in more]
    more[more.index("-o") + 1] = str(tmp_path / "out")
    done = run(name, REAL / SAVED[saved], *more)
    assert done.exit_code == 0, done.stderr


def test_the_page_on_frameworks_has_a_command_for_each_saved_folder() -> None:
    assert {shlex.split(command)[1] for command in OF_FRAMEWORKS} == set(SAVED)
