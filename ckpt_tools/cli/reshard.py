"""`ckpt-tools reshard`: shards for training on another mesh.

The command, and what it says on stdout: a summary, the forecast of --dry-run, or JSON.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from ckpt_tools import formats
from ckpt_tools.cli import asked, options, progress, render, shaping
from ckpt_tools.cli.group import answer, say
from ckpt_tools.convert import forecast
from ckpt_tools.convert.reshard import ReshardPlan
from ckpt_tools.copying import atomic_output
from ckpt_tools.copying.parallel import choose_threads
from ckpt_tools.core.mesh_spec import default_placements, described
from ckpt_tools.core.progress import Listener
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.engines import dry_run, reshard_by
from ckpt_tools.distributed.job import ENGINES, Engine, Job, check_room, made_at
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.frameworks import LAYOUTS, FrameworkLayout

_HELP = """Write a checkpoint as the shards of another mesh, for a training job to load.

--to-mesh 32 is FSDP, one mesh dimension that shards; 4x8 is HSDP, 4 replicas of 8 shards. For
anything else name the dimensions (dp_replicate=4,dp_shard=8) and use --placements, --place or
--like: how tensor parallelism shards a tensor is never guessed. The number of processes is
independent of the mesh: one process can write 4x8, and the bytes are always the same.

Engines: copy copies byte ranges and needs no torch. dcp loads and saves with torch's own DCP, under
torchrun with as many ranks as the target mesh. gather is for rank files on node-local disks, under
torchrun with as many ranks as the source mesh. Only copy supports --resume.

""" + options.examples(
    "ckpt-tools reshard run7/step-1000 -o run7-4x8 --to-mesh 4x8",
    "ckpt-tools reshard run7/step-1000 -o run7-tp --to-mesh dp=4,tp=2 --place '*.wq.*=S(0),S(0)'",
    "ckpt-tools reshard run7/step-1000 -o run7-16 --to-mesh 16 --only model -j 8",
    "ckpt-tools reshard run7/step-1000 -o run7-16 --to-mesh 16 --dry-run",
    "ckpt-tools reshard Llama-3.1-8B -o seed --to-mesh 64 --map hf-to-torchtitan-llama3",
    "torchrun --nproc-per-node 8 -m ckpt_tools reshard run7/step-1000 -o run7-16 --to-mesh 16",
)

_PARAMS = [
    options.checkpoint(),
    options.output(),
    click.Option(
        ["--to-mesh"],
        metavar="MESH",
        required=True,
        help="The target mesh: 32, 4x8, or with names: dp_replicate=4,dp_shard=8.",
    ),
    click.Option(
        ["--placements"], metavar="LIST", help="One placement for each mesh dimension: 'R,S(0)'."
    ),
    click.Option(
        ["--place"],
        metavar="GLOB=LIST",
        multiple=True,
        help="Placements for names that match. Repeatable; the last match wins.",
    ),
    click.Option(
        ["--like"],
        metavar="CKPT",
        help="Place tensors as in this other checkpoint of the mesh.",
    ),
    click.Option(
        ["--format", "form"],
        type=click.Choice([one.name for one in formats.targets("shards")]),
        default="dcp",
        show_default=True,
        help="A DCP directory, or one torch file of DTensors for each rank.",
    ),
    click.Option(
        ["--layout"],
        type=click.Choice(LAYOUTS),
        help="Write the folders, containers and extra files that this framework's loader expects.",
    ),
    click.Option(
        ["--param-names"],
        metavar="FILE",
        help="Names for a numbered optimizer state: a text file, one name per line, in the "
        "optimizer's order; a checkpoint with names; or 'stored', those in its own param_groups.",
    ),
    options.keep_rank_states(),
    click.Option(
        ["--device-type"],
        metavar="TYPE",
        default="cuda",
        show_default=True,
        help="Device type of the mesh in --format ranks.",
    ),
    click.Option(
        ["--torch-version"],
        metavar="VERSION",
        show_default="that of rank files that are the source, else the installed one, else the "
        "newest known",
        help="The torch of the job that will load --format ranks, such as 2.13. Each reads only "
        "its own rank files.",
    ),
    click.Option(
        ["--engine"],
        type=click.Choice(ENGINES),
        default="copy",
        show_default=True,
        help="What copies the tensors.",
    ),
    options.dtype(),
    *shaping.for_reshard(),
    *options.writing(),
    options.as_json(),
    *options.filters(),
    *options.reading(),
    *options.talk(),
]


@click.command("reshard", cls=options.Command, help=_HELP, params=_PARAMS)
def command(
    *,
    ckpt: str,
    out: str,
    to_mesh: str,
    form: str,
    layout: FrameworkLayout | None,
    param_names: str | None,
    engine: Engine,
    jobs: int,
    dry_run: bool,
    json: bool,
    **_shared: object,
) -> None:
    """Plan and write the output, then say on stdout what it is."""
    environment.refuse_lone_task()
    wanted = asked.reshard(form=_format(form, layout))
    if engine != "copy" and (layout is not None or param_names is not None):
        raise UsageError(
            f"--engine {engine} keeps all names and containers, so it takes neither --layout nor "
            "--param-names.",
            hint="--engine copy takes both.",
        )
    if dry_run and engine != "gather" and environment.is_follower():
        return  # rank 0 plans alone; to gather, each knows its own file only
    mesh = wanted.mesh
    words = f"{to_mesh} = {described(mesh, wanted.placements or default_placements(mesh))}"
    say(words)
    job = Job(
        ckpt,
        out,
        wanted,
        asked.writing(),
        engine,
        jobs,
        asked.reading(shaping.cuts()),
        asked.texts(),
    )
    (_dry_run if dry_run else _write)(job, said=words, as_json=json)


def _dry_run(job: Job, *, said: str, as_json: bool) -> None:
    """Say what would be done."""
    plan = dry_run(job)
    _say_notes(plan, said)
    report = PlanReport(job)
    if as_json:
        render.emit_json(report.json(plan, dry_run=True))
    else:
        render.emit(report.dry_run(plan))
    check_room(job.out, plan.files)


def _write(job: Job, *, said: str, as_json: bool) -> None:
    """Do it, then say on stdout what was done."""
    started = time.monotonic()
    with progress.byte_bar(label="reshard") as bar:
        plan = reshard_by(job._replace(listener=Listener(bar, bar.expect, say)))
    if environment.is_follower():
        return  # rank 0 speaks
    _say_notes(plan, said)
    report = PlanReport(job)
    if as_json:
        render.emit_json(report.json(plan, dry_run=False))
    else:
        answer(report.summary(plan, seconds=time.monotonic() - started))


def _say_notes(plan: ReshardPlan, said: str) -> None:
    for note in plan.notes:
        if note not in said:
            say(note)


def _format(form: str, layout: FrameworkLayout | None) -> str:
    """The format that a framework's loader reads. Raises UsageError where that is not ``form``."""
    if layout == "verl":
        return "ranks"
    if form == "ranks" and layout not in (None, "plain", "accelerate"):
        raise UsageError(f"--layout {layout} is of DCP directories; it has no --format ranks.")
    return form


_HEADER = ("FILE", "BYTES", "BOXES", "READ", "FROM")
_MOST_FILES = 16


class PlanReport(NamedTuple):
    """What is said of a plan; ``job`` is what was asked for."""

    job: Job

    def summary(self, plan: ReshardPlan, *, seconds: float) -> str:
        """One line: what was written."""
        rate = f", {format_size(int(plan.nbytes / seconds))}/s" if seconds >= 1 else ""
        return f"{self._what(plan)}, in {seconds:.1f} s{rate}"

    def _what(self, plan: ReshardPlan) -> str:
        tensors = counted(plan.tensors, "tensor")
        files = counted(len(plan.files), "file")
        size = format_size(plan.nbytes)
        return f"{self.job.out}: {tensors}, {size} in {files} for mesh {plan.mesh}"

    def dry_run(self, plan: ReshardPlan) -> Iterator[str]:
        """What will be read, written and held in memory, in all and for each file."""
        predicted = forecast.of(plan, self.job.write.sizes)
        files, sources = predicted.files, counted(predicted.sources, "file")
        free = atomic_output.free_space(made_at(self.job.out))
        yield f"{self._what(plan)}; not written (--dry-run)"
        yield from render.facts(
            (
                ("Mesh", f"{plan.mesh} ({counted(plan.mesh.size, 'rank')}): {self._placements()}"),
                ("Engine", f"{self.job.engine}, {self._processes(plan)}"),
                ("Reads", f"{format_size(sum(f.read for f in files))} from {sources}"),
                ("Writes", format_size(plan.nbytes)),
                ("Memory", f"about {format_size(self._memory(plan, predicted))} a process"),
                ("Free", f"{format_size(free)} where OUT will be made"),
            )
        )
        yield from _files(files)

    def _placements(self) -> str:
        options = self.job.options
        placements = options.placements or default_placements(options.mesh)
        return ", ".join(map(str, placements))

    def _processes(self, plan: ReshardPlan) -> str:
        here = environment.place()
        count = self.job.workers if here is None else here.world_size
        chosen = self.job.write.threads or choose_threads(
            plan.nbytes // count,
            self.job.write.sizes,
            lanes=-(-len(plan.files) // count),
            processes=count,
        )
        threads = counted(chosen, "thread")
        if here is not None:
            return f"{counted(here.world_size, 'rank')} with {threads} each"
        if self.job.workers > 1:
            return f"{self.job.workers} workers with {threads} each"
        return f"one process with {threads}"

    def _memory(self, plan: ReshardPlan, predicted: forecast.Forecast) -> int:
        buffers = self.job.write.max_memory // self.job.workers
        engine = self.job.engine
        return forecast.peak_memory(plan, predicted.held, engine=engine, buffers=buffers)

    def json(self, plan: ReshardPlan, *, dry_run: bool) -> render.Json:
        """All of it as one JSON object."""
        names = plan.mesh.dim_names
        predicted = forecast.of(plan, self.job.write.sizes)
        return {
            "schema": "ckpt-tools/reshard/1",
            "output": self.job.out,
            "written": not dry_run,
            "engine": self.job.engine,
            "format": self.job.options.format,
            "mesh": {
                "shape": list(plan.mesh.shape),
                "dim_names": None if names is None else list(names),
                "placements": self._placements(),
            },
            "tensors": len(plan.targets),
            "nbytes": plan.nbytes,
            "peak_memory": self._memory(plan, predicted),
            "files": [file._asdict() for file in predicted.files],
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
                file.path,
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
