"""`ckpt-tools reshard`: shards for training on another mesh.

The command, and what it says on stdout: a summary, the forecast of --dry-run, or JSON.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ckpt_tools import formats
from ckpt_tools.cli import choosing, options, render, shaping
from ckpt_tools.cli.group import say
from ckpt_tools.convert import forecast
from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan, refuse_check, reshard_of
from ckpt_tools.convert.write import Conversion, Read
from ckpt_tools.copying import atomic_output
from ckpt_tools.core import records
from ckpt_tools.core.layout import Placement
from ckpt_tools.core.mesh_spec import (
    default_placements,
    described,
    parse_mesh,
    parse_placements,
    parse_rule,
)
from ckpt_tools.core.options import Heading, option, repeated
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.distributed import environment, run
from ckpt_tools.errors import UsageError, reason_of
from ckpt_tools.formats import ReadOptions, read_index
from ckpt_tools.formats.find import member
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

Without --to-mesh the boxes stay those of the source, uneven ones too: with --only, --exclude,
--dtype or --rename that makes a smaller or renamed copy of an old step.

Engines: copy copies byte ranges and needs no torch. dcp loads and saves with torch's own DCP, under
torchrun with as many ranks as the target mesh. gather is for rank files on node-local disks, under
torchrun with as many ranks as the source mesh. Only copy supports --resume.

""" + options.examples(
    "ckpt-tools reshard run7/step-1000 -o run7-4x8 --to-mesh 4x8",
    "ckpt-tools reshard run7/step-1000 -o run7-tp --to-mesh dp=4,tp=2 --place '*.wq.*=S(0),S(0)'",
    "ckpt-tools reshard run7/step-1000 -o run7-16 --to-mesh 16 --only model -j 8",
    "ckpt-tools reshard run7/step-1000 -o run7-16 --to-mesh 16 --dry-run",
    "ckpt-tools reshard run7/step-1000 -o archive/step-1000 --only model --dtype bf16 --check",
    "ckpt-tools reshard Llama-3.1-8B -o seed --to-mesh 64 --map hf-to-torchtitan-llama3",
    "torchrun --nproc-per-node 8 -m ckpt_tools reshard run7/step-1000 -o run7-16 --to-mesh 16",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    heading: ClassVar[Heading] = "Output"

    ckpt: str = options.ckpt()
    out: str = options.output("reshard")
    wanted: ReshardOptions
    to_mesh: str | None = option(None, "--to-mesh", parse=str)  # as it was typed
    placements: str | None = option(
        None,
        "--placements",
        "One placement for each mesh dimension: 'R,S(0)'.",
        metavar="LIST",
        after="--to-mesh",
    )
    rules: tuple[str, ...] = repeated(
        "--place",
        "Placements for names that match. Repeatable; the last match wins.",
        metavar="GLOB=LIST",
        after="--placements",
        parse=str,
    )
    like: str | None = option(
        None,
        "--like",
        "Place tensors as in this other checkpoint of the mesh.",
        metavar="CKPT",
        after="--place",
    )
    param_names: str | None = option(
        None,
        "--param-names",
        "Names for a numbered optimizer state: a text file, one name per line, in the "
        "optimizer's order; a checkpoint with names; or 'stored', those in its own "
        "param_groups.",
        metavar="FILE",
        after="--layout",
    )
    engine: run.EngineName = option(
        "copy", "--engine", "What copies the tensors.", choices=run.ENGINES
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
    reading: choosing.Reading


@options.command("reshard", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Plan and write the output, then say on stdout what it is."""
    environment.refuse_lone_task()
    texts = options.texts(asked)
    asked = replace(asked, ckpt=asked.reading.find(asked.ckpt))
    layout, engine, dry_run = asked.wanted.layout, asked.engine, asked.writing.dry_run
    asked = replace(asked, wanted=_options(asked))
    if engine != "copy" and (layout is not None or asked.param_names is not None):
        raise UsageError(
            f"--engine {engine} keeps all names and containers, so it takes neither --layout nor "
            "--param-names.",
            hint="--engine copy takes both.",
        )
    if dry_run and engine == "copy" and environment.is_follower():
        return  # rank 0 plans alone
    words = ""
    if asked.to_mesh is not None:
        words = f"{asked.to_mesh} = {described(asked.wanted.mesh, _placements(asked.wanted))}"
        say(words)
    given = (*asked.names.sources, asked.like, asked.param_names)
    write = asked.writing.beside(asked.ckpt, given)
    if engine != "copy":
        write = replace(write, resume=False)
    refuse_check(asked.wanted, write)
    executing = run.engine_named(engine, asked.wanted)
    started, out, writing = time.monotonic(), asked.out, asked.writing

    def make(read: Read) -> Conversion[ReshardPlan]:
        index = read(asked.ckpt, replace(asked.reading.options, cuts=asked.names.cuts()))
        if asked.param_names is None:  # by those names is chosen, where they are given
            choosing.say_idle(asked.wanted, [index])
        return reshard_of(index, out, write, asked.wanted)

    plan = shaping.carried_out(make, out, write, writing, engine=executing, texts=texts)
    if writing.options.resume and not write.resume and not dry_run:
        note = f"--engine {engine} records no finished files: --resume started from the beginning."
        plan = replace(plan, notes=(*plan.notes, note))
    if environment.is_follower():
        return  # rank 0 speaks
    json = _json(asked, plan) if asked.json else None
    lines = _lines(asked, plan, started)
    shaping.tell(plan, out, writing, "reshard", lines=lines, json=json, said=words)


def _options(asked: _Asked) -> ReshardOptions:
    """All that is asked for; reads the checkpoints that --like and --param-names name.

    Raises UsageError for options that exclude one another, and what reading raises.
    """
    given, read = asked.wanted, asked.reading.options
    form = frameworks.shards_format(given.layout, given.format)
    if asked.to_mesh is None:
        _refuse_without_mesh(asked, form)
        return replace(given, format=form, steps=_steps(asked))
    row = frameworks.row_of(given.layout)
    mesh = parse_mesh(asked.to_mesh, row.mesh_names)
    if mesh.dim_names is None and row.names_mesh:
        sizes = "x".join(map(str, mesh.shape))
        raise UsageError(f"--layout {given.layout} names the mesh: write --to-mesh {sizes}.")
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


def _refuse_without_mesh(asked: _Asked, form: str) -> None:
    """Raise UsageError for what only --to-mesh gives a meaning, and for nothing to change."""
    wanted = asked.wanted
    needs = {
        "--placements": asked.placements,
        "--place": asked.rules,
        "--like": asked.like,
        "--layout": wanted.layout,
        "--param-names": asked.param_names,
        f"--engine {asked.engine}": asked.engine != "copy",
        f"--format {form}": form != formats.targets("shards")[0].name,
    }
    if flag := next((flag for flag, given in needs.items() if given), None):
        raise UsageError(f"{flag} needs --to-mesh.")
    if wanted.wants_all and not (wanted.dtype or wanted.dtypes or _steps(asked)):
        raise UsageError(
            "Missing option '--to-mesh'.",
            hint="For example: ckpt-tools reshard run7/step-1000 -o run7-4x8 --to-mesh 4x8\n"
            "Without it, --only, --exclude, --dtype and --rename keep the source's own boxes.",
        )


def _steps(asked: _Asked) -> tuple[Transform, ...]:
    """The steps, in their order. Raises UsageError for options that do not fit."""
    steps = [*asked.names.steps(asked.ckpt)]
    if asked.under is not None or asked.untie:
        from ckpt_tools.transforms import maps  # late: few reshards have steps

        untie = [maps.untie] if asked.untie else []
        under = [] if asked.under is None else [maps.UnderTransform(asked.under)]
        steps = [*untie, *steps, *under]
    if steps and asked.engine != "copy":
        raise UsageError(f"Other names and --untie need --engine copy, not {asked.engine}.")
    return tuple(steps)


def _param_names(text: str, read: ReadOptions) -> ParamNames:
    """What --param-names means: a list in a file, a checkpoint with names, or the word stored.

    Raises UsageError when nothing is there, or when what is there has no names.
    """
    if text == "stored":
        return ParamNames()
    if not os.path.exists(text):
        raise UsageError(f"--param-names: {text} does not exist.")
    if not os.path.isfile(text) or formats.detect(member(text)) is not None:
        return param_names.names_in(choosing.with_values(read_index(text, options=read)))
    if os.path.getsize(text) > _LONGEST_LIST:
        raise UsageError(f"--param-names: {text} is too long for a list of names.")
    try:
        with open(paths.open_file(text), encoding="utf-8") as file:
            return ParamNames(param_names.parse_names(file.read(), where=text))
    except (OSError, UnicodeDecodeError) as error:
        why = reason_of(error)
        raise UsageError(f"--param-names: {text} cannot be read as text: {why}.") from error


_HEADER = ("FILE", "BYTES", "BOXES", "READ", "FROM")
_MOST_FILES = 16


def _lines(asked: _Asked, plan: ReshardPlan, started: float) -> Iterator[str]:
    """What was written, and by whom; or what would be."""
    writing, here = asked.writing, environment.place()
    count = writing.jobs if here is None else here.world_size
    is_one = here is None and count == 1
    who = counted(count, "worker" if here is None else "rank")
    end = "in the source's own boxes" if asked.to_mesh is None else f"for mesh {plan.mesh}"
    what = f"{shaping.what(plan, asked.out)} {end}"
    if writing.dry_run:
        threads = writing.threads_of(plan, processes=count)
        yield f"{what}; not written (--dry-run)"
        processes = f"one process with {threads}" if is_one else f"{who} with {threads} each"
        yield from _forecast(asked, plan, processes)
    else:
        yield f"{what}, {shaping.took(plan, started)}" + ("" if is_one else f" by {who}")


def _forecast(asked: _Asked, plan: ReshardPlan, processes: str) -> Iterator[str]:
    """What will be read, written and held in memory: in all, and a line for each file, or for many
    the least, the middle and the most of them.
    """
    writing, engine = asked.writing, asked.engine
    files, sources, memory = forecast.of(plan, writing.options, engine, writing.jobs)
    read, free = sum(file.read for file in files), atomic_output.free_space(run.made_at(asked.out))
    yield from render.facts(
        (
            ("Mesh", f"{plan.mesh} ({counted(plan.mesh.size, 'rank')}): {_listed(asked)}"),
            ("Engine", f"{engine}, {processes}"),
            ("Reads", f"{format_size(read)} from {counted(sources, 'file')}"),
            ("Writes", format_size(plan.nbytes)),
            ("Memory", f"about {format_size(memory)} a process"),
            ("Free", f"{format_size(free)} where OUT will be made"),
        )
    )
    yield ""
    shown = files
    if len(files) > _MOST_FILES:
        by_size = sorted(files, key=lambda file: (file.nbytes, file.path))
        shown = [by_size[0], by_size[len(files) // 2], by_size[-1]]
        yield f"The smallest, the middle and the largest of {len(files):,} files (--json has all):"
    rows = []
    for file in shown:
        sizes = format_size(file.nbytes), f"{file.boxes:,}", format_size(file.read)
        rows.append((file.path, *sizes, counted(file.sources, "file")))
    yield from render.columns(_HEADER, rows, align="lrrrr", width=render.terminal_width())


def _placements(wanted: ReshardOptions) -> Sequence[Placement]:
    return wanted.placements or default_placements(wanted.mesh)


def _listed(asked: _Asked) -> str:
    if asked.to_mesh is None:
        return "the source's own boxes"
    return ", ".join(map(str, _placements(asked.wanted)))


def _json(asked: _Asked, plan: ReshardPlan) -> Mapping[str, render.Json]:
    writing, engine = asked.writing, asked.engine
    files, _, memory = forecast.of(plan, writing.options, engine, writing.jobs)
    return {
        "engine": engine,
        "format": asked.wanted.format,
        "mesh": records.record_json(plan.mesh) | {"placements": _listed(asked)},
        "tensors": len(plan.targets),
        "nbytes": plan.nbytes,
        "peak_memory": memory,
        "files": records.as_json(files),
        "notes": list(plan.notes),
    }
