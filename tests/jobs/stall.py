"""The command line, in which one rank stops for ever where a function begins.

    STALL=RANK:MODULE:FUNCTION:FILE torchrun … tests/jobs/stall.py reshard …

The rank writes its number of process to FILE when it has come there.
"""

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from ckpt_tools.cli import main


def _stall(*_arguments: object, on_bytes: Callable[[int], None] = print, **_named: object) -> None:
    Path(file).write_text(str(os.getpid()))
    end = time.monotonic() + 120
    while time.monotonic() < end:
        time.sleep(0.1)
        on_bytes(0)


if __name__ == "__main__":
    rank, module, function, file = os.environ["STALL"].split(":")
    if os.environ["RANK"] == rank:
        setattr(importlib.import_module(f"ckpt_tools.distributed.{module}"), function, _stall)
    main()
