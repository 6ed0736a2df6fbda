"""What a command is doing, on stderr: a bar in bytes, or a line. Only on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING

import click

from ckpt_tools.cli.group import is_dumb, is_quiet, saying
from ckpt_tools.core.progress import Listener

if TYPE_CHECKING:
    from typing import NoReturn

    from tqdm import tqdm


_SILENT = 2.0  # seconds after which a person wonders
_EVERY = 1.0
_DELAY = 0.5  # what is refused or done at once draws nothing


class _Bar:
    """A progress callback: the number of bytes done since the last call.

    `expect` sets the total, without which no end is shown. Without a ``drawn`` one it does nothing.
    """

    def __init__(self, drawn: tqdm[NoReturn] | None = None) -> None:
        self._drawn = drawn

    def __call__(self, nbytes: int) -> None:
        if self._drawn is None:
            return
        if not self._drawn.n:  # what was done before the first bytes does not count for the speed
            self._drawn.start_t = self._drawn.last_print_t = time.time()
        self._drawn.update(nbytes)

    def name(self, phase: str) -> None:
        """Say what is done from now on."""
        if self._drawn is not None:
            self._drawn.set_description(phase, refresh=False)

    def expect(self, total: int) -> None:
        """Set the total number of bytes."""
        if self._drawn is not None:  # with the next bytes: a bar drawn too early is never erased
            self._drawn.total = total


def _is_drawn() -> bool:
    """Whether anything is: a bar goes back to the start of its line."""
    return sys.stderr.isatty() and not is_quiet() and not is_dumb()


@contextmanager
def byte_bar(total: int | None = None, *, label: str) -> Iterator[_Bar]:
    """Yield a bar of ``total`` bytes. Nothing is drawn with --quiet, or when stderr is no
    terminal.
    """
    if not _is_drawn():
        yield _Bar()
        return
    from tqdm import tqdm  # late: looking commands draw no bar

    with tqdm(total=total, desc=label, unit="B", unit_scale=True, leave=False, delay=_DELAY) as bar:
        yield _Bar(bar)


@contextmanager
def writing() -> Iterator[Listener]:
    """Yield who hears of a conversion: a bar that names its phases, and notes on stderr."""
    with byte_bar(label="write") as bar:
        yield Listener(bar, bar.expect, saying(), partial(bar.name, "check"))


@contextmanager
def clock(text: str) -> Iterator[None]:
    """Say what is waited for, and for how long, once it takes more than two seconds."""
    if not _is_drawn():
        yield
        return
    done, started = Event(), time.monotonic()

    def tick() -> None:
        wait, drawn = _SILENT, ""
        while not done.wait(wait):
            wait, drawn = _EVERY, f"{text}: {time.monotonic() - started:.0f} s"
            click.echo(f"{drawn}\r", nl=False, err=True)
        if drawn:
            click.echo(f"{' ' * len(drawn)}\r", nl=False, err=True)

    thread = Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
