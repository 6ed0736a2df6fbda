"""`inspect --html`: the same facts as in the terminal, in one file."""

import shutil
from pathlib import Path

import browser
import pytest
from click.testing import CliRunner, Result

from ckpt_tools.cli import cli

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = str(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt")


def _run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["inspect", *args])


def test_the_page_has_the_facts_of_the_report() -> None:
    page = _run(DCP, "--html", "-", "-q").stdout
    for fact in ("8 ranks", "2x4, inferred from the boxes", "Adam or AdamW", "yes: model and"):
        assert fact in page
    assert "<path" not in page


def test_statistics_come_when_asked_for() -> None:
    page = _run(DCP, "--html", "-", "--stats", "-q").stdout
    assert "Values of 46 tensors" in page
    assert 'aria-label="histogram"' in page


def test_what_is_missing_stands_in_the_page_and_in_the_exit_code(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "ckpt")
    next((tmp_path / "ckpt").glob("__2_*.distcp")).unlink()
    done = _run(str(tmp_path / "ckpt"), "--html", str(tmp_path / "page.html"), "-q")
    assert done.exit_code == 3
    assert "Not whole" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("args", [(DCP, DCP, "--html", "-"), (DCP, "--stats")])
def test_what_cannot_be_meant_is_refused(args: tuple[str, ...]) -> None:
    assert _run(*args).exit_code == 2


@pytest.mark.skipif(browser.BROWSER is None, reason="needs chromium")
@pytest.mark.slow
def test_a_browser_opens_the_page(tmp_path: Path) -> None:
    _run(DCP, "--html", str(tmp_path / "page.html"), "--stats", "-q")
    opened = browser.open_page(tmp_path / "page.html")
    assert opened.console == []
    assert "data-ready" in opened.html
