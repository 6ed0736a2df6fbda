"""What `inspect` says of a checkpoint, with what it reads beyond headers: the step, and the date of
its files.
"""

from __future__ import annotations

import struct

from ckpt_tools.analysis import summary
from ckpt_tools.analysis.inspection import Inspection, inspect
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry
from ckpt_tools.errors import IncompleteError
from ckpt_tools.formats import locate, open_object
from ckpt_tools.storage.paths import is_address, last_written
from ckpt_tools.storage.reader import Files

# Formats of struct for the types that steps have: importing numpy would take longer than all else.
_STRUCT = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def look(whole: CheckpointIndex, chosen: CheckpointIndex | None = None) -> Inspection:
    """What is known of a checkpoint; sections and placements are those of the chosen entries."""
    with Files() as files:

        def read(entry: Entry) -> object:
            """A plain object or the one element of a tensor, without numpy where possible."""
            if isinstance(entry, ObjectEntry):
                return open_object(whole, entry, files).value
            (located,) = locate(whole.select({entry.fqn}), files).tensors
            chunk = next((chunk for chunk in located.chunks if chunk.box.numel == 1), None)
            if chunk is None:
                raise IncompleteError(f"{entry.fqn}: the shard of its element does not exist.")
            data = files.read(chunk.data.path, chunk.data.offset, located.dtype.itemsize)
            if located.dtype.name in _STRUCT:
                return struct.unpack(_STRUCT[located.dtype.name], data)[0]
            from ckpt_tools.copying.cast import decode  # late: numpy comes with it

            return decode(data, located.dtype)[0]

        # Not from a store: this would be requests beyond the headers. `show --raw` reads a step.
        step = None if is_address(whole.root) else summary.step_of(whole, read)
    there = (file.path for file in whole.files if file.length is not None)
    return inspect(whole, chosen, step=step, saved=last_written(there))
