"""Random small cases through the command line, each from its seed, with torch as the truth."""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from fuzz_cases import conversions, damages, optimizers, pickles
from fuzz_cases.commands import Commands, Fault, Refused
from fuzz_cases.sources import RefusedByTorch
from torch.distributed.checkpoint import _version
from torch.distributed.checkpoint.api import CheckpointException

KINDS = {
    "conversion": (conversions.convert, 10),
    "chain": (conversions.chain, 6),
    "optimizer": (optimizers.convert, 2),
    "damage": (damages.damage, 10),
    "pickle": (pickles.change, 10),
}
_LIMIT = 60  # seconds for one case, most of which take less than a tenth of one
_ALONE = 0.01  # of the cases run their commands as processes of their own
_MEMORY = "/dev/shm"  # noqa: S108 (each case makes a folder of its own; nothing waits for a disk)


class Ended(NamedTuple):
    """How a case ended: ``done``, ``refused``, ``skipped`` (torch itself refuses) or ``failed``."""

    kind: str
    how: str
    said: str
    log: list[str]


class Hang(Exception):
    """A case took longer than its limit."""


def main() -> int:
    """Run the cases that were asked for; 1 when one failed."""
    asked = _arguments()
    signal.signal(signal.SIGALRM, _stop)
    warnings.simplefilter("ignore")  # torch's own, of types that it calls experimental
    logging.disable(logging.WARNING)
    if asked.seed is not None:
        ended = run(asked.seed, asked.kind)
        print("\n".join(ended.log))
        print(f"seed {asked.seed}, {ended.kind}: {ended.how} {ended.said}")
        return 1 if ended.how == "failed" else 0
    first = random.randrange(1 << 32) if asked.first is None else asked.first  # noqa: S311
    print(f"Cases from seed {first} on.", flush=True)
    counts: Counter[tuple[str, str]] = Counter()
    until = time.monotonic() + 60 * asked.minutes
    for seed in range(first, first + asked.cases):
        if time.monotonic() > until:
            break
        ended = run(seed, asked.kind)
        counts[ended.kind, ended.how] += 1
        if ended.how == "failed":
            print(f"seed {seed}, {ended.kind}: {ended.said}", flush=True)
    print(_summary(counts))
    return 1 if any(how == "failed" for _, how in counts) else 0


def run(seed: int, kinds: Collection[str]) -> Ended:
    """The case of a seed, of one of these kinds."""
    rng = random.Random(seed)  # noqa: S311 (a case's own choice)
    weights = [weight if name in kinds else 0 for name, (_, weight) in KINDS.items()]
    kind = rng.choices(list(KINDS), weights)[0]
    commands = Commands(alone=rng.random() < _ALONE)
    place = _MEMORY if os.path.isdir(_MEMORY) else None
    signal.alarm(_LIMIT)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz", dir=place) as folder:
            KINDS[kind][0](rng, Path(folder), commands)
    except Refused:
        return Ended(kind, "refused", "", commands.log)
    except RefusedByTorch as error:
        return Ended(kind, "skipped", f"torch itself refuses: {error}"[:300], commands.log)
    except Fault as fault:
        return Ended(kind, "failed", str(fault), [*commands.log, *_trace(fault.__cause__)])
    except (Exception, CheckpointException) as error:  # noqa: BLE001 (of this script, or torch's)
        return Ended(kind, "failed", f"{type(error).__name__}: {error}", _trace(error))
    finally:
        signal.alarm(0)
        # torch leaves that of 2.3 there when it refuses a save.
        _version._derived_version = None  # noqa: SLF001 (nothing public resets it)
    return Ended(kind, "done", "", commands.log)


def _trace(error: BaseException | None) -> list[str]:
    return [] if error is None else traceback.format_exception(error)


def _stop(number: int, frame: object) -> None:  # noqa: ARG001 (signal's signature)
    raise Hang(f"not done after {_LIMIT} s")


def _summary(counts: Counter[tuple[str, str]]) -> str:
    hows = ("done", "refused", "skipped", "failed")
    lines = []
    for kind in KINDS:
        told = ", ".join(f"{counts[kind, how]} {how}" for how in hows)
        lines.append(f"{kind}: {sum(counts[kind, how] for how in hows)} cases, {told}")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1, help="how long, at most")
    parser.add_argument("--seed", type=int, help="only this case, with all that was said")
    parser.add_argument("--first", type=int, help="the first seed; a random one by default")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="only these")
    parser.add_argument("--cases", type=int, default=1 << 60, help="how many, at most")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
