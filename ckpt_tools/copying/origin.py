"""What an output is made from: the source's files, the options, and the layout of the output."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ckpt_tools._version import __version__
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.index import CheckpointIndex, FileEntry
from ckpt_tools.core.plan import LazyPlans
from ckpt_tools.errors import CkptError, SourceChangedError, UnreadableError
from ckpt_tools.storage import paths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Origin:
    """What an output is made from; with equal origins every byte of two outputs is equal.

    ``sources`` equal the source's files, by names that do not tell where it is, with their states
    before they were first read; ``options`` what was asked for, in words; ``layout`` a digest of
    the plan.
    """

    version: str
    sources: Mapping[str, str]
    options: Mapping[str, str]
    layout: str

    @classmethod
    def of(
        cls, indexes: Sequence[CheckpointIndex], plans: LazyPlans, options: Mapping[str, str]
    ) -> Origin:
        """The origin of these plans, made with these options for these checkpoints."""
        sources = {}
        for number, index in enumerate(indexes):
            top = index.root if paths.is_dir(index.root) else os.path.dirname(index.root)
            of = f" of checkpoint {number}" if number else ""
            for file in sorted(with_states(index.files)):
                name = os.path.relpath(file.path, top or ".") + of
                sources[name] = str(file.state or "not there")
        return cls(__version__, sources, dict(options), plans.digest)

    def differences(self, now: Origin) -> list[str]:
        """What is different now, a line each; nothing when the origins are equal."""
        differing = []
        if self.version != now.version:
            differing.append(f"ckpt-tools was {self.version} and is {now.version}.")
        for name in sorted(self.options.keys() | now.options.keys()):
            was, new = self.options.get(name, "not there"), now.options.get(name, "not there")
            if was != new:
                differing.append(f"{name} was {was} and is {new}.")
        for name in sorted(self.sources.keys() | now.sources.keys()):
            was, new = self.sources.get(name, "not there"), now.sources.get(name, "not there")
            if was != new:
                differing.append(f"{name} of the source has changed: was {was}, is {new}.")
        if not differing and self.layout != now.layout:
            differing.append("The files to write would be different.")
        return differing


def with_states(files: Iterable[FileEntry]) -> list[FileEntry]:
    """The same files; those without a state, with the states that they have now."""
    files = tuple(files)
    now = paths.states_now(file.path for file in files if file.state is None)
    return [file._replace(state=file.state or now.get(file.path)) for file in files]


@contextmanager
def writing_from(files: Iterable[FileEntry]) -> Iterator[None]:
    """Raise SourceChangedError when a file changes before the block ends, whatever else failed."""
    source = with_states(files)
    # What obstore reads is asked for once, in the end: each answer shows a change earlier.
    here = [file for file in source if not paths.shows_changes(file.path)]
    _require_unchanged(here, SourceChangedError)
    with _unchanged(source, SourceChangedError):
        yield


@contextmanager
def reading(files: Iterable[FileEntry]) -> Iterator[None]:
    """Raise UnreadableError when a file is no longer as it was before its first byte was read,
    whatever else failed: what the block has read may be of two saves.
    """
    with _unchanged(with_states(files), UnreadableError):
        yield


def reads_one_save(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function whose checkpoints must stay as they are: it is done inside of `reading`."""

    @wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given = (*args, *kwargs.values())
        indexes = (one for one in given if isinstance(one, CheckpointIndex))
        with reading(file for index in indexes for file in index.files):
            return function(*args, **kwargs)

    return guarded


@contextmanager
def _unchanged(source: Sequence[FileEntry], error: type[CkptError]) -> Iterator[None]:
    try:
        yield
    except (CkptError, OSError) as other:
        try:
            _require_unchanged(source, error)
        except error as changed:
            raise changed from other
        raise
    _require_unchanged(source, error)


_AGAIN = {
    SourceChangedError: "The output would mix two sources, so OUT was not created. Run the command "
    "again when nothing writes there any more.",
    UnreadableError: "What was read may be of two saves. Read it again when nothing writes there "
    "any more.",
}


def _require_unchanged(files: Sequence[FileEntry], error: type[CkptError]) -> None:
    now = paths.states_now(file.path for file in files)
    changed = [file for file in files if file.state != now.get(file.path)]
    if changed:
        first = changed[0]
        was, new = first.state or "not there", now.get(first.path) or "not there"
        more = f" {len(changed) - 1} more files have changed, too." if len(changed) > 1 else ""
        raise error(
            f"{first.path} has changed since it was first read: was {was}, is {new}.{more}",
            hint=_AGAIN[error],
        )


def option_texts(options: DataclassInstance) -> dict[str, str]:
    """Each option as text, to compare two runs field by field.

    Of another checkpoint only its path is given: what it changes is seen in the plan. A step is
    given by its own fields, and no address of a function gets into the texts.
    """
    return {field.name: _option_text(getattr(options, field.name)) for field in fields(options)}


def _option_text(value: object) -> str:
    if isinstance(value, CheckpointIndex):
        return value.root
    if isinstance(value, DType):
        return value.name
    if value is None or value == ():
        return "not given"
    if isinstance(value, tuple) and any(callable(one) for one in value):
        return ", ".join(str(one) if is_dataclass(one) else "a function" for one in value)
    return str(value)
