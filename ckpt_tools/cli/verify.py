"""`ckpt-tools verify`: is a checkpoint whole, and is it what it was?"""

from __future__ import annotations

from dataclasses import replace

import click

from ckpt_tools.cli import options, progress, proving, reading, render, verdict
from ckpt_tools.cli.fingerprint import digest
from ckpt_tools.cli.group import say
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import UsageError
from ckpt_tools.formats import ReadOptions, read_index
from ckpt_tools.proof import (
    Comparison,
    Report,
    bytes_to_read,
    compare,
    verify,
    verify_quick,
    with_objects,
)
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

Exit codes: 0 whole, 1 not whole or not the same, 3 not readable at all. --json prints schema
ckpt-tools/verify/1.

""" + options.examples(
    "ckpt-tools verify run7/step-1000",
    "ckpt-tools verify run7/step-1000 --quick",
    "ckpt-tools verify run7/step-1000 --against step-1000.fingerprint.json",
    "ckpt-tools verify run7-hf --against run7/step-1000 --only model",
)

_PARAMS = [
    options.checkpoint(),
    click.Option(["--quick"], is_flag=True, help="Headers only; no values are read."),
    click.Option(
        ["--against"],
        metavar="FILE|CKPT",
        help="Compare the tensors with this fingerprint or checkpoint; filters choose which.",
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
    ckpt: str,
    quick: bool,
    against: str | None,
    threads: int,
    json: bool,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    only: str,
    allow_global: tuple[str, ...],
) -> None:
    """Verify all of the checkpoint, then compare what the filters choose; exit with 1 for no."""
    chosen = options.Filters.of(include, exclude, only)
    if not chosen.wants_all and against is None:
        raise UsageError(
            "A checkpoint is verified as a whole; --include, --exclude and --only choose what "
            "--against compares."
        )
    read = ReadOptions(allow_global)
    index = read_index(ckpt, options=read)  # the report has its notes
    report = _report(index, quick=quick, threads=threads)
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


def _report(index: CheckpointIndex, *, quick: bool, threads: int) -> Report:
    with Files() as files:
        if quick:
            return verify_quick(index, files)
        with progress.byte_bar(bytes_to_read(index), label="verify") as on_bytes:
            return verify(index, files, threads=threads, on_bytes=on_bytes)


def _compare(
    index: CheckpointIndex,
    against: str,
    chosen: options.Filters,
    *,
    read: ReadOptions,
    threads: int,
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
