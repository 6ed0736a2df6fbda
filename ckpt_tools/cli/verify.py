"""`ckpt-tools verify`: is a checkpoint whole, and is it what it was?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import click

from ckpt_tools.cli import asked, options, progress, proving, reading, render, verdict
from ckpt_tools.cli.fingerprint import digest
from ckpt_tools.cli.group import say
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats import ReadOptions, Saved, read_index, run_of
from ckpt_tools.proof import (
    Comparison,
    Report,
    bytes_to_read,
    compare,
    verify,
    verify_quick,
    with_objects,
)
from ckpt_tools.proof.expected_ranks import expecting_ranks
from ckpt_tools.proof.fingerprint_file import is_fingerprint, load
from ckpt_tools.storage.reader import Files

_HELP = """Check that a checkpoint is whole; say what is hurt, and what is still whole.

Every byte range is read once and every CRC-32 is checked, several at a time, and replicas are
compared with one another. --quick reads headers only: files and their lengths, coverage, overlaps,
ranks, the shapes of items, both halves of a checkpoint.

Only torch.save archives carry checksums: the report says how many bytes have none. No checksum
tells this save's file from the same file of an older save either. --against does, with the
fingerprint that was written when the checkpoint was good, or with another checkpoint; when that is
of the same format and names, its objects are compared, too.

Of several checkpoints, or of a folder of several, there is one line each, and the exit code is the
worst of all. --json then prints schema ckpt-tools/verify-list/1.

Exit codes: 0 whole, 1 not whole or not the same, 3 not readable at all. --json prints schema
ckpt-tools/verify/1.

""" + options.examples(
    "ckpt-tools verify run7/step-1000",
    "ckpt-tools verify run7/step-1000 --quick",
    "ckpt-tools verify run7 --quick",
    "ckpt-tools verify run7/step-1000 --against step-1000.fingerprint.json",
    "ckpt-tools verify run7-hf --against run7/step-1000 --only model",
)

_PARAMS = [
    options.checkpoints(),
    click.Option(["--quick"], is_flag=True, help="Headers only; no values are read."),
    click.Option(
        ["--against"],
        metavar="FILE|CKPT",
        help="Compare the tensors with this fingerprint or checkpoint; filters choose which.",
    ),
    click.Option(
        ["--expect-ranks"],
        metavar="N",
        type=click.IntRange(min=1),
        help="The job had N ranks: each of them must have left a file.",
    ),
    proving.threads(),
    options.as_json(),
    *options.filters(),
    *options.reading(),
    *options.talk(),
]


@click.command("verify", cls=options.Command, help=_HELP, params=_PARAMS)
def command(
    *,
    ckpts: tuple[str, ...],
    quick: bool,
    against: str | None,
    expect_ranks: int | None,
    threads: int | None,
    json: bool,
    **_shared: object,
) -> None:
    """Verify all of the checkpoint, then compare what the filters choose; exit with 1 for no."""
    chosen = asked.filters()
    if not chosen.wants_all and against is None:
        raise UsageError(
            "A checkpoint is verified as a whole; --include, --exclude and --only choose what "
            "--against compares."
        )
    read = asked.reading()
    several = [saved.path for ckpt in ckpts for saved in run_of(ckpt) or [Saved(ckpt, None)]]
    if len(several) > 1 or several != list(ckpts):
        if against is not None:
            raise UsageError("--against compares one checkpoint; here are several.")
        _each(several, read, _Reader(quick=quick, threads=threads, ranks=expect_ranks), json=json)
        return
    index = read_index(ckpts[0], options=read)  # the report has its notes
    report = _Reader(quick=quick, threads=threads, ranks=expect_ranks).report(index)
    compared: Comparison | None = None
    if against is not None and not (report.hurt or report.lost or report.rescued):
        # What else is wrong, a lost file that only held replicas, keeps no tensor from being read.
        readable = replace(index, problems=())
        compared = _compare(readable, against, chosen, read=read, threads=threads)
    if json:
        render.emit_json(verdict.as_json(report, compared, against=against))
    else:
        render.emit(verdict.lines(report, compared, against=against))
    if not report.whole or (against is not None and (compared is None or not compared.same)):
        click.get_current_context().exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """How checkpoints are verified: by headers alone, or by reading all of each.

    ``ranks`` is of how many ranks there must be files, None for what the checkpoint says.
    """

    quick: bool
    threads: int | None
    ranks: int | None

    def report(self, index: CheckpointIndex) -> Report:
        report = self._read(index)
        return report if self.ranks is None else expecting_ranks(report, index, self.ranks)

    def _read(self, index: CheckpointIndex) -> Report:
        with Files() as files:
            if self.quick:
                return verify_quick(index, files)
            with progress.byte_bar(bytes_to_read(index), label="verify") as on_bytes:
                return verify(index, files, threads=self.threads, on_bytes=on_bytes)


def _each(ckpts: Sequence[str], read: ReadOptions, reader: _Reader, *, json: bool) -> None:
    """One line or object a checkpoint, going on after one that cannot be read; the worst code."""
    objects: list[render.Json] = []
    worst = 0
    for ckpt in ckpts:
        try:
            report = reader.report(read_index(ckpt, options=read))
        except CkptError as error:
            worst = max(worst, error.exit_code)
            objects.append({"path": ckpt, "readable": False, "problem": error.message})
            lines = [f"{render.printable(ckpt)}: UNREADABLE: {error.message.splitlines()[0]}"]
        else:
            worst = max(worst, 0 if report.whole else 1)
            objects.append(verdict.as_json(report, None, against=None))
            lines = [verdict.line(ckpt, report)]
        if not json:
            render.emit(lines)
    if json:
        render.emit_json({"schema": "ckpt-tools/verify-list/1", "checkpoints": objects})
    if worst:
        click.get_current_context().exit(worst)


def _compare(
    index: CheckpointIndex,
    against: str,
    chosen: options.Filters,
    *,
    read: ReadOptions,
    threads: int | None,
) -> Comparison:
    """Compare the chosen tensors with a fingerprint, or with those of another checkpoint."""
    if is_fingerprint(against):
        reference = load(against)
        if not chosen.wants_all:
            reference = reference.select(chosen.include, chosen.exclude, chosen.only)
    else:
        say(f"Reading {against} to compare with.")
        other = reading.read(against, read)
        mine, theirs = reading.choose(index, chosen), reading.choose(other, chosen)
        digests = (digest(one, threads=threads) for one in (mine, theirs))
        with Files() as files:
            return with_objects(compare(*digests), mine, theirs, files)
    return compare(digest(reading.choose(index, chosen), threads=threads), reference)
