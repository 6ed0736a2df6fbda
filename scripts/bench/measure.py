"""What a command costs: seconds, processor seconds, and the most memory that one process took.

It knows commands and nothing of what they do.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_EVERY = 0.02  # seconds; a high-water mark is read, so that few looks do once all is under way
_LATER = 0.2
_POPULATE_WRITE = 23  # Linux 5.14; the module mmap has no name for it


class Cost(NamedTuple):
    """Wall time and processor time (user and system, all threads and children), in seconds, and
    the peak memory, in bytes, of that process of the command which took most.
    """

    seconds: float
    cpu: float
    peak: int


class FailedError(Exception):
    """The command ended with an error, whose last line this is."""


def measure(args: Sequence[str], *, stdout: Path | None = None) -> Cost:
    """Run a command to its end; its output goes to a file, or nowhere. Raises FailedError."""
    with open(stdout or os.devnull, "wb") as out, tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(args, stdout=out, stderr=errors)  # noqa: S603 - our own
        watch = _Watch(process.pid)
        watch.thread.start()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        watch.stop.set()
        watch.thread.join()
        if process.returncode:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            raise FailedError(said[-1] if said else f"exit code {process.returncode}")
    return Cost(seconds, usage.ru_utime + usage.ru_stime, watch.peak)


@dataclass(slots=True)
class _Watch:
    """Looks again and again how much memory a process and its descendants took at most.

    The system's own sum, ru_maxrss, would also count what the process that started them had taken.
    """

    pid: int
    peak: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        pause = _EVERY
        while not self.stop.wait(pause):
            pause = min(_LATER, pause * 1.1)
            for pid in _family(self.pid):
                self.peak = max(self.peak, _high_water(pid))


def touch(nbytes: int) -> None:
    """Take so much memory and give it back at once.

    A virtual machine may return free memory to its host, and then whoever takes a page first waits
    for the host, several times as long as writing it takes: it is not the command's own cost.
    """
    with suppress(OSError), mmap.mmap(-1, max(nbytes, mmap.PAGESIZE)) as memory:
        memory.madvise(_POPULATE_WRITE)


def _family(pid: int) -> list[int]:
    """A process and its descendants, as far as they are still there."""
    found = [pid]
    for one in found:
        with suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                children = Path(f"/proc/{one}/task/{thread}/children").read_text()
                found += map(int, children.split())
    return found


def _high_water(pid: int) -> int:
    """The peak of a process's resident memory in bytes; 0 when it is gone."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0
