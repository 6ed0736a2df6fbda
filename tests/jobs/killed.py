"""The command line, of which one rank is killed in the job's first attempt as a function begins.

    KILL=RANK:MODULE:FUNCTION:CALL torchrun --max-restarts 1 … tests/jobs/killed.py reshard …

It is killed at the CALL-th call, from 1, of the FUNCTION, which may be a method: CLASS.METHOD. With
a number of seconds alone instead, RANK:SECONDS, it is killed so long after it began.
"""

import functools
import importlib
import operator
import os
import signal
import sys
import threading


def _die(*_: object) -> None:
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
    if os.environ["RANK"] == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if len(where) == 1:
            threading.Timer(float(where[0]), _die).start()
        else:
            _kill_at(where[0], where[1], int(where[2]))
    from ckpt_tools.cli import main

    sys.argv[0] = "ckpt-tools"
    main()
