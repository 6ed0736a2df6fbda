"""`ckpt-tools reshard`: shards for training on another mesh."""

from __future__ import annotations

import time

import click

from ckpt_tools import formats
from ckpt_tools.cli import (
    options,
    param_order,
    progress,
    render,
    reshard_report,
    shaping,
    writing,
)
from ckpt_tools.cli.group import say
from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan
from ckpt_tools.core.dtypes import DType
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.mesh_spec import (
    default_placements,
    in_words,
    parse_mesh,
    parse_placements,
    parse_rule,
)
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.engines import (
    ENGINES,
    Engine,
    Request,
    rehearse,
    reshard_by,
)
from ckpt_tools.distributed.executors import ignore
from ckpt_tools.distributed.job import Job, check_room
from ckpt_tools.errors import UsageError
from ckpt_tools.transforms.frameworks import LAYOUTS, VERL_MESH, FrameworkLayout

_HELP = """Write a checkpoint as the shards of another mesh, for a training job to load.

--to-mesh 32 is one mesh dimension that shards; 4x8 is HSDP, 4 replicas of 8 shards. For anything
else name the dimensions (dp_replicate=4,dp_shard=8) and use --placements, --place or --like: how
tensor parallelism shards a tensor is never guessed. The number of processes has nothing to do with
the mesh: one can write 4x8, and the bytes are always the same.

Engines: copy moves byte ranges and needs no torch. dcp loads and saves with torch's own DCP, under
torchrun with one rank for each of the mesh. gather is for rank files on the nodes' own disks, under
torchrun with one rank for each of the source. Only copy goes on with --resume.

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
        help="The target: 32, 4x8, or names: dp_replicate=4,dp_shard=8.",
    ),
    click.Option(["--placements"], metavar="LIST", help="One for each mesh dimension: 'R,S(0)'."),
    click.Option(
        ["--place"],
        metavar="GLOB=LIST",
        multiple=True,
        help="Placements of names that match. Repeatable; the last match wins.",
    ),
    click.Option(
        ["--like"],
        metavar="CKPT",
        help="Lay tensors out as this other checkpoint of the mesh does.",
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
        help="Folders, containers and side files that this framework's loader expects.",
    ),
    click.Option(
        ["--param-names"],
        metavar="FILE",
        help="Names for a numbered optimizer state: a list, one a line, in the optimizer's own "
        "order; a checkpoint that has them; or 'stored', those in its own param_groups.",
    ),
    options.keep_rank_states(),
    click.Option(
        ["--device-type"],
        metavar="TYPE",
        default="cuda",
        show_default=True,
        help="What the mesh of --format ranks is made of.",
    ),
    click.Option(
        ["--engine"],
        type=click.Choice(ENGINES),
        default="copy",
        show_default=True,
        help="What moves the tensors.",
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
    placements: str | None,
    place: tuple[str, ...],
    like: str | None,
    form: str,
    layout: FrameworkLayout | None,
    param_names: str | None,
    keep_rank_states: bool,
    device_type: str,
    engine: Engine,
    dtype: DType | None,
    jobs: int,
    dry_run: bool,
    json: bool,
    **_shared: object,
) -> None:
    """Plan and write the output, then say on stdout what it is."""
    mesh = parse_mesh(to_mesh)
    if layout == "verl" and "=" not in to_mesh:
        mesh = Mesh(mesh.shape, VERL_MESH[-len(mesh.shape) :])
    read, chosen = options.reading_given(), options.Filters.given()
    asked = ReshardOptions(
        mesh=mesh,
        placements=None if placements is None else parse_placements(placements, mesh),
        rules=tuple(parse_rule(text, mesh) for text in place),
        like=None if like is None else formats.read_index(like, options=read),
        format=_format(form, layout),
        layout=layout,
        param_names=None if param_names is None else param_order.read(param_names, read),
        keep_rank_states=keep_rank_states,
        device_type=device_type,
        dtype=dtype,
        dtypes=shaping.dtype_rules(),
        include=chosen.include,
        exclude=chosen.exclude,
        only=chosen.only,
        steps=shaping.reshard_steps(ckpt, engine=engine),
    )
    if engine != "copy" and (layout is not None or param_names is not None):
        raise UsageError(
            f"--engine {engine} keeps every name and place, and so has no --layout and no "
            "--param-names.",
            hint="--engine copy has both.",
        )
    if dry_run and engine != "gather" and environment.is_follower():
        return  # rank 0 plans alone; to gather, each knows its own file only
    words = f"{to_mesh} = {in_words(mesh, asked.placements or default_placements(mesh))}"
    say(words)
    request, job = Request(ckpt, engine, jobs, read), Job(out, asked, writing.given(), ignore)
    (_rehearse if dry_run else _carry_out)(request, job, told=words, as_json=json)


def _rehearse(request: Request, job: Job, *, told: str, as_json: bool) -> None:
    """Say what would be done."""
    plan = rehearse(request, job)
    _say_notes(plan, told)
    report = reshard_report.Report(request, job)
    if as_json:
        render.emit_json(report.json(plan, dry_run=True))
    else:
        render.emit(report.rehearsal(plan))
    check_room(job.out, plan.files)


def _carry_out(request: Request, job: Job, *, told: str, as_json: bool) -> None:
    """Do it, then say on stdout what was done."""
    started = time.monotonic()
    with progress.byte_bar(label="reshard") as bar:
        plan = reshard_by(request, job._replace(on_bytes=bar, on_total=bar.expect))
    _say_notes(plan, told)
    report = reshard_report.Report(request, job)
    if as_json:
        render.emit_json(report.json(plan, dry_run=False))
    else:
        click.echo(report.summary(plan, seconds=time.monotonic() - started))


def _say_notes(plan: ReshardPlan, told: str) -> None:
    for note in plan.notes:
        if note not in told:
            say(note)


def _format(form: str, layout: FrameworkLayout | None) -> str:
    """The format that a framework's loader reads. Raises UsageError where that is not ``form``."""
    if layout == "verl":
        return "ranks"
    if form == "ranks" and layout not in (None, "plain"):
        raise UsageError(f"--layout {layout} is of DCP directories; it has no --format ranks.")
    return form
