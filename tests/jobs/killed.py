"""The command line, of which one rank is killed once in the job as a function begins.

    KILL=RANK:MODULE:FUNCTION:CALL KILLED=FILE torchrun … tests/jobs/killed.py reshard …

It is killed at the CALL-th call, from 1, of the FUNCTION, which may be a method: CLASS.METHOD. With
a number of seconds alone instead, RANK:SECONDS, it is killed so long after it began. FILE is then
there: two agents count their attempts each for itself, and may change ranks.
"""

import functools
import importlib
import operator
import os
import signal
import sys
import threading
from pathlib import Path


def _die(*_: object) -> None:
    Path(os.environ["KILLED"]).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at(module: str, function: str, call: int) -> None:
    holder = importlib.import_module(f"ckpt_tools.{module}")
    *parts, name = function.split(".")
    holder = functools.reduce(getattr, parts, holder)
    real = operator.attrgetter(name)(holder)
    calls = []

    def counting(*words: object, **named: object) -> object:
        calls.append(1)
        if len(calls) == call:
            _die()
        return real(*words, **named)

    setattr(holder, name, counting)


if __name__ == "__main__":
    rank, *where = os.environ.get("KILL", "").split(":")
    if os.environ["RANK"] == rank and not Path(os.environ["KILLED"]).exists():
        if len(where) == 1:
            threading.Timer(float(where[0]), _die).start()
        else:
            _kill_at(where[0], where[1], int(where[2]))
    from ckpt_tools.cli import main

    sys.argv[0] = "ckpt-tools"
    main()
