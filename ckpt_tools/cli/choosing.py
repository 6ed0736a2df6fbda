"""Which checkpoint is meant, which step of a run, and which of its entries.

Here are the options that choose among several, and what a shell completes names with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import click

from ckpt_tools import formats
from ckpt_tools.cli.group import say
from ckpt_tools.cli.render import clock
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.names import (
    Filters,
    NamePatterns,
    did_you_mean,
    idle,
    near_names,
    no_such_entry,
    select,
)
from ckpt_tools.core.options import Heading, only_one_of, option
from ckpt_tools.core.text import some
from ckpt_tools.distributed import environment
from ckpt_tools.errors import (
    AnswerNo,
    CheckpointError,
    CkptError,
    IncompleteError,
    Instead,
    UnreadableError,
    Way,
)
from ckpt_tools.formats import SMALL_OBJECT, ReadOptions, is_checkpoint, open_objects, read_index
from ckpt_tools.formats.frameworks import whole_of
from ckpt_tools.storage.reader import Files

_CHOSEN = "ckpt_tools.chosen"  # a run, and the checkpoint in it, and how it is read
# A shell lists what it is offered; nobody reads more than this.
_MOST_OFFERED = 2_000
_MOST_NEAR = 3  # patterns that near names are looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Which checkpoint is meant by the folder of several, and how it is read.

    Raises UsageError for two ways at once.
    """

    heading: ClassVar[Heading] = "Which entries"

    latest: bool = option(
        False, "--latest", "If CKPT is a folder of several: use the last step.", own=True
    )
    latest_complete: bool = option(
        False,
        "--latest-complete",
        "If CKPT is a folder of several: use the last step that `verify --quick` calls complete.",
        own=True,
    )
    step: int | None = option(
        None,
        "--step",
        "If CKPT is a folder of several: use this step.",
        metavar="N",
        at_least=0,
        own=True,
    )
    options: ReadOptions

    def __post_init__(self) -> None:
        step = self.step is not None
        only_one_of(
            {"--latest": self.latest, "--latest-complete": self.latest_complete, "--step": step}
        )

    @property
    def chooses(self) -> bool:
        """Whether one of several is chosen."""
        return self.latest or self.latest_complete or self.step is not None

    def find(self, ckpt: str) -> str:
        """The path of the checkpoint that these options choose in the one that was given.

        Raises AnswerNo where --latest-complete finds none, and what `formats.of_step` raises.
        """
        if self.latest_complete:
            from ckpt_tools.proof.latest import latest_complete  # late: most commands prove nothing

            return latest_complete(ckpt, self.options, on_skip=say).path
        if not self.chooses:
            return ckpt
        found = formats.of_step(ckpt, self.step)
        click.get_current_context().meta[_CHOSEN] = ckpt, found, self.options
        return found

    def read(self, ckpt: str) -> CheckpointIndex:
        """The index of that checkpoint; its notes go to stderr."""
        return read(self.find(ckpt), self.options)


def read(ckpt: str, options: ReadOptions) -> CheckpointIndex:
    """The index of a checkpoint; its notes go to stderr."""
    with clock("reading the index"):
        index = read_index(ckpt, options=options)
    for note in index.notes:
        say(note)
    return index


def newest_complete() -> str | None:
    """Which step is the newest complete one, where that of --latest or --step is not complete."""
    meta = click.get_current_context().meta
    chosen: tuple[str, str, ReadOptions] | None = meta.get(_CHOSEN)
    if chosen is None or environment.is_follower():
        return None
    run, path, options = chosen
    from ckpt_tools.proof.latest import latest_complete, problem_of  # late: only for what is wrong

    try:
        if problem_of(path, options) is None:
            return None
        saved = latest_complete(run, options)
    except AnswerNo as error:
        return error.message
    except CheckpointError:  # several are of one step
        return None
    return None if saved.step is None else f"--step {saved.step} is the newest complete one."


def name_newest(error: CkptError) -> None:
    """Add the newest complete step to the hint of what is wrong with another one."""
    newest = newest_complete() if isinstance(error, (IncompleteError, UnreadableError)) else None
    if newest is not None:
        error.advise(newest)


def choose(index: CheckpointIndex, chosen: Filters) -> CheckpointIndex:
    """The entries that the filters choose, and a note on an -x that matches nothing.

    Raises AnswerNo, with names that are near, when they choose none.
    """
    found = chosen_in(index, chosen)
    say_idle(chosen, [index])
    return found


def names_of(index: CheckpointIndex) -> Iterator[str]:
    """What an -x may match: all names, and those of what is lost."""
    return chain((entry.fqn for entry in index.entries), index.lost)


def say_idle(
    patterns: NamePatterns, indexes: Sequence[CheckpointIndex], *, also: Iterable[str] = ()
) -> None:
    """Say which patterns of -x match no name in any of these, and what is near."""
    left = idle(patterns.exclude if indexes else (), chain(also, *map(names_of, indexes)))
    where = " and ".join(dict.fromkeys(index.root for index in indexes))
    for place, text in enumerate(left):
        bare = re.sub(r"re:|[*^$\\]|\.(?=[*+])", "", text)
        some_of = indexes if place < _MOST_NEAR else ()  # it takes time where there are many names
        near = dict.fromkeys(name for index in some_of for name in near_names(index, bare))
        hint = f"Did you mean {some([*near])}?" if near else "`ckpt-tools ls` lists the names."
        say(f"Note: -x '{text}' matches nothing in {where}. {hint}")


def chosen_in(index: CheckpointIndex, chosen: Filters) -> CheckpointIndex:
    """The entries that the filters choose. Raises AnswerNo, with names that are near, for none."""
    if chosen.wants_all:
        return index
    try:
        return select(index, chosen)
    except AnswerNo as error:
        held = index.entries
        within = [f"*{text}*" for text in chosen.include if any(text in one.fqn for one in held)]
        if within and error.instead is None:
            globs = Way(options=tuple(word for glob in within for word in ("-i", glob)))
            raise AnswerNo(error.message, instead=Instead(index.root, (globs,))) from error
        names = [name for text in chosen.include for name in near_names(index, text.strip("*"))]
        whole = whole_of(index)
        is_half = whole is not None and is_checkpoint(whole)
        if not names and is_half and error.instead is not None:
            ways = (Way(whole), *error.instead.ways)
            error.instead = error.instead._replace(ways=ways)
        if not names:
            raise
        raise AnswerNo(error.message, hint=did_you_mean(names)) from error


def with_values(index: CheckpointIndex) -> CheckpointIndex:
    """The same index with the values of its plain objects read, of those that are small."""
    if not index.objects:
        return index
    with Files() as files:
        return open_objects(index, files, largest=SMALL_OBJECT)


def no_such_name(index: CheckpointIndex, fqn: str) -> AnswerNo:
    """The error for a name that does not exist. Raises what is wrong when the name is lost."""
    if fqn in index.lost:
        index.select({fqn}).require_whole()
    return no_such_entry(index, fqn)


def tensors(ckpt: str, incomplete: str) -> list[str]:
    """Names of the tensors of a checkpoint."""
    return _fitting(_names(ckpt)[0], incomplete)


def names(ckpt: str, incomplete: str) -> list[str]:
    """Names of all entries of a checkpoint."""
    tensors, objects = _names(ckpt)
    return _fitting(sorted(tensors + objects), incomplete)


def _fitting(candidates: list[str], incomplete: str) -> list[str]:
    """Names that begin with the text, else those that contain it, at most `_MOST_OFFERED`.

    Shells are offered one name a line, so that those with a line break or an escape in them are
    left out.
    """
    candidates = [name for name in candidates if name and name.isprintable()]
    begin = [name for name in candidates if name.startswith(incomplete)]
    return (begin or [name for name in candidates if incomplete in name])[:_MOST_OFFERED]


def _names(ckpt: str) -> tuple[list[str], list[str]]:
    try:
        index = read_index(ckpt)
    except (CkptError, OSError):
        return [], []
    return [entry.fqn for entry in index.tensors], [entry.fqn for entry in index.objects]
