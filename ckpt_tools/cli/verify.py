"""`ckpt-tools verify`: is a checkpoint complete, undamaged and unchanged?

The command, and its report as lines for people and as JSON.
"""

from __future__ import annotations

import glob
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import click

from ckpt_tools.cli import choosing, options, render
from ckpt_tools.cli.group import error_json, say
from ckpt_tools.core import records
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.core.names import Filters
from ckpt_tools.core.options import option
from ckpt_tools.core.text import counted, first_of, format_size, rank_spans, some
from ckpt_tools.errors import AnswerNo, CkptError, UsageError
from ckpt_tools.formats import Saved, read_index, run_of
from ckpt_tools.proof.verify import (
    VerifyReport,
    bytes_to_read,
    describe,
    expecting_ranks,
    verify,
    verify_quick,
)
from ckpt_tools.storage.reader import Files

if TYPE_CHECKING:  # --against imports them: most runs read and compare nothing
    from ckpt_tools.proof.compare import Comparison
    from ckpt_tools.transforms.rank_states import RankStates

_HELP = """Check that a checkpoint is complete; say what is damaged, and what is still complete.

Every byte is read once, every CRC-32 is checked, and replicas are compared. --quick reads headers
only: files and their lengths, coverage, overlaps, ranks, the shapes of items, and whether model and
optimizer belong together.

Only torch.save archives have checksums: the report says how many bytes have none. No checksum
shows that a file is of an older save. --against does: it compares with a fingerprint that was
written when the checkpoint was good, or with another checkpoint; objects are compared, too, if
that checkpoint has the same format and names. States of ranks (random states, data positions) that
a reshard of that checkpoint leaves out for this number of ranks are named and are no difference.

For several checkpoints, or a folder of several, it prints one line each, and the exit code is the
worst of all. --json then prints schema ckpt-tools/verify-list/1.

Exit codes: 0 complete, 1 damaged, incomplete or different, 3 not readable. --json prints schema
ckpt-tools/verify/1.

""" + options.examples(
    "ckpt-tools verify run7/step-1000",
    "ckpt-tools verify run7/step-1000 --quick",
    "ckpt-tools verify run7 --quick",
    "ckpt-tools verify run7/step-1000 --against step-1000.fingerprint.json",
    "ckpt-tools verify run7-hf --against run7/step-1000 --only model --cast",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpts: tuple[str, ...] = options.ckpts()
    quick: bool = option(False, "--quick", "Read headers only, no values.")
    against: str | None = option(
        None,
        "--against",
        "Compare the tensors that the filters choose with this fingerprint or checkpoint.",
        metavar="FILE|CKPT",
    )
    cast: bool = option(
        False,
        "--cast",
        "With --against CKPT: where floating types differ, cast its values as export --dtype does.",
    )
    expect_ranks: int | None = option(
        None,
        "--expect-ranks",
        "The job had N ranks: each must have a file.",
        metavar="N",
        at_least=1,
    )
    threads: int | None = options.threads()
    json: bool = options.as_json()
    filters: Filters
    reading: choosing.Reading


@options.command("verify", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Verify all of the checkpoint, then compare what the filters choose; exit with 1 for no."""
    chosen, against, json = asked.filters, asked.against, asked.json
    if not chosen.wants_all and against is None:
        raise UsageError(
            "verify always checks everything; --include, --exclude and --only choose only what "
            "--against compares."
        )
    if asked.cast and against is None:
        raise UsageError("--cast says how --against compares: give both.")
    ckpts, read = [*map(asked.reading.find, asked.ckpts)], asked.reading.options
    several = [saved.path for ckpt in ckpts for saved in run_of(ckpt) or [Saved(ckpt, None)]]
    if len(several) > 1 or several != ckpts:
        if against is not None:
            raise UsageError("--against compares one checkpoint; several were given.")
        _each(several, asked)
        return
    index = read_index(ckpts[0], options=read)  # the report has its notes
    report = _report(index, asked)
    other: _Against | None = None
    if against is not None and (report.damaged or report.lost or report.rescued):
        other = _Against(against)
    elif against is not None:
        # What else is wrong, a lost file that only held replicas, keeps no tensor from being read.
        readable = replace(index, problems=())
        other = _compare(readable, against, asked)
    if json:
        render.emit_json(as_json(report, other))
    else:
        render.emit(lines(report, other))
    if not report.whole and (newest := choosing.newest_complete()):
        say(newest)
    if not report.whole or (other is not None and not other.same):
        click.get_current_context().exit(1)


class _Against(NamedTuple):
    """What was found in comparison with ``path``; None when tensors could not be compared.

    ``left_out`` are states of ranks that the other side has, and a conversion leaves out.
    """

    path: str
    compared: Comparison | None = None
    left_out: tuple[RankStates, ...] = ()

    @property
    def same(self) -> bool:
        return self.compared is not None and self.compared.same


def _report(index: CheckpointIndex, asked: _Asked) -> VerifyReport:
    """Verify by headers alone, or by reading all."""
    with Files() as files:
        if asked.quick:
            with render.clock("checking the index"):
                report = verify_quick(index, files)
        else:
            with render.byte_bar(bytes_to_read(index), label="verify") as on_bytes:
                report = verify(index, files, threads=asked.threads, on_bytes=on_bytes)
    ranks = asked.expect_ranks
    return report if ranks is None else expecting_ranks(report, index, ranks)


def _each(ckpts: Sequence[str], asked: _Asked) -> None:
    """One line or object a checkpoint, unreadable ones too; exits with the worst code."""
    objects: list[render.Json] = []
    worst = 0
    for ckpt in ckpts:
        try:
            report = _report(read_index(ckpt, options=asked.reading.options), asked)
        except CkptError as error:
            worst = max(worst, error.exit_code)
            message, said = error.message, error_json(error)
            objects.append({"path": ckpt, "readable": False, "problem": message, "error": said})
            lines = [f"{ckpt}: UNREADABLE: {error.first_line}"]
        else:
            worst = max(worst, 0 if report.whole else 1)
            objects.append(as_json(report, None))
            lost = first_of(_all_lost(report), _FEW)
            lines = [line(ckpt, report), *(f"  lost  {one}" for one in lost)]
            lines += [f"  rescue  {command}" for _, command in _rescue(report)]
        if not asked.json:
            render.emit(lines)
    if asked.json:
        render.emit_json({"schema": "ckpt-tools/verify-list/1", "checkpoints": objects})
    if worst:
        click.get_current_context().exit(worst)


def _compare(index: CheckpointIndex, against: str, asked: _Asked) -> _Against:
    """Compare the chosen tensors with a fingerprint, or with those of another checkpoint."""
    from ckpt_tools.proof.compare import compare, compare_checkpoints
    from ckpt_tools.proof.fingerprint import is_fingerprint, load
    from ckpt_tools.transforms.rank_states import without_left_out

    chosen, threads = asked.filters, asked.threads
    if is_fingerprint(against):
        if asked.cast:
            raise UsageError("--cast needs a checkpoint: a fingerprint has no values to cast.")
        reference = load(against)
        mine = choosing.chosen_in(index, chosen)
        choosing.say_idle(chosen, [index], also=(one.fqn for one in reference.tensors))
        if not chosen.wants_all:
            reference = reference.select(chosen.include, chosen.exclude, chosen.only)
        with _comparing(mine) as on_bytes, Files() as files:
            compared = compare(mine, reference, files, threads=threads, on_bytes=on_bytes)
        return _Against(against, compared)
    say(f"Reading {against} for comparison.")
    other = asked.reading.read(against)
    mine, theirs = choosing.chosen_in(index, chosen), choosing.chosen_in(other, chosen)
    choosing.say_idle(chosen, [index, other])
    with Files() as files:
        theirs, mine, left_out = without_left_out(theirs, mine, files)
        with _comparing(mine, theirs) as on_bytes:
            compared = compare_checkpoints(
                mine, theirs, files, cast=asked.cast, threads=threads, on_bytes=on_bytes
            )
    if not asked.cast and any(one.what == "dtype" for one in compared.differences):
        say(f"Types differ. For what export --dtype wrote: verify {mine.root} --against … --cast.")
    return _Against(other.root, compared, left_out)


@contextmanager
def _comparing(*sides: CheckpointIndex) -> Iterator[Callable[[int], None]]:
    """A bar for the bytes of all sides. Raises AnswerNo for one without tensors."""
    for index in sides:
        if not index.tensors:
            raise AnswerNo(f"{index.root} has no tensors to compare.")
    with render.byte_bar(sum(one.count.nbytes for one in sides), label="compare") as on_bytes:
        yield on_bytes


_SHOWN = 10
_UNCOMPARED = "only a fingerprint proves them (--against)"
_COMPARED = "those of the tensors compared are proven below"
_DIFFERENT = "not all of it is the same below"
_FEW = 3  # lost tensors of one of several checkpoints


def lines(report: VerifyReport, other: _Against | None) -> Iterator[str]:
    """The report for a person."""
    how = "" if report.reading is not None else ", by its headers"
    but, beyond = "", _UNCOMPARED
    if other is not None and other.compared is not None:
        but = "" if other.same else f", but not the same as {other.path}"
        beyond = _COMPARED if other.same else _DIFFERENT
    yield render.heading(f"{report.root}: {report.verdict}{how}{but}")
    yield from render.facts(_facts(report, beyond))
    if other is not None:
        yield from render.facts(_comparison(other))


def line(path: str, report: VerifyReport) -> str:
    """The report in one line."""
    how = "" if report.reading is not None else ", by its headers"
    if report.whole:
        return f"{path}: complete{how}"
    first = report.problems[0].first_line
    more = f" (and {len(report.problems) - 1:,} more)" if len(report.problems) > 1 else ""
    return f"{path}: {report.verdict}{how}: {first}{more}"


def _facts(report: VerifyReport, beyond: str) -> Iterator[render.Fact]:
    problems = [f"{one.message}\n{one.hint or ''}".strip("\n") for one in report.problems]
    said = list(dict.fromkeys(problems))
    for text in said[:_SHOWN]:
        yield "problem", text.split("\n")
    if len(said) > _SHOWN:
        yield "", f"and {len(said) - _SHOWN:,} more problems; --json has all"
    for problem in report.unread[:_SHOWN]:
        yield "not read", problem.message
    yield "tensors", _tensors(report)
    if lost := _all_lost(report):
        yield "lost", first_of(lost, _SHOWN)
        yield from _rescue(report)
    if report.rescued:
        saved = [f"{r.fqn} {r.box} of {r.lost} is also in {r.held_by}" for r in report.rescued]
        yield "in replicas", first_of(saved, _SHOWN)
    if report.damaged_objects:
        shown = some(report.damaged_objects, _SHOWN)
        yield "objects", f"{len(report.damaged_objects)} of {report.objects} damaged: {shown}"
    if report.ranks:
        intact = rank_spans([state.rank for state in report.ranks if state.whole])
        damaged = rank_spans([state.rank for state in report.ranks if not state.whole])
        text = f"{intact} intact" if intact else "none is intact"
        yield "ranks", f"{text}; {damaged} damaged" if damaged else text
    yield from _proof(report, beyond)
    if report.notes:
        yield "notes", report.notes


def _tensors(report: VerifyReport) -> str:
    lost = f", {len(report.lost):,} missing" if report.lost else ""
    if report.damaged:
        damaged = f"{len(report.damaged):,} of {report.tensors:,} damaged"
        return f"{damaged}, {report.tensors - len(report.damaged):,} complete{lost}"
    if lost or any(not problem.about for problem in report.problems):
        there = "all {:,} that exist are" if report.tensors != 1 else "the {} that exists is"
    else:
        there = "all {:,} are" if report.tensors != 1 else "the only one is"
    return f"{there.format(report.tensors)} complete{lost}"


def _all_lost(report: VerifyReport) -> list[str]:
    """What is lost of each tensor, and which ranks held it."""
    lost = []
    for one in report.damaged:
        if one.lost:
            where = some([describe(box, one.shape) for box in one.lost], _SHOWN)
            word = "rank" if len(one.ranks) == 1 else "ranks"
            ranks = f" ({word} {rank_spans(one.ranks)})" if one.ranks else ""
            lost.append(f"{one.fqn}: {where}{ranks}")
    return lost + [f"{fqn}: all of it" for fqn in report.lost]


def _rescue(report: VerifyReport) -> Iterator[render.Fact]:
    """The command that writes what is complete of the model, where that is most of it."""
    gone = {one.fqn: one.section for one in report.damaged if one.lost}
    names = [name for name, section in gone.items() if section == "model"]
    is_most = len(names) <= _FEW and not report.lost and len(gone) < report.tensors
    if gone and is_most:
        without = "".join(f" -x {shlex.quote(glob.escape(name))}" for name in names)
        yield "rescue", f"ckpt-tools export {shlex.quote(report.root)} -o OUT{without}"


def _proof(report: VerifyReport, beyond: str) -> Iterator[render.Fact]:
    """What this run proves, and what it cannot know; ``beyond`` is of bytes without checksums."""
    reading = report.reading
    if reading is None:
        consistent = "headers are consistent: files, lengths, coverage, shapes"
        yield "proven", consistent if report.whole else "nothing"
        yield "not proven", "the values: only headers were read"
        return
    checked = f"{format_size(reading.checked_bytes)} by {counted(reading.crcs, 'CRC-32')}"
    readable = "that every byte can be read" if report.whole else "nothing"
    said = checked if reading.crcs else readable
    if report.whole and reading.checked_bytes + reading.plain_bytes < report.file_bytes:
        said += f"; the rest of {format_size(report.file_bytes)} is headers and padding"
    yield "proven", said
    if reading.plain_bytes:
        first, *others = map(os.path.basename, reading.plain_files)
        where = f"in {1 + len(others)} files" if others else f"of {first}"
        plain = f"{format_size(reading.plain_bytes)} {where}"
        yield "not proven", f"{plain} have no checksum; {beyond}"


def _comparison(other: _Against) -> Iterator[render.Fact]:
    against, compared = other.path, other.compared
    if compared is None:
        yield "against", f"{against}: not compared, because tensors are damaged"
        return
    if not compared.compared:
        yield "against", f"{against}: it has no tensors to compare with"
        return
    counts = Counter(one.section for one in compared.differences)
    differing = [
        f"{section}: none of its {counted(counts[section], 'tensor')} is here; --only compares one "
        "section"
        for section in compared.absent
    ]
    said = {"missing": " is missing", "extra": " is only here", "values": " has other values"}
    for one in compared.differences:
        what = said.get(one.what, f" is {one.found}, not {one.expected}")
        if one.what == "object" and not (one.found and one.expected):
            what = f", an object, is {'only here' if one.found else 'missing'}"
        if one.section not in compared.absent:
            differing.append(f"{one.section}: {one.name}{what}")
    casts = "".join(f", {many:,} cast from {types}" for types, many in compared.casts.items())
    same = f"the same, bit for bit{casts}"
    found = counted(len(compared.differences), "difference") if differing else same
    left_out = ", ".join(map(str, other.left_out))
    more = f"; left out on purpose: {left_out}" if left_out else ""
    result = f"{against}: {found} ({', '.join(compared.compared)}){more}"
    yield "against", [result, *first_of(differing, _SHOWN)]
    if compared.extra:
        yield "", f"not compared, because the other side has none: {', '.join(compared.extra)}"


def as_json(report: VerifyReport, other: _Against | None) -> dict[str, render.Json]:
    """The object of schema ckpt-tools/verify/1, with what --against found."""
    if other is None:
        return report.to_dict() | {"against": None}
    from ckpt_tools.proof.compare import Comparison

    compared = other.compared or Comparison((), (), (), ())
    against: dict[str, render.Json] = {
        "path": other.path,
        "compared": compared.compared,
        "not_compared": compared.extra,
        "same": other.same,
        "casts": dict(compared.casts),
        "left_out": records.as_json(other.left_out),
        "differences": records.as_json(compared.differences),
    }
    return report.to_dict() | {"against": against}
