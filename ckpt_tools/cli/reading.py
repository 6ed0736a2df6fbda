"""Reading an index for a command: its notes, filters, and what to say when nothing is left."""

from __future__ import annotations

from ckpt_tools.cli.group import say
from ckpt_tools.cli.options import Filters
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.names import near_names, select
from ckpt_tools.errors import AnswerNo, Way
from ckpt_tools.formats import ReadOptions, is_checkpoint, open_objects, read_index
from ckpt_tools.formats.frameworks import whole_of
from ckpt_tools.storage.reader import Files

_MAX_SHOWN = 5


def read(ckpt: str, options: ReadOptions) -> CheckpointIndex:
    """The index of a checkpoint; its notes go to stderr."""
    index = read_index(ckpt, options=options)
    for note in index.notes:
        say(note)
    return index


def choose(index: CheckpointIndex, chosen: Filters) -> CheckpointIndex:
    """The entries that the filters choose. Raises AnswerNo, with names that are near, for none."""
    if chosen.wants_all:
        return index
    try:
        return select(index, include=chosen.include, exclude=chosen.exclude, only=chosen.only)
    except AnswerNo as error:
        names = [name for text in chosen.include for name in near_names(index, text.strip("*"))]
        whole = whole_of(index)
        is_half = whole is not None and is_checkpoint(whole)
        if not names and is_half and error.instead is not None:
            ways = (Way(whole), *error.instead.ways)
            error.instead = error.instead._replace(ways=ways)
        if not names:
            raise
        raise AnswerNo(error.message, hint=_did_you_mean(names)) from error


def with_values(index: CheckpointIndex) -> CheckpointIndex:
    """The same index with the values of its plain objects read."""
    if not index.objects:
        return index
    with Files() as files:
        return open_objects(index, files)


def no_such_name(index: CheckpointIndex, fqn: str) -> AnswerNo:
    """The error for a name that the checkpoint does not have, with names that are near.

    Raises what is wrong when the name is lost.
    """
    if fqn in index.lost:
        index.select({fqn}).require_whole()
    names = near_names(index, fqn)
    hint = _did_you_mean(names) if names else "`ckpt-tools ls` lists all names."
    return AnswerNo(f"{index.root} has no entry {fqn!r}.", hint=hint)


def _did_you_mean(names: list[str]) -> str:
    return "Did you mean one of these?\n" + "\n".join(names[:_MAX_SHOWN])
