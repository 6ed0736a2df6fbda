"""`ckpt-tools export`: whole tensors, as safetensors or as one torch file."""

from __future__ import annotations

import time

import click

from ckpt_tools import formats
from ckpt_tools.cli import asked, options, progress, render, shaping
from ckpt_tools.cli.group import answer, say
from ckpt_tools.convert import export as convert
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying.parallel import choose_threads
from ckpt_tools.core.progress import Listener
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.executors import available
from ckpt_tools.distributed.job import check_room, dry_run_output
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import read_index

_HELP = """Write full tensors from a sharded checkpoint, for loading elsewhere.

OUT is a folder (shards with an index), or one file if it ends in .safetensors or .pt. It appears
only when it is complete. By default the model is written, and the container of its names and
wrapper components (_orig_mod, _fsdp_wrapped_module, _checkpoint_wrapped_module, a leading module)
are removed; notes on stderr say what was changed.

""" + options.examples(
    "ckpt-tools export run7/step-1000 -o run7-hf",
    "ckpt-tools export run7/step-1000 -o model.safetensors --dtype bf16",
    "ckpt-tools export run7/step-1000 -o optim.pt --only optim --keep-names",
    "ckpt-tools export run7/step-1000 -o run7-hf --map auto --hf-assets Llama-3.1-8B",
    "ckpt-tools export run7/step-1000 -o run7-full --layout accelerate",
    "ckpt-tools export run7/step-1000 -o run7-hf --dry-run",
)


_PARAMS = [
    options.checkpoint(),
    options.output(),
    click.Option(
        ["--format", "form"],
        type=click.Choice([one.name for one in formats.targets("whole")]),
        default=None,
        help="Format of the output.  [default: by the suffix of OUT, else safetensors]",
    ),
    click.Option(
        ["--layout"],
        type=click.Choice(convert.WHOLE_LAYOUTS),
        help="Write the full tensors and optimizer as this framework's loader reads them.",
    ),
    options.dtype(),
    options.size(
        "--max-shard-size", default="5GB", text="Tensor bytes of one safetensors file, at most."
    ),
    click.Option(["--keep-names"], is_flag=True, help="Keep every name unchanged."),
    options.keep_rank_states(),
    *shaping.for_export(),
    *options.writing(),
    options.as_json(),
    *options.filters(only="model"),
    *options.reading(),
    *options.talk(),
]


@click.command("export", cls=options.Command, help=_HELP, params=_PARAMS)
def command(
    *,
    ckpt: str,
    out: str,
    form: str | None,
    layout: str | None,
    jobs: int,
    dry_run: bool,
    json: bool,
    **_shared: object,
) -> None:
    """Plan and write the output, then say on stdout what it is."""
    environment.refuse_lone_task()
    started = time.monotonic()
    form = _form("torch" if layout is not None and form is None else form, out)
    if dry_run and environment.is_follower():
        return  # rank 0 plans alone
    plan = _dry_run(ckpt, out, form) if dry_run else _write(ckpt, out, form, jobs=jobs)
    for note in plan.notes:
        say(note)
    if json:
        render.emit_json(_json(plan, out, dry_run=dry_run))
    else:
        answer(_summary(plan, out, dry_run=dry_run, seconds=time.monotonic() - started))
    if dry_run:
        check_room(out, plan.files, single_file=plan.single_file)


def _dry_run(ckpt: str, out: str, form: str) -> convert.ExportPlan:
    """Plan it, and refuse what writing it would refuse."""
    write = asked.writing()
    dry_run_output(out, write, write.sources)
    conversion = _conversion(ckpt, out, form, write)
    dry_run_output(out, write, conversion.sources)
    return conversion.plan(formats.locate)


def _write(ckpt: str, out: str, form: str, *, jobs: int) -> convert.ExportPlan:
    """Write it, alone or with all ranks of a job."""
    write = asked.writing()
    with (
        progress.byte_bar(label="export") as bar,
        available(
            write,
            workers=jobs,
            listener=Listener(bar, bar.expect, say),
            texts=asked.texts(),
        ) as executor,
    ):
        with executor.together():
            executor.admit(out)
            conversion = _conversion(ckpt, out, form, write)
        return executor.write(conversion)


def _conversion(ckpt: str, out: str, form: str, write: WriteOptions) -> convert.Export:
    """The export with all its options. Raises AnswerNo when filters choose nothing."""
    index = read_index(ckpt, options=asked.reading(shaping.cuts()))
    options.choose(index, asked.filters_of_export())
    is_folder = form == "safetensors" and not convert.is_single_file(out, form)
    return convert.Export(index, out, write, asked.export(index, form=form, is_folder=is_folder))


def _form(form: str | None, out: str) -> str:
    """The format that was asked for, by --format or by the suffix of the output.

    Raises UsageError where the two differ.
    """
    by_suffix = convert.format_of(out)
    if form is not None and by_suffix is not None and form != by_suffix:
        raise UsageError(
            f"{out} has the ending of a {by_suffix} file, but --format says {form}.",
            hint="Name the output as its format is named, or leave --format out.",
        )
    return form or by_suffix or formats.targets("whole")[0].name


def _summary(plan: convert.ExportPlan, out: str, *, dry_run: bool, seconds: float) -> str:
    """One line: what was written, or would be."""
    tensors = counted(plan.tensors, "tensor")
    files = counted(len(plan.files), "file")
    what = f"{out}: {tensors}, {format_size(plan.nbytes)} in {files}"
    if dry_run:
        return f"{what}; not written (--dry-run); {_workers(plan)} would write it"
    rate = f", {format_size(int(plan.nbytes / seconds))}/s" if seconds >= 1 else ""
    return f"{what}, in {seconds:.1f} s{rate}"


def _workers(plan: convert.ExportPlan) -> str:
    """How many threads, and processes, the command would use for this plan."""
    params = click.get_current_context().params
    jobs: int = params["jobs"]
    threads: int = params["threads"] or choose_threads(
        plan.nbytes // jobs, Sizes(), lanes=-(-len(plan.files) // jobs), processes=jobs
    )
    each = counted(threads, "thread")
    return each if jobs == 1 else f"{counted(jobs, 'worker')} of {each}"


def _json(plan: convert.ExportPlan, out: str, *, dry_run: bool) -> render.Json:
    return {
        "schema": "ckpt-tools/export/1",
        "output": out,
        "written": not dry_run,
        "tensors": plan.tensors,
        "nbytes": plan.nbytes,
        "files": [{"path": file.path, "nbytes": file.length} for file in plan.files.files],
        "names": dict(plan.names),
        "origins": {fqn: list(origins) for fqn, origins in plan.origins.items()},
        "notes": list(plan.notes),
    }
