"""A progress bar in bytes on stderr, only where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_tools.cli.group import is_quiet

if TYPE_CHECKING:
    from typing import NoReturn

    from tqdm import tqdm


class Bar:
    """Is told how many bytes were done since it was last called, and how many there will be.

    Until it knows that, no end is foretold.
    """

    def __call__(self, nbytes: int) -> None:
        """Take the news; this bar draws nothing."""

    def expect(self, total: int) -> None:
        """Take note of the end."""


class _Drawn(Bar):
    def __init__(self, bar: tqdm[NoReturn]) -> None:
        self._bar = bar

    def __call__(self, nbytes: int) -> None:
        self._bar.update(nbytes)

    def expect(self, total: int) -> None:
        self._bar.total = total
        self._bar.refresh()


@contextmanager
def byte_bar(total: int | None = None, *, label: str) -> Iterator[Bar]:
    """Yield a bar of ``total`` bytes. Nothing is drawn with --quiet, or when stderr is no
    terminal.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield Bar()
        return
    from tqdm import tqdm  # late: looking commands draw no bar

    with tqdm(
        total=total,
        desc=label,
        unit="B",
        unit_scale=True,
        leave=False,
        delay=0.5,  # what is refused or done at once draws nothing
    ) as bar:
        yield _Drawn(bar)
