"""`ckpt-tools export`: whole tensors, as safetensors or as one torch file."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ckpt_tools import formats
from ckpt_tools.cli import options, progress, render, shaping
from ckpt_tools.cli.group import answer, say
from ckpt_tools.convert import export as convert
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.core.index import SECTIONS, Section
from ckpt_tools.core.options import option
from ckpt_tools.core.progress import Listener
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.distributed import environment, run
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.frameworks import HUB_FORMAT
from ckpt_tools.transforms import frameworks

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    out: str = options.output("export")
    form: str | None = option(
        None,
        "--format",
        "Format of the output.  [default: by the suffix of OUT, else safetensors]",
        heading="Output",
        choices=[one.name for one in formats.targets("whole")],
    )
    wanted: convert.ExportOptions
    names: shaping.NewNames
    folder: shaping.Folder
    adapters: shaping.Adapters
    writing: shaping.Writing
    json: bool = options.as_json()
    only: Section | Literal["all"] | None = option(
        None,
        "--only",
        "Only this section.  [default: model]",
        heading="Which entries",
        after="--exclude",
        choices=(*SECTIONS, "all"),
    )
    reading: options.Reading


@options.command("export", Asked, help=_HELP)
def command(asked: Asked) -> None:
    """Plan and write the output, then say on stdout what it is."""
    environment.refuse_lone_task()
    started = time.monotonic()
    dry_run, out = asked.writing.dry_run, asked.out
    own = frameworks.row_of(asked.wanted.layout).formats("whole")
    form = _form(asked.form or next(iter(own), None), out)
    if dry_run and environment.is_follower():
        return  # rank 0 plans alone
    asked = replace(asked, ckpt=asked.reading.find(asked.ckpt))
    write = _write_options(asked)
    make = partial(_conversion, asked, form, write)
    if dry_run:
        plan = run.dry_run(make, out, write)
    else:
        with progress.byte_bar(label="export") as bar:
            listener = Listener(bar, bar.expect, say)
            jobs, texts = asked.writing.jobs, options.texts(asked)
            plan = run.run(make, out, write, workers=jobs, listener=listener, texts=texts)
    for note in plan.notes:
        say(note)
    if asked.json:
        schema = "ckpt-tools/export/1"
        render.emit_json(
            {"schema": schema, "output": out, "written": not dry_run, **plan.to_dict()}
        )
    elif dry_run:
        answer(f"{_what(plan, out)}; not written (--dry-run); {_workers(plan, asked.writing)}")
    else:
        answer(_summary(plan, out, seconds=time.monotonic() - started))
    if dry_run:
        run.check_room(out, plan)


def _write_options(asked: Asked) -> WriteOptions:
    """How to write, and all that is read for it."""
    given = (asked.folder.assets, asked.adapters.config, *asked.names.sources)
    copied = asked.folder.files_read(asked.ckpt)
    return asked.writing.beside(asked.ckpt, [*filter(None, given)], copied)


def _conversion(asked: Asked, form: str, write: WriteOptions, read: run.Read) -> convert.Export:
    """The export with all its options. Raises AnswerNo when filters choose nothing."""
    index = read(asked.ckpt, replace(asked.reading.options, cuts=asked.names.cuts()))
    usual: Section | None = None if asked.wanted.layout else "model"
    only = None if asked.only == "all" else asked.only or usual
    wanted = replace(asked.wanted, format=form, only=only)
    options.choose(index, wanted)
    steps = shaping.export_steps(
        index,
        names=asked.names,
        folder=asked.folder,
        adapters=asked.adapters,
        is_folder=form == HUB_FORMAT and not convert.is_single_file(asked.out, form),
    )
    wanted = replace(wanted, steps=steps)
    if asked.adapters.alone:  # PEFT reads one file
        wanted = replace(wanted, basename="adapter_model", max_shard_size=1 << 62)
    return convert.Export(index, asked.out, write, wanted)


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


def _summary(plan: convert.ExportPlan, out: str, *, seconds: float) -> str:
    """One line: what was written."""
    rate = f", {format_size(int(plan.nbytes / seconds))}/s" if seconds >= 1 else ""
    return f"{_what(plan, out)}, in {seconds:.1f} s{rate}"


def _what(plan: convert.ExportPlan, out: str) -> str:
    tensors, files = counted(plan.tensors, "tensor"), counted(len(plan.files), "file")
    return f"{out}: {tensors}, {format_size(plan.nbytes)} in {files}"


def _workers(plan: convert.ExportPlan, writing: shaping.Writing) -> str:
    """How many threads, and processes, would write this plan."""
    jobs = writing.jobs
    each = writing.threads_of(plan, processes=jobs)
    who = each if jobs == 1 else f"{counted(jobs, 'worker')} of {each}"
    return f"{who} would write it"
