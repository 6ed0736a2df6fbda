"""Checkpoints of any format: `find` reads the index at a path, and `registry` knows the formats and
what can be asked of an index.
"""

from ckpt_tools.formats.find import (
    checkpoints_in,
    is_checkpoint,
    of_step,
    read_index,
    read_written,
    run_of,
    steps_in,
)
from ckpt_tools.formats.protocol import PlanOptions, ReadOptions, Writes
from ckpt_tools.formats.registry import (
    FORMATS,
    SMALL_OBJECT,
    checkpoint_files,
    checksummed,
    copyable_objects,
    detect,
    fetched_bytes,
    index_files,
    locate,
    locate_later,
    located_in,
    named,
    object_digests,
    open_object,
    open_objects,
    rank_of,
    targets,
    to_locate_in,
)
from ckpt_tools.formats.runs import Saved

__all__ = [
    "FORMATS",
    "SMALL_OBJECT",
    "PlanOptions",
    "ReadOptions",
    "Saved",
    "Writes",
    "checkpoint_files",
    "checkpoints_in",
    "checksummed",
    "copyable_objects",
    "detect",
    "fetched_bytes",
    "index_files",
    "is_checkpoint",
    "locate",
    "locate_later",
    "located_in",
    "named",
    "object_digests",
    "of_step",
    "open_object",
    "open_objects",
    "rank_of",
    "read_index",
    "read_written",
    "run_of",
    "steps_in",
    "targets",
    "to_locate_in",
]
