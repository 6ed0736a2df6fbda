"""The examples of README and docs run as they are written, and print what is shown."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
REAL = ROOT / "tests" / "data" / "checkpoints"


class Example(NamedTuple):
    """A command of a page and the lines that it shows below it; … is what differs each time."""

    command: str
    output: tuple[str, ...]


def _blocks() -> list[list[Example]]:
    """The commands of each console block, in order: one block's commands share a folder."""
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))]
    return [
        list(_examples(block))
        for text in texts
        for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


def _examples(block: str) -> list[Example]:
    found: list[Example] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(Example(line[2:], ()))
        else:
            found[-1] = found[-1]._replace(output=(*found[-1].output, line))
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as the README's author had it."""
    step = shutil.copytree(REAL / "fsdp2_dcp_hsdp_2x4" / "ckpt", tmp_path / "run7" / "step-1000")
    three_hours_ago = time.time() - 3 * 3600
    for file in step.iterdir():
        os.utime(file, (three_hours_ago, three_hours_ago))
    shutil.copytree(REAL / "fsdp2_torchsave_hsdp_2x4" / "ckpt", tmp_path / "run7" / "ranks")
    rotten = shutil.copytree(step, tmp_path / "run8" / "step-2000") / "__2_0.distcp"
    data = bytearray(rotten.read_bytes())
    data[5000] = 0xFF
    rotten.write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("block", _blocks(), ids=lambda block: block[0].command)
def test_the_examples_run_as_written(block: list[Example], folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for example in block:
        if not example.command.startswith("ckpt-tools "):
            continue
        done = subprocess.run(
            shlex.split(example.command, comments=True),
            cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PATH": path, "NO_COLOR": "1"},
        )  # fmt: skip
        expected = re.search(r"# exit code (\d)", example.command)
        code = int(expected[1]) if expected else 0
        assert done.returncode == code, f"{example.command}: {done.stderr}"
        if example.output:
            shown = [line.rstrip() for line in done.stdout.rstrip().splitlines()]
            assert len(shown) == len(example.output)
            for line, wanted in zip(shown, example.output, strict=True):
                assert re.fullmatch(re.escape(wanted.rstrip()).replace("…", ".*"), line)


def test_every_command_is_in_readme_or_docs() -> None:
    from ckpt_tools.cli import cli

    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md")]
    text = "".join(page.read_text() for page in pages)
    assert all(f"ckpt-tools {name}" in text for name in cli.list_commands(None))


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))], ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_each_place_that_is_named_for_a_change_is_there() -> None:
    page = (ROOT / "docs" / "adding-a-format.md").read_text()
    page = page.partition("## Where to change what")[2].partition("\n## ")[0]
    places = re.findall(r"`(ckpt_tools/\S+\.py)`(?: \(`([\w.]+)`\))?", page)
    assert len(places) == 5
    for path, name in places:
        source = (ROOT / path).read_text()
        for part in filter(None, name.split(".")):
            assert re.search(rf"^ *(def|class) {part}\b|^{part}\b", source, re.MULTILINE), (
                path,
                part,
            )
