"""What `export`, `reshard` and `average` share: options on names of the output, the steps that they
stand for, how to write, and what is said of it.

The modules of steps are imported when one is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ckpt_tools.cli import render
from ckpt_tools.cli.group import answer, say, saying
from ckpt_tools.convert.plan import Plan
from ckpt_tools.convert.write import P, WriteOptions
from ckpt_tools.copying.parallel import Listener, choose_threads
from ckpt_tools.core.index import FileEntry
from ckpt_tools.core.options import Heading, option, repeated
from ckpt_tools.core.text import counted, format_size
from ckpt_tools.distributed import run
from ckpt_tools.errors import UsageError
from ckpt_tools.storage import paths
from ckpt_tools.transforms.base import Transform

if TYPE_CHECKING:
    from ckpt_tools.formats.protocol import Cut

_MUCH = 64_000_000  # bytes whose speed says something


def _map_help() -> str:
    """What --map does, with the names of the built-in maps."""
    from ckpt_tools.transforms import maps

    return (
        "Convert names and tensors to another framework's, by a built-in map or a TOML file: "
        f"auto, or one of {', '.join(maps.builtin_names())}. back:FILE applies it in reverse."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewNames:
    """Maps and renames, as they are typed."""

    heading: ClassVar[Heading] = "Names"

    maps: tuple[str, ...] = repeated("--map", _map_help, metavar="NAME|FILE", parse=str)
    values: tuple[str, ...] = repeated(
        "--map-value",
        "A size that a map needs, such as head_dim, if config.json does not have it.",
        metavar="NAME=N",
        parse=str,
    )
    force: bool = option(
        False, "--force-map", "Use the map even if it is for another kind of model."
    )
    renames: tuple[str, ...] = repeated(
        "--rename",
        "Replace what matches in every name, after --map. Repeatable, in order.",
        metavar="RE=REPL",
        parse=str,
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The maps that are named: files, or built-in ones."""
        return tuple(text.removeprefix("back:") for text in self.maps)

    def cuts(self) -> tuple[Cut, ...]:
        """How tensor-parallel parts are cut, as the first map that is named says it."""
        given = [text for text in self.maps if text != "auto"]
        if not given:
            return ()
        from ckpt_tools.transforms import maps

        return maps.find(given[0]).cuts

    def steps(self, ckpt: str, config: Mapping[str, object] | None = None) -> Sequence[Transform]:
        """The steps; the config beside the checkpoint, or that of the assets, says sizes.

        Raises UsageError for options that do not fit.
        """
        if self == NewNames():
            return ()
        from ckpt_tools.transforms import hf_folder, maps

        config = hf_folder.config_beside(ckpt) if config is None else config
        values = hf_folder.values_of(config) | maps.parse_values(self.values)
        model_type = hf_folder.model_type_of(config)
        named = [None if text == "auto" else maps.find(text) for text in self.maps]
        known = [one and one.forced for one in named] if self.force else named
        steps = [maps.MapTransform(one, values, model_type) for one in known]
        if self.force and set(self.maps) <= {"auto"}:
            raise UsageError("--force-map takes a map that --map names; here none is named.")
        renames = tuple(map(maps.parse_rename, self.renames))
        return [*steps, maps.RenameTransform(renames)] if renames else steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Whether anything is written, how, and by how many processes."""

    heading: ClassVar[Heading] = "Writing"

    dry_run: bool = option(False, "--dry-run", "Plan and check, but write nothing.")
    options: WriteOptions
    jobs: int = option(
        1,
        "-j --jobs",
        "Worker processes on this machine.",
        metavar="N",
        after="--check",
        at_least=1,
    )

    def beside(
        self, ckpt: str, given: Iterable[str | None], copied: Sequence[str] = ()
    ) -> WriteOptions:
        """How to write what is made of ``ckpt`` and of others, if ``given``; files must stay as
        they are. ``copied`` are files in folders among the others.
        """
        others = [*filter(None, given)]
        states = paths.states_now([*copied, *filter(os.path.isfile, others)])
        watched = tuple(FileEntry(path, state.size, state) for path, state in states.items())
        return replace(self.options, sources=(ckpt, *others), watched=watched)

    def threads_of(self, plan: Plan, *, processes: int) -> str:
        """How many threads each of so many processes would write a plan with."""
        given, sizes, files = self.options.threads, self.options.sizes, len(plan.files)
        nbytes, lanes = plan.nbytes // processes, -(-files // processes)
        chosen = given or choose_threads(nbytes, sizes, lanes=lanes, processes=processes)
        return counted(chosen, "thread")


def carried_out(
    make: run.Make[P],
    out: str,
    write: WriteOptions,
    writing: Writing,
    *,
    engine: run.Engine | None = None,
    texts: Mapping[str, str] | None = None,
) -> P:
    """Write what ``make`` gives, with a bar of bytes, or only plan it. Raises what `run` raises."""
    jobs, texts = writing.jobs, texts or {}
    if writing.dry_run:
        return run.dry_run(make, out, write, engine=engine, workers=jobs, texts=texts)
    with render.byte_bar(label="write") as bar:
        heard = Listener(bar, bar.expect, saying(), partial(bar.name, "check"))
        return run.run(make, out, write, engine=engine, workers=jobs, listener=heard, texts=texts)


def tell(
    plan: Plan,
    out: str,
    writing: Writing,
    verb: str,
    *,
    lines: Iterable[str],
    json: Mapping[str, render.Json] | None,
    said: str = "",
) -> None:
    """Say the notes, but what was ``said``; then these lines, or with ``json`` what that holds."""
    for note in plan.notes:
        if note not in said:
            say(note)
    if json is None:
        first, *more = lines
        answer(first)
        render.emit(more)
    else:
        written = not writing.dry_run
        schema = f"ckpt-tools/{verb}/1"
        render.emit_json({"schema": schema, "output": out, "written": written, **json})
    if writing.dry_run and (short := run.check_room(out, plan)):
        say(short)


def what(plan: Plan, out: str) -> str:
    """An output in a few words: ``run7-hf: 94 tensors, 4.98 GB in 8 files``."""
    tensors, files = counted(plan.tensors, "tensor"), counted(len(plan.files), "file")
    return f"{out}: {tensors}, {format_size(plan.nbytes)} in {files}"


def took(plan: Plan, started: float) -> str:
    """How long it took to write, since that time of `time.monotonic`, and how fast that was."""
    seconds = time.monotonic() - started
    # Of a few bytes the start is most of the time.
    is_much = seconds >= 1 and plan.nbytes >= _MUCH
    rate = f", {format_size(int(plan.nbytes / seconds))}/s" if is_much else ""
    return f"in {seconds:.1f} s{rate}"
