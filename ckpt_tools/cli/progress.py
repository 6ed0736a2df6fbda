"""A progress bar in bytes on stderr, only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_tools.cli.group import is_quiet

if TYPE_CHECKING:
    from typing import NoReturn

    from tqdm import tqdm


class _Bar:
    """A progress callback: the number of bytes done since the last call.

    `expect` sets the total, without which no end is shown. Without a ``drawn`` one it does nothing.
    """

    def __init__(self, drawn: tqdm[NoReturn] | None = None) -> None:
        self._drawn = drawn

    def __call__(self, nbytes: int) -> None:
        if self._drawn is not None:
            self._drawn.update(nbytes)

    def expect(self, total: int) -> None:
        """Set the total number of bytes."""
        if self._drawn is not None:  # with the next bytes: a bar drawn too early is never erased
            self._drawn.total = total


@contextmanager
def byte_bar(total: int | None = None, *, label: str) -> Iterator[_Bar]:
    """Yield a bar of ``total`` bytes. Nothing is drawn with --quiet, or when stderr is no
    terminal.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield _Bar()
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
        yield _Bar(bar)
