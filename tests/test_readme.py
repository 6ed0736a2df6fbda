"""The examples of README and docs run as they are written, and print what is shown."""

import doctest
import os
import re
import shlex
import shutil
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from running import run

ROOT = Path(__file__).parent.parent
REAL = ROOT / "tests" / "data" / "checkpoints"


class Example(NamedTuple):
    """A command of a page and the lines that it shows below it; … is what differs each time, and
    as a line of its own what is left out.
    """

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
    shutil.copytree(REAL / "fsdp2_torchsave_hsdp_2x4" / "ckpt", tmp_path / "run7" / "ranks")
    three_hours_ago = time.time() - 3 * 3600
    for file in (tmp_path / "run7").rglob("*.*"):
        os.utime(file, (three_hours_ago, three_hours_ago))
    shutil.copytree(step, tmp_path / "run9" / "step-1000")
    for number, damaged in ((2, "step-2000"), (3, "step-3000")):
        file = shutil.copytree(step, tmp_path / "run9" / damaged) / f"__{number}_0.distcp"
        file.unlink() if number == 2 else os.truncate(file, 300)
    shutil.copy(tmp_path / "run7" / "ranks" / "model_rank0.pt", tmp_path / "rank0.pt")
    shutil.copytree(REAL / "fsdp1_sharded_nomesh_torchsave" / "ckpt", tmp_path / "fsdp1")
    lfs = tmp_path / "Llama-3.1-8B-lfs" / "model.safetensors"
    lfs.parent.mkdir()
    lfs.write_text("version https://git-lfs.github.com/spec/v1\n")
    rotten = shutil.copytree(step, tmp_path / "run8" / "step-2000") / "__2_0.distcp"
    data = bytearray(rotten.read_bytes())
    data[5000] = 0xFF
    rotten.write_bytes(data)
    return tmp_path


@pytest.mark.parametrize("block", _blocks(), ids=lambda block: block[0].command)
def test_the_examples_run_as_written(
    block: list[Example], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for example in block:
        if not example.command.startswith("ckpt-tools "):
            continue
        done = run(*shlex.split(example.command, comments=True)[1:], env={"NO_COLOR": "1"})
        expected = re.search(r"# exit code (\d)", example.command)
        code = int(expected[1]) if expected else 0
        assert done.exit_code == code, f"{example.command}: {done.stderr}"
        if example.output:
            answer, notes = done.stdout.rstrip(), done.stderr.rstrip()
            error = notes[notes.find("Error: ") :] if code else ""
            wanted = "".join(map(_pattern, example.output))
            # With its notes, or as a pipe has it.
            assert any(
                re.fullmatch(wanted, _stripped(shown))
                for shown in (f"{answer}\n{error}", f"{notes}\n{answer}")
            ), f"{notes}\n{answer}"


def _stripped(text: str) -> str:
    return re.sub(" +$", "", text.strip("\n"), flags=re.MULTILINE) + "\n"


def _pattern(line: str) -> str:
    if line == "…":
        return "(.*\n)*?"
    return re.escape(line.rstrip()).replace("…", ".*") + "\n"


def test_each_error_that_is_quoted_without_a_command_is_in_the_code() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    code = "".join(path.read_text() for path in (ROOT / "ckpt_tools").rglob("*.py"))
    code = re.sub(r'" *\n *f?"', "", code)
    quoted = [part for text in re.findall(r"\*\*`(.+?)`", page) for part in text.split(" … ")]
    assert len(quoted) > 5
    assert [text for text in quoted if text not in code] == []


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


def test_the_way_of_a_byte_range_is_as_the_page_says() -> None:
    page = ROOT / "docs" / "adding-a-format.md"
    text = "".join(re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert doctest.DocTestRunner().run(test) == (0, len(test.examples))
    assert len(test.examples) > 10


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
