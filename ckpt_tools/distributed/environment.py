"""Which rank of a torchrun job this process is, from environment variables alone, without torch.

Only rank 0 prints; all ranks would print the same.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ckpt_tools.errors import UsageError

# What torchrun and compatible launchers set for each process.
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Commands whose work is shared between the ranks; any other is done by rank 0 alone.
SHARED_COMMANDS = frozenset({"export", "reshard"})

# What other launchers call a process's number, and how many there are.
_LAUNCHERS = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
)

_PEER_TIMEOUT = "CKPT_TOOLS_PEER_TIMEOUT"
_stderr: int | None = None  # where a silent rank's stderr went


class RankPlace(NamedTuple):
    """Which of the job's ranks this process is, and which of those on its own machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def place() -> RankPlace | None:
    """Which rank of a torchrun job this process is; None outside of one."""
    if any(name not in os.environ for name in _NEEDED):
        return None
    texts = [os.environ[name] for name in _NEEDED[:3]]
    try:
        return RankPlace(*map(int, [*texts, os.environ.get("LOCAL_WORLD_SIZE", "1")]))
    except ValueError:
        return None


def refuse_lone_task() -> None:
    """Raise UsageError where srun or mpirun has started several of this process, and no torchrun.

    None would know of the others, and each would do the whole work.
    """
    if place() is not None:
        return
    for program, number, count in _LAUNCHERS:
        here, tasks = os.environ.get(number, ""), os.environ.get(count, "1")
        # A batch script is task 0 itself, and has no step.
        if (here.isdigit() and int(here) > 0) or (here == "0" and tasks not in ("0", "1")):
            raise UsageError(
                f"{program} has started this as task {here} of several ({number} is set), and "
                f"there is no {', '.join(n for n in _NEEDED if n not in os.environ)}: each task "
                "would do all of the work.",
                hint="torchrun sets these variables. On one task a node: "
                f"{program} torchrun --nnodes … --nproc-per-node … -m ckpt_tools reshard …, or "
                "start one task alone, with -j N.",
            )


def is_follower() -> bool:
    """Whether this process is a rank above 0 of a torchrun job."""
    here = place()
    return here is not None and here.rank > 0


def silence_followers(arguments: Sequence[str]) -> None:
    """End or silence this process when it is a rank above 0 of a torchrun job.

    ``arguments`` are those of the command line. A command that the ranks do not share ends here
    with exit code 0: rank 0 does it, and its exit code is the job's.
    """
    global _stderr  # noqa: PLW0603 - as the streams of the process are
    if not is_follower():
        return
    command = next((word for word in arguments if not word.startswith("-")), None)
    if command not in SHARED_COMMANDS:
        raise SystemExit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    _stderr = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # not only Python's: torch's C++ code prints, too
        os.dup2(nowhere, stream)
    os.close(nowhere)
    atexit.register(let_it_finish)


def peer_timeout() -> float:
    """Seconds without a sign of life after which a rank counts as gone; 30 by default."""
    try:
        return max(1.0, float(os.environ[_PEER_TIMEOUT]))
    except (KeyError, ValueError):
        return 30.0


def join_timeout() -> float:
    """Seconds to wait for ranks that have not joined, after the last that did; 60 by default.

    torchrun's agents meet before they start any rank. Without them nodes start as they like: 120.
    """
    return peer_timeout() * (2 if agent_has_store() else 4)


def agent_has_store() -> bool:
    """Whether torchrun's agent holds the job's store, and has made it before it starts ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def let_it_finish() -> None:
    """Wait a second: rank 0 has the same error, and torchrun kills it when this rank ends first.

    A rank that has joined the group waits for rank 0 itself, and unregisters this.
    """
    time.sleep(1)


def speak() -> None:
    """Restore the stderr of a silent rank: rank 0 cannot report what happened."""
    if _stderr is not None:
        os.dup2(_stderr, 2)
