"""One torch.save file, and a folder of numbered ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from ckpt_tools.core.index import CheckpointIndex, ObjectEntry
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.formats.protocol import ChecksumPart, Format, PlanOptions, Reader, Writes
from ckpt_tools.storage.reader import Files


class TorchSave(Format):
    """What all formats of torch.save files have in common."""

    nested = True

    def locate(self, index: CheckpointIndex, files: Files) -> CheckpointIndex:
        from ckpt_tools.formats.torch_file import locate

        return locate.locate(index, files)

    def checksummed(self, index: CheckpointIndex, files: Files) -> Iterable[ChecksumPart]:
        from ckpt_tools.formats.zip import archives

        return archives.parts_of_files(index, files)


class _TorchFile(TorchSave):
    """A state dict of whole tensors in one file."""

    name = "torch"
    label = "one torch.save state dict"
    suffixes = (".pt", ".pth", ".bin", ".ckpt")
    index_files = (".index.json",)
    files: ClassVar[tuple[str, ...]] = ("pytorch_model*.bin", "pytorch_model*.bin.index.json")
    writes: ClassVar[Writes | None] = "whole"

    def reader(self) -> Reader:
        from ckpt_tools.formats.torch_file import read

        return read

    def plan_files(
        self, targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
    ) -> LazyPlans:
        from ckpt_tools.formats.torch_file import write

        return write.plan_files(targets, objects, options=options)


class _TorchFolder(_TorchFile):
    """The same in numbered .bin files with an index JSON."""

    files = ()
    writes = None

    def reader(self) -> Reader:
        from ckpt_tools.formats.torch_file import folder

        return folder


FORMAT = _TorchFile()
FOLDER = _TorchFolder()
