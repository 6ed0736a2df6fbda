"""A progress bar in bytes on stderr, only where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckpt_tools.cli.group import is_quiet


@contextmanager
def byte_bar(total: int | None, *, label: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that is told how many bytes were done since it was last called.

    Without a total, no end is foretold. Nothing is drawn with --quiet, or when stderr is no
    terminal.
    """
    if is_quiet() or not sys.stderr.isatty():
        yield _ignore
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

        def advance(nbytes: int) -> None:
            bar.update(nbytes)

        yield advance


def _ignore(nbytes: int) -> None:
    """Take the news and do nothing."""
