"""`ckpt-tools inspect`: what a checkpoint is, and whether training can resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import click

from ckpt_tools.cli import choosing, options, render, report, run_list
from ckpt_tools.cli.group import error_json, say_error
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.names import Filters
from ckpt_tools.core.options import only_one_of, option
from ckpt_tools.errors import CheckpointError, CkptError, UsageError
from ckpt_tools.formats import read_index, run_of
from ckpt_tools.formats.frameworks import sources_of
from ckpt_tools.storage import paths

_HELP = """Show what a checkpoint is: complete or not, resumable or not, step, format, mesh, sizes.

Only headers are read. A mesh that the files state is confirmed; DCP states none, so there it is
inferred from the saved boxes. Several paths are reported one after another. An incomplete
checkpoint is reported, too, with exit code 3.

A folder of several checkpoints is a run: they are listed by step, one per line, the newest last.
--latest, --latest-complete and --step choose one of them, here and in every other command. With
--path-only that is all that is printed: a job script resumes from the newest complete one.

--html writes the report as a page for a colleague, with the layout of every tensor; it needs
neither network nor scripts. A checkpoint that cannot be read gets a page, too, with the reason.
--stats reads every value and adds the statistics of each tensor to the page.

--json prints one object of schema ckpt-tools/inspect/1; for several checkpoints, one object of
schema ckpt-tools/inspect-list/1 with those objects in "checkpoints". A run is one object of schema
ckpt-tools/run/1.

""" + options.examples(
    "ckpt-tools inspect run7/step-1000",
    "ckpt-tools inspect run7",
    "ckpt-tools inspect run7 --latest",
    "resume=$(ckpt-tools inspect run7 --latest-complete --path-only)",
    "ckpt-tools inspect run7/step-1000 --shards",
    "ckpt-tools inspect run7/step-1000 --html report.html --stats --only model",
    "ckpt-tools inspect run7/step-1000 --json | jq .mesh",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpts: tuple[str, ...] = options.ckpts()
    every: bool = option(False, "--all", "Also list every tensor and object.")
    shards: bool = option(False, "--shards", "Also show what each file holds, and how evenly.")
    path_only: bool = option(False, "--path-only", "Print only the path of the checkpoint.")
    html: str | None = option(None, "--html", "Write an HTML page; - is stdout.", metavar="FILE")
    stats: bool = option(False, "--stats", "Read every value, for histograms in the page.")
    force: bool = option(False, "--force", "Replace an existing FILE.")
    json: bool = options.as_json()
    filters: Filters
    reading: choosing.Reading

    def __post_init__(self) -> None:
        if self.html is None and (self.stats or self.force):
            text = "--stats and --force belong to --html; `ckpt-tools stats` prints numbers."
            raise UsageError(text)


@options.command("inspect", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Report each checkpoint; go on after one that cannot be read, and fail at the end."""
    ckpts = [*map(asked.reading.find, asked.ckpts)]
    every, shards, json = asked.every, asked.shards, asked.json
    if asked.html is not None:
        _page(ckpts, asked.html, asked)
        return
    if asked.path_only:
        _paths(ckpts, asked)
        return
    objects: list[Mapping[str, render.Json]] = []
    codes: list[int] = []
    wholes: list[CheckpointIndex] = []
    for ckpt in ckpts:
        said: Mapping[str, render.Json] = {"schema": render.ERROR, "path": ckpt}
        try:
            if run := run_of(ckpt):
                saves = [run_list.line_of(saved, asked.reading.options) for saved in run]
                if json:
                    objects.append(run_list.as_json(ckpt, saves))
                else:
                    render.emit(run_list.lines(ckpt, saves))
                continue
            whole = read_index(ckpt, options=asked.reading.options)
            wholes.append(whole)
            index = choosing.chosen_in(whole, asked.filters)
            if json:
                said = report.as_json(whole, index, every=every, shards=shards)
            else:
                render.emit(report.lines(whole, index, every=every, shards=shards))
            whole.require_whole()
        except CkptError as error:
            choosing.name_newest(error)
            say_error(error)
            codes.append(error.exit_code)
            said = {**said, "error": error_json(error)}
        objects.append(said)
    choosing.say_idle(asked.filters, wholes)
    if json:
        said = {"schema": "ckpt-tools/inspect-list/1", "checkpoints": objects}
        render.emit_json(said if len(ckpts) > 1 else objects[0])
    if codes:
        click.get_current_context().exit(max(codes))


def _paths(ckpts: list[str], asked: _Asked) -> None:
    """Print where each checkpoint is. Raises what keeps one from being whole."""
    only_one_of({"--path-only": True, "--json": asked.json})
    for ckpt in ckpts:
        index = read_index(ckpt, options=asked.reading.options)
        is_glob = ckpt not in asked.ckpts and not paths.exists(ckpt)  # of the rank files of a step
        render.emit([ckpt if is_glob else index.root])
        index.require_whole()


def _page(ckpts: list[str], html: str, asked: _Asked) -> None:
    """Write the report of one checkpoint as a page."""
    from ckpt_tools.cli.pictures import banner, pages, shell  # late: most are for the terminal

    if len(ckpts) > 1 or asked.json or asked.path_only:
        raise UsageError("--html reports one checkpoint, and not as --json or --path-only.")
    whole = banner.read(ckpts[0], html, asked.reading.options, force=asked.force)
    index = choosing.choose(whole, asked.filters)
    seen, failure = None, None
    try:
        index = choosing.with_values(index)
        seen = pages.read_values(index) if asked.stats else None
    except CheckpointError as error:
        failure = error
    page = pages.report_page(whole, index, seen=seen, unseen=failure)
    shell.write(html, page, sources=(*ckpts, *sources_of(whole)), force=asked.force)
    whole.require_whole()
    if failure is not None:
        raise failure
