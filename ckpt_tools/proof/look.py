"""What `inspect` says of a checkpoint, with what it reads beyond headers: the step, and the date of
its files.
"""

from __future__ import annotations

import struct

from ckpt_tools.analysis import summary
from ckpt_tools.analysis.inspection import Inspection, inspect
from ckpt_tools.core.index import CheckpointIndex, Entry, ObjectEntry, TensorEntry
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
            if isinstance(entry, ObjectEntry):
                return open_object(whole, entry, files).value
            return _element(locate(whole.select({entry.fqn}), files).tensors[0], files)

        # Not from a store: this would be requests beyond the headers. `show --raw` reads a step.
        step = None if is_address(whole.root) else summary.step_of(whole, read)
    there = (file.path for file in whole.files if file.length is not None)
    return inspect(whole, chosen, step=step, saved=last_written(there))


def _element(entry: TensorEntry, files: Files) -> object:
    """The value of a located one-element tensor, read without importing numpy where possible.

    Raises IncompleteError when its shard does not exist.
    """
    chunk = next((chunk for chunk in entry.chunks if chunk.box.numel == 1), None)
    if chunk is None:
        raise IncompleteError(f"{entry.fqn}: the shard that holds its element does not exist.")
    data = files.read(chunk.data.path, chunk.data.offset, entry.dtype.itemsize)
    if entry.dtype.name in _STRUCT:
        return struct.unpack(_STRUCT[entry.dtype.name], data)[0]
    from ckpt_tools.copying.cast import decode  # late: numpy comes with it

    return decode(data, entry.dtype)[0]
