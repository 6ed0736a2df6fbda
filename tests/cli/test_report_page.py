"""`inspect --html`: the same facts as in the terminal, in one file."""

import shutil
from pathlib import Path

import browser
import pytest
from click.testing import Result
from running import run

REAL = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = str(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt")


def _run(*args: str) -> Result:
    return run("inspect", *args)


def test_the_page_has_the_facts_of_the_report() -> None:
    page = _run(DCP, "--html", "-", "-q").stdout
    for fact in ("8 ranks", "2x4, inferred from the boxes", "Adam or AdamW", "yes: model and"):
        assert fact in page
    assert "<path" not in page
    assert "ago" not in page.split("</header>")[0]  # a page is read later


def test_statistics_come_when_asked_for() -> None:
    page = _run(DCP, "--html", "-", "--stats", "-q").stdout
    assert "Values of 46 tensors" in page
    assert 'aria-label="histogram"' in page


def test_what_is_missing_stands_in_the_page_and_in_the_exit_code(tmp_path: Path) -> None:
    shutil.copytree(DCP, tmp_path / "ckpt")
    next((tmp_path / "ckpt").glob("__2_*.distcp")).unlink()
    done = _run(str(tmp_path / "ckpt"), "--html", str(tmp_path / "page.html"), "-q")
    assert done.exit_code == 3
    page = (tmp_path / "page.html").read_text()
    assert "NOT COMPLETE" in page.split("</header>")[0]
    assert '<b class="bad">damaged</b>' in page


@pytest.mark.parametrize(
    "args", [("inspect", "--stats"), ("layout",), ("layout", "--to-mesh", "2")]
)
def test_a_broken_checkpoint_gets_its_page(tmp_path: Path, args: tuple[str, ...]) -> None:
    """Damaged or unreadable: the page says so first, and the exit code is that of the command."""
    shutil.copytree(DCP, tmp_path / "ckpt")
    next((tmp_path / "ckpt").glob("__2_*.distcp")).unlink()
    command = [args[0], str(tmp_path / "ckpt"), *args[1:], "--html", "-", "-q"]
    done = run(*command)
    assert done.exit_code == 3
    assert "NOT COMPLETE" in done.stdout.split("</header>")[0]
    metadata = tmp_path / "ckpt" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:300])
    done = run(*command)
    assert done.exit_code == 3
    assert "CANNOT BE READ" in done.stdout
    assert ".metadata is truncated" in done.stdout
    assert "__1_0.distcp" in done.stdout


@pytest.mark.parametrize("path", ["absent", "absent*.pt", "several"])
def test_a_path_that_is_no_checkpoint_gets_no_page(tmp_path: Path, path: str) -> None:
    for number in (1, 2):
        shutil.copytree(DCP, tmp_path / "several" / f"copy{number}")
    done = _run(str(tmp_path / path), "--html", str(tmp_path / "page.html"))
    assert done.exit_code != 0
    assert not (tmp_path / "page.html").exists()


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
    assert browser.lost_on_a_phone((tmp_path / "page.html").read_text(), tmp_path) == ""
