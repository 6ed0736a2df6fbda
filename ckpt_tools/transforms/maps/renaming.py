"""Small steps on names and sizes: renaming by regular expressions, and padding taken off.

Nothing is read; a shorter vocabulary is a view of the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt_tools.core.index import CheckpointIndex, Entry
from ckpt_tools.core.state_tree import Branch, dict_of
from ckpt_tools.core.text import counted
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.base import TransformedTensor, TransformResult
from ckpt_tools.transforms.maps import views

# Modules that have a row for each token, as the model families call them.
_VOCABULARY = re.compile(
    r"(.*\.)?(embed_tokens|tok_embeddings|word_embeddings|wte|embedding|lm_head|output|output_layer)"
    r"\.(weight|bias)"
)
# Names of Hugging Face's models, of which --untie makes the first from the second.
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class RenameTransform:
    """Renames by regular expressions, each applied to every name in turn: ``(RE, REPL)``."""

    rules: tuple[tuple[str, str], ...]

    def __call__(self, made: tuple[TransformedTensor, ...], *_: object) -> TransformResult:
        """Rename the entries.

        Raises UsageError for an expression that cannot be read or that changes no name.
        """
        notes = []
        for text, by in self.rules:
            try:
                fqns = [re.sub(text, by, one.entry.fqn) for one in made]
            except (re.error, IndexError) as error:
                raise UsageError(f"--rename '{text}={by}' is not valid: {error}.") from error
            pairs = list(zip(made, fqns, strict=True))
            for one, fqn in pairs:
                if one.entry.fqn and not fqn:
                    name = one.entry.fqn
                    raise UsageError(f"--rename '{text}={by}' leaves nothing of the name {name}.")
            made = tuple(one if one.entry.fqn == fqn else one.named(fqn) for one, fqn in pairs)
            count = sum(one.entry.fqn != fqn for one, fqn in pairs)
            if not count:
                raise UsageError(
                    f"--rename '{text}={by}' changes no name.",
                    hint="It is a regular expression, searched for in the names that the "
                    "output has so far; --dry-run --json lists them.",
                )
            notes.append(f"--rename '{text}={by}' changed {counted(count, 'name')}.")
        return TransformResult(made, tuple(notes))


def parse_rename(text: str) -> tuple[str, str]:
    """The two sides of ``RE=REPL``, cut at its last equals sign.

    Raises UsageError when there is none, or when the left side is no regular expression.
    """
    pattern, equals, by = text.rpartition("=")
    if not equals or not pattern:
        raise UsageError(f"A renaming is written RE=REPL, not {text!r}.")
    try:
        re.compile(pattern)
    except re.error as error:
        raise UsageError(f"The regular expression {pattern!r} cannot be read: {error}.") from error
    return pattern, by


@dataclass(frozen=True, slots=True)
class VocabularyTransform:
    """Takes rows off the end of embeddings and output layers until ``size`` are left."""

    size: int

    def __call__(self, made: tuple[TransformedTensor, ...], *_: object) -> TransformResult:
        """Take the padding off.

        Raises UsageError when no tensor is known to have a row for each token, or one has fewer.
        """
        trimmed: dict[str, TransformedTensor] = {}
        for one in made:
            fqn, shape = one.entry.fqn, one.entry.shape
            in_layer = any(part.isdecimal() for part in fqn.split("."))
            if not shape or in_layer or not _VOCABULARY.fullmatch(fqn):
                continue
            if shape[0] < self.size:
                raise UsageError(
                    f"{fqn} has {shape[0]:,} rows, fewer than --vocab-size {self.size:,}."
                )
            view = views.narrow(views.view_of(one.entry), 0, start=0, size=self.size)
            trimmed[fqn] = one._replace(entry=view)
        if not trimmed:
            raise UsageError(
                "--vocab-size: no embedding or output layer was recognized by its name.",
                hint="It knows embed_tokens, tok_embeddings, word_embeddings, wte, lm_head…",
            )
        notes = [
            f"{one.entry.fqn}: kept the first {self.size:,} of {one.entry.shape[0]:,} rows."
            for one in made
            if one.entry.fqn in trimmed and one.entry.shape[0] != self.size
        ]
        out = tuple(trimmed.get(one.entry.fqn, one) for one in made)
        return TransformResult(
            out, tuple(notes) or ("--vocab-size: there is no padding to remove.",)
        )


def untie(made: tuple[TransformedTensor, ...], *_: object) -> TransformResult:
    """Give the output layer, over the same bytes, where the source has only the embedding that it
    is tied to. Raises UsageError when there is no such embedding.
    """
    by_fqn = {one.entry.fqn: one for one in made}
    if _HEAD in by_fqn:
        return TransformResult(made, (f"--untie: {_HEAD} already exists.",))
    if _EMBEDDING not in by_fqn:
        raise UsageError(f"--untie: there is no {_EMBEDDING} that {_HEAD} could equal.")
    note = f"--untie: {_HEAD} is written too, with the values of {_EMBEDDING}."
    return TransformResult((*made, by_fqn[_EMBEDDING].named(_HEAD)), (note,))


@dataclass(frozen=True, slots=True)
class UnderTransform:
    """Puts all names into a container, as a job has them that saves ``{"model": …}``."""

    container: str

    def __call__(self, made: tuple[TransformedTensor, ...], *_: object) -> TransformResult:
        """Put the container before every name and path."""
        name, above = self.container, tuple(self.container.split("."))
        entries = (
            replace(entry, fqn=f"{name}.{entry.fqn}", path=above + entry.path) for entry, _ in made
        )
        moved = zip(made, entries, strict=True)
        return TransformResult(tuple(one._replace(entry=entry) for one, entry in moved))

    def everything(self, index: CheckpointIndex) -> CheckpointIndex:
        """The same checkpoint with all of it in the container, its objects, too."""
        tree: Branch[Entry] = index.entry_tree()
        for part in reversed(self.container.split(".")):
            tree = dict_of({part: tree})
        return index.arranged(tree)


def parse_values(texts: Sequence[str]) -> dict[str, int]:
    """The numbers of ``NAME=N`` by their names; the last of one name counts. Raises UsageError."""
    values = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not number.isdecimal() or not name:
            raise UsageError(f"A value is written NAME=N, not {text!r}.")
        values[name] = int(number)
    return values
