"""`ckpt-tools reshard`: shards for training on another mesh.

The command, and what it says on stdout: a summary, the forecast of --dry-run, or JSON.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt_tools import formats
from ckpt_tools.cli import options, progress, render, shaping
from ckpt_tools.cli.group import answer, say
from ckpt_tools.convert import forecast
from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan
from ckpt_tools.copying import atomic_output
from ckpt_tools.copying.parallel import choose_threads
from ckpt_tools.core.mesh_spec import (
    default_placements,
    described,
    parse_mesh,
    parse_placements,
    parse_rule,
)
from ckpt_tools.core.options import option, repeated, required
from ckpt_tools.core.progress import Listener
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.engines import dry_run, reshard_by
from ckpt_tools.distributed.job import ENGINES, Engine, Job, check_room, made_at
from ckpt_tools.errors import UsageError, reason_of
from ckpt_tools.formats import ReadOptions, read_index
from ckpt_tools.storage import paths
from ckpt_tools.transforms import frameworks, param_names
from ckpt_tools.transforms.base import Transform
from ckpt_tools.transforms.optimizer import ParamNames

_LONGEST_LIST = 64 << 20  # bytes of a list of parameters' names

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    out: str = options.output("reshard")
    wanted: ReshardOptions
    to_mesh: str = required("--to-mesh", parse=str)  # as it was typed
    placements: str | None = option(
        None,
        "--placements",
        "One placement for each mesh dimension: 'R,S(0)'.",
        metavar="LIST",
        heading="Output",
        after="--to-mesh",
    )
    rules: tuple[str, ...] = repeated(
        "--place",
        "Placements for names that match. Repeatable; the last match wins.",
        metavar="GLOB=LIST",
        heading="Output",
        after="--placements",
        parse=str,
    )
    like: str | None = option(
        None,
        "--like",
        "Place tensors as in this other checkpoint of the mesh.",
        metavar="CKPT",
        heading="Output",
        after="--place",
    )
    param_names: str | None = option(
        None,
        "--param-names",
        "Names for a numbered optimizer state: a text file, one name per line, in the "
        "optimizer's order; a checkpoint with names; or 'stored', those in its own "
        "param_groups.",
        metavar="FILE",
        heading="Output",
        after="--layout",
    )
    engine: Engine = option(
        "copy", "--engine", "What copies the tensors.", heading="Output", choices=ENGINES
    )
    names: shaping.NewNames
    untie: bool = option(
        False,
        "--untie",
        "Also write lm_head if the source has only the embedding that it is tied to, for a job "
        "that loads both. Applied before --map.",
        heading="Names",
    )
    under: str | None = option(
        None,
        "--under",
        "Put all names into this container, for a job that loads {NAME: …}.",
        metavar="NAME",
        heading="Names",
    )
    writing: shaping.Writing
    json: bool = options.as_json()
    reading: options.Reading


@options.command("reshard", Asked, help=_HELP)
def command(asked: Asked) -> None:
    """Plan and write the output, then say on stdout what it is."""
    environment.refuse_lone_task()
    asked = replace(asked, ckpt=asked.reading.find(asked.ckpt))
    layout, engine, dry_run = asked.wanted.layout, asked.engine, asked.writing.dry_run
    wanted = _options(asked)
    if engine != "copy" and (layout is not None or asked.param_names is not None):
        raise UsageError(
            f"--engine {engine} keeps all names and containers, so it takes neither --layout nor "
            "--param-names.",
            hint="--engine copy takes both.",
        )
    if dry_run and engine != "gather" and environment.is_follower():
        return  # rank 0 plans alone; to gather, each knows its own file only
    mesh = wanted.mesh
    words = f"{asked.to_mesh} = {described(mesh, wanted.placements or default_placements(mesh))}"
    say(words)
    others = [*asked.names.sources, *filter(None, (asked.like, asked.param_names))]
    job = Job(
        asked.ckpt,
        asked.out,
        wanted,
        asked.writing.beside(asked.ckpt, others),
        engine,
        asked.writing.jobs,
        replace(asked.reading.options, cuts=asked.names.cuts()),
        options.texts(asked),
    )
    (_dry_run if dry_run else _write)(job, said=words, as_json=asked.json)


def _options(asked: Asked) -> ReshardOptions:
    """All that is asked for; reads the checkpoints that --like and --param-names name.

    Raises UsageError for options that exclude one another, and what reading raises.
    """
    given, read = asked.wanted, asked.reading.options
    form = frameworks.shards_format(given.layout, given.format)
    mesh = parse_mesh(asked.to_mesh, frameworks.row_of(given.layout).mesh_names)
    placements, like = asked.placements, asked.like
    return replace(
        given,
        mesh=mesh,
        placements=None if placements is None else parse_placements(placements, mesh),
        rules=tuple(parse_rule(text, mesh) for text in asked.rules),
        like=None if like is None else read_index(like, options=read),
        format=form,
        param_names=None if asked.param_names is None else _param_names(asked.param_names, read),
        steps=_steps(asked),
    )


def _steps(asked: Asked) -> tuple[Transform, ...]:
    """The steps, in their order. Raises UsageError for options that do not fit."""
    steps = [*asked.names.steps(asked.ckpt)]
    if asked.under is not None or asked.untie:
        from ckpt_tools.transforms import maps  # late: few reshards have steps

        untie = [maps.UntieTransform()] if asked.untie else []
        under = [] if asked.under is None else [maps.UnderTransform(asked.under)]
        steps = [*untie, *steps, *under]
    if steps and asked.engine != "copy":
        raise UsageError(f"Other names and --untie need --engine copy, not {asked.engine}.")
    return tuple(steps)


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


def _param_names(text: str, read: ReadOptions) -> ParamNames:
    """What --param-names means: a list in a file, a checkpoint with names, or the word stored.

    Raises UsageError when nothing is there, or when what is there has no names.
    """
    if text == "stored":
        return ParamNames()
    if os.path.isfile(text) and formats.detect(formats.frameworks.member(text)) is None:
        return ParamNames(param_names.parse_names(_text_of(text), where=text))
    if not os.path.exists(text):
        raise UsageError(f"--param-names: {text} does not exist.")
    return param_names.names_in(options.with_values(formats.read_index(text, options=read)))


def _text_of(path: str) -> str:
    if os.path.getsize(path) > _LONGEST_LIST:
        raise UsageError(f"--param-names: {path} is too long for a list of names.")
    try:
        with open(paths.open_file(path), encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise UsageError(f"--param-names: {path} cannot be read as text: {why}.") from error


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
