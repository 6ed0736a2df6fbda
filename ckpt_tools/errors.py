"""The tree of errors that ckpt-tools raises on purpose.

    CkptError                    exit code
    ├── UsageError               2   an option or an argument cannot be meant
    │   └── OutputExistsError    2   the output is there already and --force was not given
    ├── AnswerNo                 1   the question was understood and the answer is no
    ├── CheckpointError          3   the checkpoint itself is the trouble
    │   ├── UnreadableError      3   bytes that are not what the format says
    │   │   └── UnsafePickleError    a pickle that asks for a global we do not know
    │   ├── IncompleteError      3   something that the checkpoint needs is not there
    │   └── UnsupportedError     3   understood, and refused: reading it would give wrong tensors
    └── WriteError               4   the output could not be written; what was there is untouched
        └── PeerFailedError      4   another rank of the job failed or is gone

Each error carries one line that says what, where, found and expected, and a hint that says what to
try next. This room knows nothing of formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class CkptError(Exception):
    """The root: one line for a person, an optional hint, and the exit code of the command line."""

    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(CkptError):
    """An option or an argument cannot be meant as it was given."""

    exit_code: ClassVar[int] = 2


class OutputExistsError(UsageError):
    """The output is there already, and nobody said that it may go."""


class AnswerNo(CkptError):
    """The question was understood, and its answer is no: differs, absent, not whole."""

    exit_code: ClassVar[int] = 1


class CheckpointError(CkptError):
    """The checkpoint itself is the trouble; ``about`` names the entries it hurts, if only some."""

    def __init__(self, message: str, *, hint: str | None = None, about: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.about = frozenset(about)


class UnreadableError(CheckpointError):
    """Bytes that are not what their format says: cut short, damaged, foreign."""


class UnsafePickleError(UnreadableError):
    """A pickle asks for a global that is not on the allow list; it was not resolved and not run."""


class IncompleteError(CheckpointError):
    """Something that the checkpoint needs is not there: a file, a rank, some rows."""


class UnsupportedError(CheckpointError):
    """A layout or a type that is understood well enough to know that reading it would be wrong."""


class WriteError(CkptError):
    """The output could not be written."""

    exit_code: ClassVar[int] = 4


class PeerFailedError(WriteError):
    """Another rank of the job has failed, or is gone without a word."""
