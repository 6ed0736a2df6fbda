"""Generates docs/man/*.md from the commands themselves, and the pictures of README."""

from __future__ import annotations

import asyncio
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from ckpt_tools.cli import GROUPS, cli
from ckpt_tools.cli.options import Command

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SAMPLE = ROOT / "tests" / "data" / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt"
_EXIT_CODES = (
    "0 done · 1 the answer is no · 2 usage, or a refused overwrite · 3 the checkpoint is "
    "unreadable, incomplete or unsupported · 4 writing failed · 130 stopped by Ctrl-C"
)
_STYLE = """text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#1f2328}
.page{fill:#fff;stroke:#d1d9e0}.b{font-weight:600}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117;stroke:#3d444d}}"""


def pages() -> Iterator[tuple[str, str]]:
    """The name and the text of each command's page."""
    context = click.Context(cli, info_name="ckpt-tools", help_option_names=["-h", "--help"])
    for commands in GROUPS.values():
        for name, summary in commands.items():
            command = cli.get_command(context, name)
            if isinstance(command, Command):
                yield name, "\n".join(_page(command, name, summary, context))


def _page(command: Command, name: str, summary: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    pieces = " ".join(command.collect_usage_pieces(context))
    text, _, examples = (command.help or "").partition("\b\nExamples:\n")
    yield f"# ckpt-tools {name}\n\n{summary}\n"
    yield f"## Synopsis\n\n    ckpt-tools {name} {pieces}\n"
    yield f"## Description\n\n{_prose(text.strip())}\n"
    yield "## Options\n"
    for heading, options in command.headed(context).items():
        if heading != "Options":
            yield f"\n### {heading}\n"
        for record in filter(None, (option.get_help_record(context) for option in options)):
            yield f"- `{record[0]}`: {_prose(' '.join(record[1].split()))}"
    yield "\n## Examples\n"
    yield from (f"    {line.strip()}" for line in examples.rstrip().splitlines())
    yield f"\n## Exit codes\n\n{_EXIT_CODES}.\n"


def _prose(text: str) -> str:
    """Help as Markdown that shows it as it is: no ``*`` of a glob makes letters slanted."""
    odd = r"`[^`]*`|[*<]|\b_\B|\B_\b"
    return re.sub(odd, lambda found: found[0] if found[0][0] == "`" else f"\\{found[0]}", text)


def write_pages() -> None:
    """Write every page, and take away those of commands that are no more."""
    folder = DOCS / "man"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in pages():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def write_pictures() -> None:
    """Draw a real checkpoint under the name that README's examples have."""
    with tempfile.TemporaryDirectory() as folder:
        step = shutil.copytree(SAMPLE, Path(folder) / "run7" / "step-1000")
        three_hours_ago = time.time() - 3 * 3600
        for file in step.iterdir():
            os.utime(file, (three_hours_ago, three_hours_ago))
        layout = ["layout", "run7/step-1000", "--only", "model", "--to-mesh", "2x2"]
        for words in (["inspect", "run7/step-1000"], layout):
            lines = [f"$ ckpt-tools {' '.join(words)}", *_run(folder, *words).rstrip().splitlines()]
            (DOCS / f"{words[0]}.svg").write_text(_terminal(lines), encoding="utf-8")
        os.chdir(folder)  # so that the screen has the names that the examples have
        write_screen()
        os.chdir(ROOT)


def write_screen() -> None:
    """What `browse` shows of one tensor."""
    from ckpt_tools.cli.browse.app import Browser  # late: the other pages need no textual
    from ckpt_tools.cli.browse.content import Content
    from ckpt_tools.formats import read_index

    async def draw() -> None:
        app = Browser(Content(read_index("run7/step-1000")))
        async with app.run_test(size=(140, 32)) as pilot:
            for key in ("home", "down", "down", "enter", "down", "enter", "down", "down"):
                await pilot.press(key)
                while not all(worker.is_finished for worker in app.workers):
                    await pilot.pause(0.02)
                await pilot.pause()
            drawn = re.sub(r"@font-face \{.*?\}", "", app.export_screenshot(), flags=re.DOTALL)
        lines = (line.rstrip() for line in drawn.splitlines())
        (DOCS / "browse.svg").write_text("\n".join(lines).strip() + "\n", encoding="utf-8")

    asyncio.run(draw())


def _run(folder: str, *args: str) -> str:
    command = [sys.executable, "-m", "ckpt_tools", *args]
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run(  # noqa: S603 - our own command
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def _terminal(lines: list[str]) -> str:
    """Lines of a terminal as a picture."""
    width, height = 24 + 8 * max(map(len, lines)), 24 + 19 * len(lines)
    body = "\n".join(
        f'<text x="16" y="{30 + 19 * place}" xml:space="preserve"{_bold(place)}>'
        f"{html.escape(line)}</text>"
        for place, line in enumerate(lines)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    page = f'<rect class="page" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return (
        f'{head}width="{width}" height="{height}">\n<style>{_STYLE}</style>{page}\n{body}\n</svg>\n'
    )


def _bold(place: int) -> str:
    return ' class="b"' if place < 2 else ""


if __name__ == "__main__":
    write_pages()
    write_pictures()
