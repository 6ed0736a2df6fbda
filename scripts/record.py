"""Records stdout, stderr and exit code of the looking commands over all of tests/data.

One JSON object a line, sorted by path and command, without absolute paths: two commits that do the
same give the same file, in any clone: it is a copy of the data that is looked at, all of it saved
one day before a fixed now. Every folder and file below tests/data is a source, so what is
refused is recorded, too.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

COMMANDS = (
    ("inspect", "--json"),
    ("inspect", "--all", "--shards"),
    ("ls", "--jsonl"),
    ("layout", "--json"),
    ("stats", "--json"),
    ("verify", "--json"),
    ("fingerprint", "--json"),
)
_DATA = "tests/data"
_NOW, _DAY = 1_700_000_000, 86_400
_LEFT_OUT = (".md", ".json", "truth.safetensors")


def sources() -> Iterator[str]:
    """Folders and files of the test data that a person could point at, relative to the data."""
    for folder, folders, files in os.walk("."):
        folders.sort()
        yield folder
        for name in sorted(files):
            if not name.endswith(_LEFT_OUT):
                yield os.path.join(folder, name)


def record(source: str) -> list[str]:
    """What each command says of one source: a line of JSON for each."""
    from click.testing import CliRunner

    from ckpt_tools.cli import cli

    lines = []
    for command, *flags in COMMANDS:
        ended = CliRunner().invoke(cli, [command, source, *flags])
        crash = ended.exception
        told = {
            "command": [command, source, *flags],
            "exit_code": ended.exit_code,
            "stdout": ended.stdout,
            "stderr": ended.stderr,
            "crash": None if crash is None or isinstance(crash, SystemExit) else repr(crash),
        }
        lines.append(json.dumps(told, ensure_ascii=False))
    return lines


def main() -> None:
    """Write the record of every source to the file that is named."""
    out = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        data = shutil.copytree(_DATA, os.path.join(folder, "data"), symlinks=True)
        os.chdir(data)
        _set_times()
        with (
            open(out, "w", encoding="utf-8") as file,
            ProcessPoolExecutor(initializer=_stop) as pool,
        ):
            file.writelines(
                "\n".join(lines) + "\n" for lines in pool.map(record, list(sources()), chunksize=8)
            )
        os.chdir("/")  # out of the folder that goes


def _set_times() -> None:
    for folder, _, names in os.walk("."):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.utime(path, (_NOW - _DAY, _NOW - _DAY), follow_symlinks=False)


def _stop() -> None:
    """Stop the clock of a process."""
    time.time = lambda: _NOW


if __name__ == "__main__":
    main()
