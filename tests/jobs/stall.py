"""The command line, in which one rank stops where a function begins.

    STALL=RANK:MODULE:FUNCTION:FILE torchrun … tests/jobs/stall.py reshard …

The rank writes its number of process to FILE when it has come there, and goes on when FILE is gone.
Without a MODULE it stops before it imports anything. Every rank writes its number of process to
FILE.RANK first.
"""

import importlib
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path


def _wait(file: Path, do: Callable[[], object] = int) -> None:
    part = file.with_suffix(".part")
    part.write_text(str(os.getpid()))
    part.rename(file)
    end = time.monotonic() + 600
    while file.exists() and time.monotonic() < end:
        time.sleep(0.1)
        do()


def _stall(file: Path, function: Callable[..., object], *words: object, **named: object) -> object:
    on_bytes = named.get("on_bytes")
    _wait(file, partial(on_bytes, 0) if callable(on_bytes) else int)
    return function(*words, **named)


if __name__ == "__main__":
    rank, name, function, path = os.environ["STALL"].split(":")
    file = Path(path)
    Path(f"{file}.{os.environ['RANK']}").write_text(str(os.getpid()))
    stalls = os.environ["RANK"] == rank
    if stalls and not name:
        _wait(file)
    from ckpt_tools.cli import main

    if stalls and name:
        module = importlib.import_module(f"ckpt_tools.distributed.{name}")
        setattr(module, function, partial(_stall, file, getattr(module, function)))
    main()
