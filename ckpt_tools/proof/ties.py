"""Whether tensors that are said to be tied hold the same values.

One storage behind two names is proof enough; otherwise their bytes are read and digested.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools import formats
from ckpt_tools.core.index import CheckpointIndex, LocatedIndex, TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.proof.fingerprint import digest_of
from ckpt_tools.storage.reader import Files


def are_equal(index: CheckpointIndex, fqns: Sequence[str], files: Files) -> bool:
    """Whether these tensors have one type, one shape and, bit for bit, the same values.

    Raises UsageError for a name that is not there, and what keeps a tensor from being whole.
    """
    chosen = formats.locate(index.select(set(fqns)), files)
    chosen.require_whole()
    entries = [_entry(chosen, fqn) for fqn in fqns]
    if len({(entry.dtype, entry.shape) for entry in entries}) > 1:
        return False
    if len({tuple(entry.chunks) for entry in entries}) == 1:
        return True
    return len({digest_of(entry, files) for entry in entries}) == 1


def _entry(index: LocatedIndex, fqn: str) -> TensorEntry:
    entry = index.tensor(fqn)
    if entry is None:
        raise UsageError(f"{index.root} has no tensor {fqn!r}.")
    return entry
