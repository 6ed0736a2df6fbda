"""Errors as text, so that one process can report what failed in another."""

from __future__ import annotations

import json

from ckpt_tools import errors
from ckpt_tools.errors import CkptError


def encode(error: BaseException) -> str:
    """An error as one line of JSON; an error of another class becomes a fault of ckpt-tools."""
    if isinstance(error, OSError):
        error = errors.from_system(error)
    elif isinstance(error, KeyboardInterrupt):
        error = CkptError("Stopped.")
    elif not isinstance(error, CkptError):
        error = CkptError(f"ckpt-tools itself failed: {type(error).__name__}: {error}")
    facts = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
    return json.dumps(facts)


def decode(text: str) -> CkptError:
    """The error that `encode` wrote, of the same class where `errors` has it."""
    facts = json.loads(text)
    kind = getattr(errors, facts["kind"], CkptError)
    lines = facts["message"].split("\n")
    error = kind(*lines, hint=facts["hint"])
    return error if isinstance(error, CkptError) else CkptError(*lines)
