"""What `reshard` says on stdout: one line when it is done, a forecast before, or JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckpt_tools.cli import render
from ckpt_tools.convert import forecast
from ckpt_tools.convert.reshard import ReshardPlan
from ckpt_tools.copying import atomic_output
from ckpt_tools.core.mesh_spec import default_placements
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.engines import Request
from ckpt_tools.distributed.job import Job, made_at

_HEADER = ("FILE", "BYTES", "BOXES", "READ", "FROM")
_MOST_FILES = 16


class Report(NamedTuple):
    """What was asked for; a plan says the rest."""

    request: Request
    job: Job

    def summary(self, plan: ReshardPlan, *, seconds: float) -> str:
        """One line: what was written."""
        rate = f", {format_size(int(plan.nbytes / seconds))}/s" if seconds >= 1 else ""
        return f"{self._what(plan)}, in {seconds:.1f} s{rate}"

    def _what(self, plan: ReshardPlan) -> str:
        tensors = counted(len(plan.targets), "tensor")
        files = counted(len(plan.files), "file")
        out = render.printable(self.job.out)
        return f"{out}: {tensors}, {format_size(plan.nbytes)} in {files} for mesh {plan.mesh}"

    def rehearsal(self, plan: ReshardPlan) -> Iterator[str]:
        """What will be read, written and held in memory, in all and for each file."""
        found = forecast.of(plan)
        files, sources = found.files, counted(found.sources, "file")
        free = atomic_output.free_space(made_at(self.job.out))
        yield f"{self._what(plan)}; not written (--dry-run)"
        yield from render.facts(
            (
                ("Mesh", f"{plan.mesh} ({counted(plan.mesh.size, 'rank')}): {self._placements()}"),
                ("Engine", f"{self.request.engine}, {self._processes()}"),
                ("Reads", f"{format_size(sum(f.read for f in files))} from {sources}"),
                ("Writes", format_size(plan.nbytes)),
                ("Memory", f"about {format_size(self._memory(plan, found))} a process"),
                ("Free", f"{format_size(free)} where OUT will be made"),
            )
        )
        yield from _files(files)

    def _placements(self) -> str:
        options = self.job.options
        placements = options.placements or default_placements(options.mesh)
        return ", ".join(map(str, placements))

    def _processes(self) -> str:
        threads = counted(self.job.write.threads, "thread")
        here = environment.place()
        if here is not None:
            return f"{counted(here.world_size, 'rank')} with {threads} each"
        if self.request.workers > 1:
            return f"{self.request.workers} workers with {threads} each"
        return f"one process with {threads}"

    def _memory(self, plan: ReshardPlan, found: forecast.Forecast) -> int:
        buffers = self.job.write.max_memory // self.request.workers
        engine = self.request.engine
        return forecast.peak_memory(plan, found.held, engine=engine, buffers=buffers)

    def json(self, plan: ReshardPlan, *, dry_run: bool) -> render.Json:
        """All of it as one JSON object."""
        names = plan.mesh.dim_names
        found = forecast.of(plan)
        return {
            "schema": "ckpt-tools/reshard/1",
            "output": self.job.out,
            "written": not dry_run,
            "engine": self.request.engine,
            "format": self.job.options.format,
            "mesh": {
                "shape": list(plan.mesh.shape),
                "dim_names": None if names is None else list(names),
                "placements": self._placements(),
            },
            "tensors": len(plan.targets),
            "nbytes": plan.nbytes,
            "peak_memory": self._memory(plan, found),
            "files": [
                {
                    "path": file.path,
                    "nbytes": file.nbytes,
                    "boxes": file.boxes,
                    "read": file.read,
                    "sources": file.sources,
                }
                for file in found.files
            ],
            "notes": list(plan.notes),
        }


def _files(files: Sequence[forecast.FileForecast]) -> Iterator[str]:
    """A line for each file, or for many the least, the middle and the most of them."""
    yield ""
    shown = list(files)
    if len(files) > _MOST_FILES:
        by_size = sorted(files, key=lambda file: (file.nbytes, file.path))
        shown = [by_size[0], by_size[len(files) // 2], by_size[-1]]
        yield f"The smallest, the middle and the largest of {len(files):,} files (--json has all):"
    yield from render.columns(
        _HEADER,
        [
            (
                render.printable(file.path),
                format_size(file.nbytes),
                f"{file.boxes:,}",
                format_size(file.read),
                counted(file.sources, "file"),
            )
            for file in shown
        ],
        align="lrrrr",
        width=render.terminal_width(),
    )
