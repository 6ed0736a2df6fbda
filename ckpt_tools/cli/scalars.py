"""Single numbers out of a checkpoint: the step that a training run was at."""

from __future__ import annotations

from ckpt_tools.analysis.summary import Step, step_entries
from ckpt_tools.cli.decode import decode
from ckpt_tools.core.index import CheckpointIndex, TensorEntry
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats import locate, open_objects
from ckpt_tools.storage.reader import Files


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
        value = open_objects(index, files).objects[0].value
    else:
        value = read_single(locate(index, files).tensors[0], files)
    if type(value) is int or (isinstance(value, float) and value.is_integer()):
        return int(value)
    return None


def read_single(entry: TensorEntry, files: Files) -> object:
    """The value of a located one-element tensor, read without any mover of tensors."""
    chunk = next(chunk for chunk in entry.chunks if chunk.box.numel == 1)
    data = files.read(chunk.data.path, chunk.data.offset, entry.dtype.itemsize)
    return decode(data, entry.dtype)[0]
