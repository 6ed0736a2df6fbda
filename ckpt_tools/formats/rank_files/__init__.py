"""Per-rank files of DTensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import escape

from ckpt_tools.core.index import CheckpointIndex, ObjectEntry
from ckpt_tools.core.plan import LazyPlans, Target
from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.protocol import PlanOptions, Reader, ReadOptions
from ckpt_tools.formats.torch_file import TorchSave


class _RankFiles(TorchSave):
    """A folder with one torch.save file of DTensors for each rank."""

    name = "ranks"
    label = "per-rank torch.save files of DTensors"
    files = ("*rank_*.pt",)
    writes = "shards"

    def reader(self) -> Reader:
        from ckpt_tools.formats.rank_files import read

        return read

    def rank_of(self, path: str) -> int | None:
        from ckpt_tools.formats.rank_files import file_names

        named = file_names.parse(path)
        return None if named is None else named.rank

    def loader(self, index: CheckpointIndex, *, asked: str | None) -> tuple[str, str]:
        from importlib.metadata import PackageNotFoundError, version

        from ckpt_tools.formats.torch_file import generations

        try:
            installed = version("torch")
        except PackageNotFoundError:
            installed = None
        known = (
            (asked, "as --torch-version says"),
            (index.torch_version, "which wrote the source"),
            (installed, "which is installed here"),
            (str(generations.NEWEST), "the newest known (no torch is installed here)"),
        )
        chosen, why = next((text, why) for text, why in known if text is not None)
        row = generations.generation_of(generations.parse_version(chosen), why=f", {why}")
        return chosen, f"The rank files are for torch {row}, {why}; --torch-version names another."

    def plan_files(
        self, targets: Sequence[Target], objects: Sequence[ObjectEntry], *, options: PlanOptions
    ) -> LazyPlans:
        from ckpt_tools.formats.rank_files import write

        return write.plan_files(targets, objects, options=options)


def globs_of(paths: Sequence[str]) -> list[str]:
    """Globs of rank files that lie in a folder of their own each (``rank0/model.pt`` …); none where
    these are no rank files.
    """
    from ckpt_tools.formats.rank_files import file_names, numbered

    if not all(path.endswith(file_names.SUFFIXES) for path in paths):
        return []
    try:
        families = numbered.families(paths, ReadOptions())
    except CheckpointError:
        return []
    globs = []
    for family in families:
        place, pattern = family[0].path.split(os.sep), family[0].pattern
        above = os.sep.join(place[: -1 - pattern.count(os.sep)])
        globs.append(os.path.join(escape(above), pattern))
    return globs


FORMAT = _RankFiles()
