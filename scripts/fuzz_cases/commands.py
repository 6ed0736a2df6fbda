"""Runs the command line in this process, as a person would, and refuses what is never right."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from click.testing import CliRunner
from fuzz_cases.sources import Source

from ckpt_tools.cli import cli

# click 8.1 mixes the two outputs unless it is asked not to, and 8.2 no longer lets itself be asked.
_CAN_MIX = "mix_stderr" in inspect.signature(CliRunner).parameters
_RUNNER = CliRunner(**({"mix_stderr": False} if _CAN_MIX else {}))

# Every reason for which a command may refuse a case, and what it then says.
REASONS = {
    "two entries of one name": r"two entries have the name|both|is there twice|exists twice",
    "a cut along a dimension that a tensor lacks": r"S\w*\(\d\) of a tensor of shape",
    "a strided cut that torch computes wrong": r"torch itself loads such shards wrong",
    "a type that safetensors lacks": r"safetensors cannot hold",
    "a cast of what may be a quantized weight's": r"may belong to quantized weights|4-bit codes",
    "no tensor is chosen": r"choose (no entry|only objects)|no entry is chosen|that is chosen",
    "damage": r".",
}


class Fault(Exception):
    """What a command did and must not do."""


class Refused(Exception):
    """A command refused, for one of the reasons that the case has."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


@dataclass(slots=True)
class Commands:
    """The command line, and what was done with it; ``alone`` runs it in processes of their own."""

    alone: bool = False
    log: list[str] = field(default_factory=list)

    def run(self, *words: str | Path) -> Answer:
        """Run a command. Raises Fault for a crash and for an exit code that has no meaning."""
        line = [str(word) for word in words]
        self.log.append(f"$ ckpt-tools {shlex.join(line)}")
        answer = _alone(line) if self.alone else _here(line)
        self.log.append(f"{answer.code}: {(answer.stderr + answer.stdout).strip()[:2000]}")
        if answer.code not in range(5):
            raise Fault(f"exit code {answer.code}")
        for sign in ("ckpt-tools itself failed", "Traceback"):
            if sign in answer.stderr:
                raise Fault(f"{sign!r} in what it said")
        if answer.code and not answer.stderr.strip() and not answer.stdout.strip():
            raise Fault(f"exit code {answer.code} without a word")
        return answer

    def write(
        self, source: Source, out: Path, *words: str | Path, reasons: Collection[str]
    ) -> None:
        """Run a command that writes ``out``, which must leave the source as it was.

        Raises Refused where it refuses for one of ``reasons``, which are of `REASONS`, else Fault.
        """
        before = digest(source.path)
        answer = self.run(*words)
        if digest(source.path) != before:
            raise Fault("the source was changed")
        partial = out.with_name(f"{out.name}.partial")
        if answer.code == 0:
            if not out.exists() or partial.exists():
                raise Fault("exit code 0, and the output is not there or not finished")
            return
        if out.exists():
            raise Fault(f"exit code {answer.code}, and there is an output")
        if answer.code in (1, 2, 3) and partial.exists():
            raise Fault(f"exit code {answer.code}, and {partial.name} was left")
        is_right = any(re.search(REASONS[reason], answer.stderr) for reason in reasons)
        if not is_right or answer.code == 4:
            raise Fault(f"refused without a reason: {answer.stderr.strip()[:600]}")
        raise Refused(answer.stderr)

    def json(self, *words: str | Path) -> dict[str, object]:
        """What a command that must end well prints as JSON."""
        answer = self.run(*words, "--json")
        if answer.code:
            raise Fault(f"exit code {answer.code} of {words[0]}: {answer.stderr.strip()[:600]}")
        found: dict[str, object] = json.loads(answer.stdout)
        return found


def _here(line: list[str]) -> Answer:
    ended = _RUNNER.invoke(cli, line)
    crash = ended.exception
    if crash is not None and not isinstance(crash, SystemExit):
        raise Fault(f"crashed with {type(crash).__name__}: {crash}") from crash
    return Answer(ended.exit_code, ended.stdout, ended.stderr)


def _alone(line: list[str]) -> Answer:
    command = [sys.executable, "-m", "ckpt_tools", *line]
    ended = subprocess.run(  # noqa: S603 (our own command)
        command, capture_output=True, check=False, timeout=120
    )
    told = (stream.decode(errors="replace") for stream in (ended.stdout, ended.stderr))
    return Answer(ended.returncode, *told)


def digest(path: Path) -> str:
    """A digest of a file, or of all files below a folder with their names."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    found = sha256()
    for file in files:
        found.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        found.update(file.read_bytes())
    return found.hexdigest()
