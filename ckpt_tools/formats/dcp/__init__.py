"""Directories of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from ckpt_tools.core.index import CheckpointIndex, ObjectEntry
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.core.state_tree import Branch
from ckpt_tools.formats.protocol import ChecksumPart, Format, Index, PlanOptions, Reader, Writes
from ckpt_tools.storage.reader import Files


class _Dcp(Format):
    """A folder of `.metadata` and `.distcp` files, of which each item is a torch.save archive."""

    name = "dcp"
    label = "DCP directory (torch.distributed.checkpoint)"
    files: ClassVar[tuple[str, ...]] = ("*.distcp", ".metadata", "__*.metadata")
    writes: ClassVar[Writes | None] = "shards"
    object_codec: ClassVar[str | None] = "torch.save"
    codecs: ClassVar[frozenset[str]] = frozenset({"torch.save", "zstd"})
    index_files = (".metadata",)
    counts_ranks = True

    def reader(self) -> Reader:
        from ckpt_tools.formats.dcp import read

        return read

    def locate(self, index: CheckpointIndex, files: Files) -> CheckpointIndex:
        from ckpt_tools.formats.dcp import items

        return items.locate(index, files)

    def open_objects(self, index: Index, files: Files, *, largest: int | None = None) -> Index:
        from ckpt_tools.formats.dcp import objects

        return objects.open_objects(index, files, largest=largest)

    def copyable_objects(self, index: Index, files: Files) -> Index:
        from ckpt_tools.formats.dcp import objects

        return objects.copyable_objects(index, files)

    def object_digests(self, entry: ObjectEntry, files: Files) -> Mapping[str, bytes] | None:
        from ckpt_tools.formats.dcp import objects

        return objects.object_digests(entry, files)

    def rank_of(self, path: str) -> int | None:
        from ckpt_tools.formats.dcp import data_files

        return data_files.rank_of(path)

    def checksummed(self, index: CheckpointIndex, files: Files) -> Iterable[ChecksumPart]:
        from ckpt_tools.formats.dcp import items

        return items.checksummed(index, files)

    def containers(
        self, tree: Branch[str], *, is_tensor: Callable[[str], bool]
    ) -> Branch[str] | None:
        from ckpt_tools.formats.dcp import flattening

        return flattening.as_read(tree, is_tensor=is_tensor)

    def plan_files(
        self, targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
    ) -> LazyPlans:
        from ckpt_tools.formats.dcp import write

        return write.plan_files(targets, objects, options=options)


class _DcpSafetensors(_Dcp):
    """The same with safetensors in its data files, as its reader finds out."""

    name = "dcp-safetensors"
    label = "dcp-safetensors"
    files = ()
    writes = None
    object_codec = None
    codecs = frozenset()

    def matches(self, path: str) -> bool:
        return False

    def containers(self, tree: Branch[str], *, is_tensor: Callable[[str], bool]) -> None:
        return None


FORMAT = _Dcp()
SAFETENSORS = _DcpSafetensors()
