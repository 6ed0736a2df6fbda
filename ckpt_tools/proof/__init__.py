"""Proof: is a checkpoint whole, is it the same as another one, and are its values sane?

`verify` and `verify_quick` look for damage, `fingerprint` gives digests that do not depend on
format or sharding, `diff` compares two checkpoints, `stats` looks at values, and `same_tensors` and
`same_objects` prove an output against its source. Nothing here writes a checkpoint; formats are
asked through their protocol. What needs numpy (`stats`, and the values of `diff`) is imported when
it is called.
"""

from __future__ import annotations

from ckpt_tools.core.known_crcs import KnownCrcs
from ckpt_tools.proof.anomalies import Anomaly
from ckpt_tools.proof.check import require_intact, same_objects, same_tensors
from ckpt_tools.proof.compare import Comparison, Difference, compare, with_objects
from ckpt_tools.proof.damage import check_copied, require_undamaged
from ckpt_tools.proof.damage_map import DamagedTensor, Rescue
from ckpt_tools.proof.diff import (
    Diff,
    DiffOptions,
    EntryDiff,
    Naming,
    Rename,
    diff,
    diff_headers,
    parse_rename,
)
from ckpt_tools.proof.fingerprint import Fingerprint, TensorDigest, are_equal, fingerprint
from ckpt_tools.proof.replicas import require_equal_replicas
from ckpt_tools.proof.tolerance import Tolerance
from ckpt_tools.proof.verify import RankState, VerifyReport, bytes_to_read, verify, verify_quick

__all__ = [
    "Anomaly",
    "Comparison",
    "DamagedTensor",
    "Diff",
    "DiffOptions",
    "Difference",
    "EntryDiff",
    "Fingerprint",
    "KnownCrcs",
    "Naming",
    "RankState",
    "Rename",
    "Rescue",
    "TensorDigest",
    "Tolerance",
    "VerifyReport",
    "are_equal",
    "bytes_to_read",
    "check_copied",
    "compare",
    "diff",
    "diff_headers",
    "fingerprint",
    "parse_rename",
    "require_equal_replicas",
    "require_intact",
    "require_undamaged",
    "same_objects",
    "same_tensors",
    "verify",
    "verify_quick",
    "with_objects",
]
