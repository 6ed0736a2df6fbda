"""safetensors files and folders."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tools.core.index import ObjectEntry
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.formats.protocol import Format, PlanOptions, Reader


class _Safetensors(Format):
    """One file, or a folder of shards with an index JSON; it has no containers and no checksums."""

    name = "safetensors"
    label = "safetensors"
    suffixes = (".safetensors",)
    files = ("*.safetensors", "*.safetensors.index.json")
    index_files = (".index.json",)
    writes = "whole"
    strings, guarded = True, False

    def reader(self) -> Reader:
        from ckpt_tools.formats.safetensors import read

        return read

    def plan_files(
        self, targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
    ) -> LazyPlans:
        from ckpt_tools.formats.safetensors import write

        return write.plan_files(targets, options=options)


FORMAT = _Safetensors()
