"""Checkpoints of any format: `find` reads the index at a path, and `registry` knows the formats and
what can be asked of an index.
"""

from __future__ import annotations

from ckpt_tools.formats.find import Saved as Saved
from ckpt_tools.formats.find import checkpoints_in as checkpoints_in
from ckpt_tools.formats.find import is_checkpoint as is_checkpoint
from ckpt_tools.formats.find import of_step as of_step
from ckpt_tools.formats.find import read_index as read_index
from ckpt_tools.formats.find import read_written as read_written
from ckpt_tools.formats.find import run_of as run_of
from ckpt_tools.formats.find import steps_in as steps_in
from ckpt_tools.formats.protocol import PlanOptions as PlanOptions
from ckpt_tools.formats.protocol import ReadOptions as ReadOptions
from ckpt_tools.formats.protocol import Writes as Writes
from ckpt_tools.formats.registry import FORMATS as FORMATS
from ckpt_tools.formats.registry import SMALL_OBJECT as SMALL_OBJECT
from ckpt_tools.formats.registry import checkpoint_files as checkpoint_files
from ckpt_tools.formats.registry import checksummed as checksummed
from ckpt_tools.formats.registry import copyable_objects as copyable_objects
from ckpt_tools.formats.registry import detect as detect
from ckpt_tools.formats.registry import fetched_bytes as fetched_bytes
from ckpt_tools.formats.registry import index_files as index_files
from ckpt_tools.formats.registry import locate as locate
from ckpt_tools.formats.registry import locate_later as locate_later
from ckpt_tools.formats.registry import located_in as located_in
from ckpt_tools.formats.registry import named as named
from ckpt_tools.formats.registry import object_digests as object_digests
from ckpt_tools.formats.registry import open_object as open_object
from ckpt_tools.formats.registry import open_objects as open_objects
from ckpt_tools.formats.registry import rank_of as rank_of
from ckpt_tools.formats.registry import targets as targets
from ckpt_tools.formats.registry import to_locate_in as to_locate_in
