"""The tree of errors that ckpt-tools raises on purpose.

    CkptError                    exit code
    ├── UsageError               2   an option or an argument cannot be meant
    │   └── OutputExistsError    2   the output already exists and --force was not given
    ├── AnswerNo                 1   the question was understood and the answer is no
    │   └── NoSuchEntry          1   there is no entry of this name; a KeyError, too
    ├── CheckpointError          3   the checkpoint itself is the trouble
    │   ├── UnreadableError      3   bytes that are not what the format says
    │   │   └── UnsafePickleError    a pickle that asks for a global we do not know
    │   ├── IncompleteError      3   something that the checkpoint needs is not there
    │   │   └── NotThereError    3   nothing is at this path; a FileNotFoundError, too
    │   └── UnsupportedError     3   understood, and refused: reading it would give wrong tensors
    │       └── NotReadError     3   whole, and of a kind that torch reads and this program does not
    └── WriteError               4   the output could not be written; what was there is untouched
        ├── SourceChangedError   4   the source changed while it was read
        └── PeerFailedError      4   another rank of the job failed or is gone

Each error carries one line that says what, where, found and expected, and a hint that says what to
try next. What it quotes may come from anybody's file, so its text is made `printable` here, for the
terminal and for tracebacks alike. This room knows nothing of formats.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self


_MOST_COMMANDS = 20


def printable(text: str) -> str:
    """The text as one line without control characters, direction marks and lone surrogates, which
    become escapes: a name from a file must not move a cursor, or hide a part of itself.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Way(NamedTuple):
    """What would be right in the place of a path: another path or none, and options to add.

    An option is two words, its name and its value.
    """

    path: str | None = None
    options: tuple[str, ...] = ()


class Instead(NamedTuple):
    """What to give for a path: the command that was typed is then repeated, once for each way.

    A word of the command is the path when it names it, or something in it; ``without`` are words
    that make no sense any more.
    """

    path: str
    ways: tuple[Way, ...]
    without: tuple[str, ...] = ()

    def commands(self, words: Sequence[str]) -> str:
        """The command of these words as it would be right, a line for each way."""
        lines = [shlex.join(self._words(words, way)) for way in self.ways[:_MOST_COMMANDS]]
        more = len(self.ways) - len(lines)
        return "\n".join(lines + ([f"and {more} more"] if more else []))

    def _words(self, words: Sequence[str], way: Way) -> Iterator[str]:
        """The words, with an option of the way in the place of the same one; -x can be repeated."""
        replaced = {option for option in way.options[::2] if option != "-x"}
        before = ""
        for word in words:
            if before not in replaced and word not in replaced and word not in self.without:
                yield self._word(word, way)
            before = word
        yield from way.options

    def _word(self, word: str, way: Way) -> str:
        given, meant = os.path.normpath(self.path), os.path.normpath(word)
        if way.path is None or not word or word.startswith("-"):
            return word
        return way.path if meant == given or meant.startswith(given + os.sep) else word


def paths_instead(path: str, paths: Iterable[str], *, without: tuple[str, ...] = ()) -> Instead:
    """Other paths in the place of one, ``without`` words that chose among them."""
    return Instead(path, tuple(map(Way, paths)), without)


class Terminated(KeyboardInterrupt):
    """SIGTERM has come, as at the end of a batch job's time: like Ctrl-C, but for the exit code."""


class CkptError(Exception):
    """The root: one line for a person, an optional hint, and the exit code of the command line.

    ``more`` are further lines of the message, which is printable: what it quotes ends no line.
    ``instead`` is what to type, which a command line can say in the words that were typed.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self, message: str, *more: str, hint: str | None = None, instead: Instead | None = None
    ) -> None:
        self.message = _lines(message, *more)
        super().__init__(self.message)
        self.advice = hint
        self.instead = instead

    @property
    def first_line(self) -> str:
        """The message without its further lines."""
        return self.message.partition("\n")[0]

    @property
    def hint(self) -> str | None:
        """What to try next, or None."""
        return self.hint_for(None)

    def hint_for(self, typed: Sequence[str] | None) -> str | None:
        """What to try next after the command of these words; None where none was typed."""
        if self.instead is None:
            return self.advice
        words = typed or ["ckpt-tools", "inspect", self.instead.path]
        return "\n".join(filter(None, [self.advice, self.instead.commands(words)]))

    def __str__(self) -> str:
        """The message; KeyError and OSError have other ways to show theirs."""
        return self.message

    def to_dict(self) -> dict[str, str | list[str] | None]:
        """The error as --json prints it."""
        return {"kind": type(self).__name__, "message": self.message, "hint": self.hint}

    def advise(self, text: str) -> None:
        """Add a line to what to try next."""
        self.advice = "\n".join(filter(None, (self.advice, text)))

    def speak_python(self) -> None:
        """Make the hint one for programs: ``force=True``, ``exclude``; instead of a path, paths.

        From Python 3.11 on it stands below the traceback.
        """
        ways = self.instead.ways[:_MOST_COMMANDS] if self.instead else ()
        lines = [_in_python(self.advice or "")]
        for way in ways:  # 'run/step-2', or exclude='optim.*'
            pairs = zip(way.options[::2], way.options[1::2], strict=True)
            named = [f"{_in_python(option)}={value!r}" for option, value in pairs]
            lines.append(", ".join([*([repr(way.path)] if way.path else []), *named]))
        self.advice, self.instead = "\n".join(filter(None, lines)) or None, None
        self.__notes__ = [] if self.advice is None else [self.advice]

    def at(self, where: str, link: str = ": ") -> Self:
        """The same error with where it happened before its message: ``Rank 3: …``."""
        return self._saying(f"{printable(where)}{link}{self.message}")

    def reworded(self, message: str, *more: str) -> Self:
        """The same error with another message: class, hint and all that it carries stay."""
        return self._saying(_lines(message, *more))

    def _saying(self, text: str) -> Self:
        other = type(self).__new__(type(self), text)
        vars(other).update(vars(self), message=text)
        return other


@contextmanager
def in_python() -> Iterator[None]:
    """Raise errors with hints that a program can follow."""
    try:
        yield
    except CkptError as error:
        error.speak_python()
        raise


# Options that the library has as arguments, of the same name but for these; and those of them that
# are True or False.
_ARGUMENTS = (
    *("--include", "--exclude", "--only", "--dtype", "--layout", "--to-mesh", "--hf-assets"),
    *("--step", "--threads", "--max-shard-size", "--weights", "--ema", "--like", "--torch-version"),
)
_SWITCHES = (
    *("--force", "--latest", "--latest-complete", "--check", "--resume", "--keep-names"),
    "--keep-rank-states",
)
_RENAMED = {"-x": "exclude", "-i": "include", "--place": "rules", "--dtype-for": "dtypes"}
# Commands that stand in hints, and what does the same.
_CALLS = (
    (r"ckpt-tools ls( --only model)?(?=`)", "list(checkpoint)"),
    (r"ckpt-tools diff [^`\n]*--clean-names", "diff(a, b, options=DiffOptions(clean=True))"),
    (r"another format with --format torch", "to a path that ends in .pt"),
    (
        r"--param-names FILE( names them)?(,|:) one name a line",
        r"ReshardOptions(param_names=ParamNames(names))\1",
    ),
)


def _in_python(text: str) -> str:
    """A text with arguments in place of options."""

    def argument(option: re.Match[str]) -> str:
        if option[0] not in (*_ARGUMENTS, *_SWITCHES, *_RENAMED):
            return option[0]
        name = _RENAMED.get(option[0], option[0].strip("-"))
        return name.replace("-", "_") + ("=True" if option[0] in _SWITCHES else "")

    for command, call in _CALLS:
        text = re.sub(command, call, text)
    return re.sub(r"(?<![\w-])(--[a-z][a-z-]*|-[xi]\b)", argument, text)


def _lines(*lines: str) -> str:
    return "\n".join(map(printable, lines))


class UsageError(CkptError):
    """An option or an argument makes no sense as given."""

    exit_code: ClassVar[int] = 2


class OutputExistsError(UsageError):
    """The output exists already, and --force was not given."""


class AnswerNo(CkptError):
    """The answer is no: different, absent, not complete."""

    exit_code: ClassVar[int] = 1


class NoSuchEntry(AnswerNo, KeyError):
    """The checkpoint has no entry of this name; the hint has names that are near."""


class CheckpointError(CkptError):
    """The checkpoint itself is at fault; ``about`` names the entries concerned, if only some.

    ``file`` is the path of a file of which nothing can be read, None where that is not the fault.
    ``verdict`` is the fault in a word or two: its parts contradict one another.
    """

    verdict: ClassVar[str] = "INCONSISTENT"
    file: str | None = None

    def __init__(
        self,
        message: str,
        *more: str,
        hint: str | None = None,
        instead: Instead | None = None,
        about: Iterable[str] = (),
    ) -> None:
        super().__init__(message, *more, hint=hint, instead=instead)
        self.about = frozenset(about)

    def to_dict(self) -> dict[str, str | list[str] | None]:
        """The same, and what it is about, as the problems of a checkpoint are printed."""
        return {**super().to_dict(), "about": sorted(self.about)}

    def concerning(self, fqns: Iterable[str]) -> Self:
        """The same error, about these entries."""
        other = self._saying(self.message)
        other.about = frozenset(fqns)
        return other

    def losing(self, file: str) -> Self:
        """The same error, for which nothing of this file can be read."""
        other = self._saying(self.message)
        other.file = file
        return other


class UnreadableError(CheckpointError):
    """Bytes that are not what their format says: cut short, damaged, foreign."""

    verdict: ClassVar[str] = "DAMAGED"


class UnsafePickleError(UnreadableError):
    """A pickle asks for a global that is not on the allow list; it was not resolved and not run."""

    verdict: ClassVar[str] = "REFUSED"


class IncompleteError(CheckpointError):
    """Something that the checkpoint needs does not exist: a file, a rank, some rows."""

    verdict: ClassVar[str] = "NOT COMPLETE"


class NotThereError(IncompleteError, FileNotFoundError):
    """Nothing is at the path that was given.

    Programs that know FileNotFoundError catch it, too.
    """


class UnsupportedError(CheckpointError):
    """A layout or type that is known, and that would be read wrong."""

    verdict: ClassVar[str] = "REFUSED"


class NotReadError(UnsupportedError):
    """A tensor that torch or its library reads and this program does not; nothing is wrong with it.

    It keeps what needs the tensor from being done, and no checkpoint from being whole.
    """


def fault_in(problems: Iterable[CheckpointError]) -> str | None:
    """The gravest of the problems in a word or two, ``NOT COMPLETE`` or ``DAMAGED``; else None."""
    found = {problem.verdict for problem in problems}
    graded = (IncompleteError, UnreadableError, CheckpointError, UnsupportedError)
    return next((kind.verdict for kind in graded if kind.verdict in found), None)


class WriteError(CkptError):
    """The output could not be written."""

    exit_code: ClassVar[int] = 4


class PeerFailedError(WriteError):
    """Another rank of the job has failed, or has gone silent."""


class SourceChangedError(WriteError):
    """The source changed while it was read: the output may mix two saves."""


def reason_of(error: Exception) -> str:
    """What the system says of an error, without its number and the path; else its text."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def unreadable(path: object, error: OSError, *, doing: str = "read") -> UnreadableError:
    """What to raise for the system's error while reading, listing or opening this path."""
    return UnreadableError(f"{path} cannot be {doing}: {reason_of(error)}.")


def unwritable(
    path: object, error: OSError, *, doing: str = "written", hint: str | None = None
) -> WriteError:
    """What to raise for the system's error while writing this path; a full disk has a hint."""
    if hint is None and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        hint = "Free some space, or choose an output on another file system."
    return WriteError(f"{path} cannot be {doing}: {reason_of(error)}.", hint=hint)


def from_system(error: OSError) -> CkptError:
    """The error for an unexpected OSError, with its path."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return CkptError(f"{where}{reason_of(error)}.")
