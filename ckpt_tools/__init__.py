"""Inspect, convert and prove PyTorch FSDP checkpoints.

    import ckpt_tools

    checkpoint = ckpt_tools.open_checkpoint("run7/step-1000")
    rows = checkpoint.read("model.emb.weight", ckpt_tools.Box((0, 0), (8, 64)))

Every public name is listed here, and each is imported when it is first used: importing the package
costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.api import (
        Checkpoint,
        diff,
        diff_headers,
        export,
        fingerprint,
        open_checkpoint,
        reshard,
        stats,
        verify,
        verify_quick,
    )
    from ckpt_tools.convert import ExportOptions, ExportPlan, WriteOptions
    from ckpt_tools.dtypes import DType, dtype_named
    from ckpt_tools.errors import (
        AnswerNo,
        CheckpointError,
        CkptError,
        IncompleteError,
        OutputExistsError,
        UnreadableError,
        UnsafePickleError,
        UnsupportedError,
        UsageError,
        WriteError,
    )
    from ckpt_tools.formats import ReadOptions
    from ckpt_tools.geometry import Box
    from ckpt_tools.index import ByteRange, CheckpointIndex, Chunk, ObjectEntry, TensorEntry
    from ckpt_tools.layout import Layout, Mesh, Replicate, Shard
    from ckpt_tools.mesh_spec import parse_mesh, parse_placements
    from ckpt_tools.proof import Diff, DiffOptions, Fingerprint, Naming, Report, Tolerance
    from ckpt_tools.proof.stats import Statistics, TensorStats
    from ckpt_tools.resharding import ReshardOptions, ReshardPlan

__version__ = "0.1.0"

__all__ = [
    "AnswerNo",
    "Box",
    "ByteRange",
    "Checkpoint",
    "CheckpointError",
    "CheckpointIndex",
    "Chunk",
    "CkptError",
    "DType",
    "Diff",
    "DiffOptions",
    "ExportOptions",
    "ExportPlan",
    "Fingerprint",
    "IncompleteError",
    "Layout",
    "Mesh",
    "Naming",
    "ObjectEntry",
    "OutputExistsError",
    "ReadOptions",
    "Replicate",
    "Report",
    "ReshardOptions",
    "ReshardPlan",
    "Shard",
    "Statistics",
    "TensorEntry",
    "TensorStats",
    "Tolerance",
    "UnreadableError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "WriteError",
    "WriteOptions",
    "__version__",
    "diff",
    "diff_headers",
    "dtype_named",
    "export",
    "fingerprint",
    "open_checkpoint",
    "parse_mesh",
    "parse_placements",
    "reshard",
    "stats",
    "verify",
    "verify_quick",
]

# Which module has which of the names above.
_HOMES = {
    "convert": "ExportOptions ExportPlan WriteOptions",
    "dtypes": "DType dtype_named",
    "errors": "AnswerNo CheckpointError CkptError IncompleteError OutputExistsError UnreadableError"
    " UnsafePickleError UnsupportedError UsageError WriteError",
    "formats": "ReadOptions",
    "geometry": "Box",
    "index": "ByteRange CheckpointIndex Chunk ObjectEntry TensorEntry",
    "layout": "Layout Mesh Replicate Shard",
    "api": "Checkpoint diff diff_headers export fingerprint open_checkpoint reshard stats"
    " verify verify_quick",
    "mesh_spec": "parse_mesh parse_placements",
    "proof": "Diff DiffOptions Fingerprint Naming Report Tolerance",
    "proof.stats": "Statistics TensorStats",
    "resharding": "ReshardOptions ReshardPlan",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """A public name, its module imported now."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names."""
    return __all__
