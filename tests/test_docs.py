"""The generated pages are those of the commands as they are."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from ckpt_tools.cli import cli

ROOT = Path(__file__).parent.parent


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
    shown = CliRunner().invoke(cli, [name, "--help"]).stdout
    assert "Examples:" in shown
    assert max(map(len, shown.splitlines())) <= 110


def test_the_site_has_every_page_of_docs() -> None:
    listed = (ROOT / "scripts" / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted(re.findall(r": (\S+\.md)$", listed, re.MULTILINE))
