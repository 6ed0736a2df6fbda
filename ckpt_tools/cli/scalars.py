"""Single numbers out of a checkpoint: the step that a training run was at."""

from __future__ import annotations

import struct

from ckpt_tools.analysis.summary import Step, step_entries
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.errors import CheckpointError, IncompleteError
from ckpt_tools.formats import locate, open_object
from ckpt_tools.storage.reader import Files

# The types that steps have, for struct: numpy would cost a looking command its start.
_STRUCT = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


def read_step(index: CheckpointIndex) -> Step | None:
    """The step that a plain object or a one-element tensor tells, or None.

    An entry that cannot be read tells nothing; what is damaged is the reader's to report.
    """
    with Files() as files:
        for entry in step_entries(index):
            try:
                value = _number(index.select({entry.fqn}), files)
            except CheckpointError:
                continue
            if value is not None:
                return Step(value, entry.fqn)
    return None


def _number(index: CheckpointIndex, files: Files) -> int | None:
    """The only entry of this index as a whole number, or None when it is none."""
    value: object = None
    if index.objects:
        value = open_object(index, index.objects[0], files).value
    else:
        value = read_single(locate(index, files).tensors[0], files)
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return None


def read_single(entry: TensorEntry, files: Files) -> object:
    """The value of a located one-element tensor, read without any mover of tensors.

    Raises IncompleteError when its shard is not there.
    """
    chunk = next((chunk for chunk in entry.chunks if chunk.box.numel == 1), None)
    if chunk is None:
        raise IncompleteError(f"{entry.fqn}: the shard that holds its element is not there.")
    data = files.read(chunk.data.path, chunk.data.offset, entry.dtype.itemsize)
    if entry.dtype.name in _STRUCT:
        return struct.unpack(_STRUCT[entry.dtype.name], data)[0]
    from ckpt_tools.copying.cast import decode  # late: numpy comes with it

    return decode(data, entry.dtype)[0]
