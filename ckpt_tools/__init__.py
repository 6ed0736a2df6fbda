"""Inspect, convert and prove PyTorch FSDP checkpoints.

    import ckpt_tools

    checkpoint = ckpt_tools.open_checkpoint("run7/step-1000")
    rows = checkpoint["model.emb.weight"][0:4, :8]

Each public name is imported when it is first used: importing the package costs nothing.
"""

from __future__ import annotations

import sys

from ckpt_tools._version import __version__ as __version__

TYPE_CHECKING = False  # a type checker takes it for true; typing takes 10 ms to import
# `as` says that a name is public.
if TYPE_CHECKING:
    from ckpt_tools.analysis.inspection import Inspection as Inspection
    from ckpt_tools.api import average as average
    from ckpt_tools.api import diff as diff
    from ckpt_tools.api import diff_headers as diff_headers
    from ckpt_tools.api import export as export
    from ckpt_tools.api import fingerprint as fingerprint
    from ckpt_tools.api import inspect as inspect
    from ckpt_tools.api import latest as latest
    from ckpt_tools.api import reshard as reshard
    from ckpt_tools.api import stats as stats
    from ckpt_tools.api import verify as verify
    from ckpt_tools.api import verify_quick as verify_quick
    from ckpt_tools.checkpoint import Checkpoint as Checkpoint
    from ckpt_tools.checkpoint import load as load
    from ckpt_tools.checkpoint import load_file as load_file
    from ckpt_tools.checkpoint import open as open  # noqa: A004 (as gzip and zarr have it)
    from ckpt_tools.checkpoint import open_checkpoint as open_checkpoint
    from ckpt_tools.checkpoint import safe_open as safe_open
    from ckpt_tools.convert.export import ExportOptions as ExportOptions
    from ckpt_tools.convert.export import ExportPlan as ExportPlan
    from ckpt_tools.convert.reshard import ReshardOptions as ReshardOptions
    from ckpt_tools.convert.reshard import ReshardPlan as ReshardPlan
    from ckpt_tools.convert.write import WriteOptions as WriteOptions
    from ckpt_tools.core.dtypes import DType as DType
    from ckpt_tools.core.dtypes import dtype_named as dtype_named
    from ckpt_tools.core.geometry import Box as Box
    from ckpt_tools.core.index import ByteRange as ByteRange
    from ckpt_tools.core.index import CheckpointIndex as CheckpointIndex
    from ckpt_tools.core.index import Chunk as Chunk
    from ckpt_tools.core.index import ObjectEntry as ObjectEntry
    from ckpt_tools.core.index import TensorEntry as TensorEntry
    from ckpt_tools.core.layout import Layout as Layout
    from ckpt_tools.core.layout import Mesh as Mesh
    from ckpt_tools.core.layout import Replicate as Replicate
    from ckpt_tools.core.layout import Shard as Shard
    from ckpt_tools.core.mesh_spec import parse_mesh as parse_mesh
    from ckpt_tools.core.mesh_spec import parse_placements as parse_placements
    from ckpt_tools.core.plain_values import PickledValue as PickledValue
    from ckpt_tools.errors import AnswerNo as AnswerNo
    from ckpt_tools.errors import CheckpointError as CheckpointError
    from ckpt_tools.errors import CkptError as CkptError
    from ckpt_tools.errors import IncompleteError as IncompleteError
    from ckpt_tools.errors import NoSuchEntry as NoSuchEntry
    from ckpt_tools.errors import OutputExistsError as OutputExistsError
    from ckpt_tools.errors import SourceChangedError as SourceChangedError
    from ckpt_tools.errors import UnreadableError as UnreadableError
    from ckpt_tools.errors import UnsafePickleError as UnsafePickleError
    from ckpt_tools.errors import UnsupportedError as UnsupportedError
    from ckpt_tools.errors import UsageError as UsageError
    from ckpt_tools.errors import WriteError as WriteError
    from ckpt_tools.formats import ReadOptions as ReadOptions
    from ckpt_tools.lazy_tensor import LazyTensor as LazyTensor
    from ckpt_tools.proof.diff import Diff as Diff
    from ckpt_tools.proof.diff_options import DiffOptions as DiffOptions
    from ckpt_tools.proof.fingerprint import Fingerprint as Fingerprint
    from ckpt_tools.proof.stats import Statistics as Statistics
    from ckpt_tools.proof.stats import TensorStats as TensorStats
    from ckpt_tools.proof.verify import VerifyReport as VerifyReport
    from ckpt_tools.storage.waiting import wait_for_stores as wait_for_stores
    from ckpt_tools.transforms.optimizer import ParamNames as ParamNames

# Which module has which of these names; it is imported for the first of them that is used.
_HOMES = {
    "convert.export": "ExportOptions ExportPlan",
    "convert.write": "WriteOptions",
    "core.dtypes": "DType dtype_named",
    "errors": "AnswerNo CheckpointError CkptError IncompleteError NoSuchEntry OutputExistsError"
    " SourceChangedError UnreadableError UnsafePickleError UnsupportedError UsageError WriteError",
    "formats": "ReadOptions",
    "core.geometry": "Box",
    "core.index": "ByteRange CheckpointIndex Chunk ObjectEntry TensorEntry",
    "core.plain_values": "PickledValue",
    "core.layout": "Layout Mesh Replicate Shard",
    "analysis.inspection": "Inspection",
    "api": "average diff diff_headers export fingerprint inspect latest reshard stats verify"
    " verify_quick",
    "checkpoint": "Checkpoint load load_file open open_checkpoint safe_open",
    "lazy_tensor": "LazyTensor",
    "core.mesh_spec": "parse_mesh parse_placements",
    "proof.diff": "Diff",
    "proof.diff_options": "DiffOptions",
    "proof.fingerprint": "Fingerprint",
    "proof.verify": "VerifyReport",
    "storage.waiting": "wait_for_stores",
    "proof.stats": "Statistics TensorStats",
    "convert.reshard": "ReshardOptions ReshardPlan",
    "transforms.optimizer": "ParamNames",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_NAMES = sorted([*_HOME, "__version__"])
if not TYPE_CHECKING:  # a type checker takes what `as` says, and knows no list that is computed
    # `import *` leaves Python's own `open` as it is.
    __all__ = [name for name in _NAMES if name != "open"]


def __getattr__(name: str) -> object:
    """A public name, its module imported now."""
    if name not in _HOME:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    from importlib import import_module

    value: object = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return _NAMES
