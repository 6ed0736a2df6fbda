"""Planners for torch's distributed checkpoint that keep names, paths and objects as they are.

Imported by the engine `dcp` alone: torch comes with it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping

from torch.distributed.checkpoint.default_planner import (  # noqa: TID253 - only that engine
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: TID253
from torch.distributed.checkpoint.metadata import StorageMeta  # noqa: TID253
from torch.distributed.checkpoint.planner import (  # noqa: TID253
    ReadItem,
    WriteItem,
    WriteItemType,
)

from ckpt_tools.core.index import Path


class LoadPlanner(DefaultLoadPlanner):
    """Loads a flat state dict, objects as bytes: to unpickle one could run anything."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep the bytes of an object."""
        self.state_dict[read_item.dest_index.fqn] = value.getvalue()


class SavePlanner(DefaultSavePlanner):
    """Saves a flat state dict under the nested paths that its names had in the source."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.mappings = dict(paths)

    def set_up_planner(
        self,
        state_dict: dict[str, object],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    ) -> None:
        """Take the state dict as it is: it is flat, and a list in it is one object."""
        self.flatten_state_dict = False
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.flatten_state_dict = True  # from here on only: put the paths into the metadata

    def transform_object(self, write_item: WriteItem, object: object) -> object:  # noqa: A002 - torch's
        """The bytes of an object, as they were loaded."""
        if write_item.type == WriteItemType.BYTE_IO and isinstance(object, bytes):
            return io.BytesIO(object)
        return super().transform_object(write_item, object)


class Writer(FileSystemWriter):
    """Writes no path and no random number, so that equal inputs give equal files."""

    def storage_meta(self) -> StorageMeta | None:
        """What torch would put its folder and a random id into."""
        return StorageMeta()
