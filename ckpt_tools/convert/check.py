"""--check: read an output back before it is given its name, and write down what was proven.

The words of the proof go where the format keeps such things: into a field of fixed length in the
headers of safetensors files, laid out for it when the export was planned, and into a small JSON
file beside the shards of a training checkpoint. One torch.save file has no place for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import replace

from ckpt_tools import formats, proof
from ckpt_tools._version import __version__
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.plan import Target
from ckpt_tools.storage.reader import Files

PROOF_FIELD = "proof"
PROOF_FILE = "ckpt_tools_proof.json"
# Room for the words, in bytes of the header; what they do not fill stays blank.
_ROOM = 400
UNPROVEN = "-" * _ROOM


def check(
    folder: str,
    targets: Sequence[Target],
    *,
    source: CheckpointIndex,
    threads: int,
    own: Collection[str] | None = None,
) -> str:
    """Compare what lies in ``folder`` with what was to be written; says in one line what is proven.

    ``targets`` are the tensors as they were planned, ``own`` the source's files that this process
    can read, when that is not all of them: the rest is for others to compare. Raises WriteError
    when one of them differs.
    """
    entries = tuple(sorted((target.entry for target in targets), key=lambda e: e.fqn))
    named = {target.entry.fqn: target.fqn for target in targets}
    result = formats.read_index(folder)
    with Files() as files:
        return proof.same_tensors(
            replace(source, tensors=entries, objects=(), problems=()),
            result,
            files,
            renamed=named,
            dtypes={target.entry.fqn: target.dtype for target in targets},
            threads=threads,
            own=own,
        )


def record_in_headers(folder: str, words: str) -> None:
    """Write the words into the field that every safetensors header of the folder keeps for them."""
    told = words.encode("ascii", "replace")[:_ROOM].replace(b'"', b"'").replace(b"\\", b"/")
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            _fill(os.path.join(folder, name), told.ljust(_ROOM))


def _fill(path: str, words: bytes) -> None:
    with open(path, "r+b") as file:
        head = file.read(8 + int.from_bytes(file.read(8), "little"))
        place = head.find(UNPROVEN.encode())
        if place >= 0:
            file.seek(8 + place)
            file.write(words)


def record_beside(folder: str, words: str, *, source: CheckpointIndex) -> None:
    """Write the words into a JSON file in the folder."""
    told = {
        "schema": "ckpt-tools/proof/1",
        "ckpt_tools": __version__,
        "source_format": source.format,
        "source_world_size": source.world_size,
        "proof": words,
    }
    with open(os.path.join(folder, PROOF_FILE), "w", encoding="utf-8") as file:
        file.write(json.dumps(told, indent=2) + "\n")
