"""Inspect, convert and prove PyTorch FSDP checkpoints.

    import ckpt_tools

    checkpoint = ckpt_tools.open_checkpoint("run7/step-1000")
    rows = checkpoint["model.emb.weight"][0:4, :8]

Every public name is listed here, and each is imported when it is first used: importing the package
costs nothing.
"""

from __future__ import annotations

from ckpt_tools._version import __version__

TYPE_CHECKING = False  # a type checker takes it for true; typing takes 10 ms to import
if TYPE_CHECKING:
    from ckpt_tools.analysis.inspection import Inspection
    from ckpt_tools.api import (
        Checkpoint,
        LazyTensor,
        NoSuchEntry,
        diff,
        diff_headers,
        export,
        fingerprint,
        inspect,
        open_checkpoint,
        reshard,
        stats,
        verify,
        verify_quick,
    )
    from ckpt_tools.convert.export import ExportOptions, ExportPlan
    from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan
    from ckpt_tools.convert.write import WriteOptions
    from ckpt_tools.core.dtypes import DType, dtype_named
    from ckpt_tools.core.geometry import Box
    from ckpt_tools.core.index import ByteRange, CheckpointIndex, Chunk, ObjectEntry, TensorEntry
    from ckpt_tools.core.layout import Layout, Mesh, Replicate, Shard
    from ckpt_tools.core.mesh_spec import parse_mesh, parse_placements
    from ckpt_tools.core.plain_values import PickledValue
    from ckpt_tools.errors import (
        AnswerNo,
        CheckpointError,
        CkptError,
        IncompleteError,
        OutputExistsError,
        SourceChangedError,
        UnreadableError,
        UnsafePickleError,
        UnsupportedError,
        UsageError,
        WriteError,
    )
    from ckpt_tools.formats import ReadOptions
    from ckpt_tools.proof.diff import Diff, DiffOptions, Naming
    from ckpt_tools.proof.fingerprint import Fingerprint
    from ckpt_tools.proof.stats import Statistics, TensorStats
    from ckpt_tools.proof.tolerance import Tolerance
    from ckpt_tools.proof.verify import VerifyReport

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
    "Inspection",
    "Layout",
    "LazyTensor",
    "Mesh",
    "Naming",
    "NoSuchEntry",
    "ObjectEntry",
    "OutputExistsError",
    "PickledValue",
    "ReadOptions",
    "Replicate",
    "ReshardOptions",
    "ReshardPlan",
    "Shard",
    "SourceChangedError",
    "Statistics",
    "TensorEntry",
    "TensorStats",
    "Tolerance",
    "UnreadableError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "VerifyReport",
    "WriteError",
    "WriteOptions",
    "__version__",
    "diff",
    "diff_headers",
    "dtype_named",
    "export",
    "fingerprint",
    "inspect",
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
    "convert.export": "ExportOptions ExportPlan",
    "convert.write": "WriteOptions",
    "core.dtypes": "DType dtype_named",
    "errors": "AnswerNo CheckpointError CkptError IncompleteError OutputExistsError"
    " SourceChangedError UnreadableError UnsafePickleError UnsupportedError UsageError WriteError",
    "formats": "ReadOptions",
    "core.geometry": "Box",
    "core.index": "ByteRange CheckpointIndex Chunk ObjectEntry TensorEntry",
    "core.plain_values": "PickledValue",
    "core.layout": "Layout Mesh Replicate Shard",
    "analysis.inspection": "Inspection",
    "api": "Checkpoint LazyTensor NoSuchEntry diff diff_headers export fingerprint inspect"
    " open_checkpoint reshard stats verify verify_quick",
    "core.mesh_spec": "parse_mesh parse_placements",
    "proof.diff": "Diff DiffOptions Naming",
    "proof.fingerprint": "Fingerprint",
    "proof.tolerance": "Tolerance",
    "proof.verify": "VerifyReport",
    "proof.stats": "Statistics TensorStats",
    "convert.reshard": "ReshardOptions ReshardPlan",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """A public name, its module imported now."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
