"""`ckpt-tools average`: one model of the weights of several checkpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ckpt_tools import formats
from ckpt_tools.cli import choosing, options, shaping
from ckpt_tools.convert.average import Weighting, average_of
from ckpt_tools.convert.export import ExportPlan
from ckpt_tools.convert.reshard import ReshardPlan
from ckpt_tools.convert.write import Conversion, Read
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.mesh_spec import parse_mesh
from ckpt_tools.core.names import NamePatterns
from ckpt_tools.core.options import option
from ckpt_tools.core.text import counted
from ckpt_tools.distributed import environment
from ckpt_tools.errors import AnswerNo, UsageError
from ckpt_tools.formats import ReadOptions

_HELP = """Average the weights of several checkpoints of one model, of any formats and meshes.

Each tensor is summed in float64, in the order given, and rounded once to its own type. Integers and
bools come from the last checkpoint, and a note names those that differ; optimizers are left out.
Other names, shapes or types, and quantized weights are refused. --check computes OUT again.

OUT is what export writes: a folder of safetensors, or one file if it ends in .safetensors or .pt.
With --to-mesh it is a DCP directory, as reshard writes it.

""" + options.examples(
    "ckpt-tools average run7/step-800 run7/step-900 run7/step-1000 -o run7-average",
    "ckpt-tools average run7 --last 5 -o run7-average --check",
    "ckpt-tools average run7 --last 5 --ema 0.9 -o run7-ema --to-mesh 4x8",
    "ckpt-tools average soup-a soup-b soup-c --weights 1,2,1 -o soup.safetensors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpts: tuple[str, ...] = options.ckpts()
    out: str = options.output("average")
    last: int | None = option(
        None, "--last", "If CKPT is a folder of several: its last N steps.", metavar="N", at_least=2
    )
    weighting: Weighting
    mesh: Mesh | None = option(
        None,
        "--to-mesh",
        "Write the shards of this mesh, such as 4x8, as a DCP directory.",
        metavar="MESH",
        heading="Output",
        parse=parse_mesh,
    )
    names: NamePatterns
    writing: shaping.Writing
    json: bool = options.as_json()
    reading: ReadOptions


@options.command("average", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Plan and write the output, then say on stdout what it is."""
    environment.refuse_lone_task()
    if environment.place() is not None:
        raise UsageError("average is no torchrun job: run it as one process, with -j for several.")
    started, out, last = time.monotonic(), asked.out, asked.last
    ckpt, *more = ckpts = asked.ckpts  # the oldest first
    if last is None:
        try:
            asked.weighting.require_for(len(ckpts))
        except UsageError as error:
            if not more:
                error.advise("--last 5 takes the last five steps of a folder.")
            raise
    else:
        if more:
            raise UsageError("--last takes the last steps of one folder; several were given.")
        steps = formats.steps_in(ckpt)[-last:]
        if len(steps) < last:
            raise AnswerNo(f"{ckpt} has {counted(len(steps), 'step')}, not {last}.")
        ckpts = tuple(formats.of_step(ckpt, step) for step in steps)
    write = asked.writing.beside(ckpts[-1], ckpts[:-1])

    def make(read: Read) -> Conversion[ExportPlan | ReshardPlan]:
        indexes = [read(ckpt, asked.reading) for ckpt in ckpts]
        choosing.say_idle(asked.names, indexes)
        return average_of(indexes, out, write, asked.weighting, asked.mesh, asked.names)

    plan = shaping.carried_out(make, out, write, asked.writing)
    what = f"{shaping.what(plan, out)}, of {counted(len(ckpts), 'checkpoint')}"
    end = "not written (--dry-run)" if asked.writing.dry_run else shaping.took(plan, started)
    json = {"averaged": [*ckpts], **plan.to_dict()} if asked.json else None
    shaping.tell(plan, out, asked.writing, "average", lines=[f"{what}; {end}"], json=json)
