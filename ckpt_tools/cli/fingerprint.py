"""`ckpt-tools fingerprint`: a digest of each section that no format and no sharding changes."""

from __future__ import annotations

import json as jsonlib

import click

from ckpt_tools.cli import asked, options, progress, render
from ckpt_tools.copying import one_file
from ckpt_tools.core.index import CheckpointIndex
from ckpt_tools.errors import AnswerNo
from ckpt_tools.formats.frameworks import sources_of
from ckpt_tools.proof.fingerprint import Fingerprint, fingerprint, to_json
from ckpt_tools.storage.reader import Files

_HELP = """Print a SHA-256 digest for each section of the checkpoint: model, optim, other.

The same tensors give the same digests, from FSDP1 or FSDP2, as a DCP directory on any mesh, as rank
files, as one torch file or as safetensors: containers (app.model) and wrapper components are
removed from names. Only tensors count, not numbers or pickled objects. -l adds the digest of every
tensor, the SHA-256 of its row-major little-endian bytes.

--write saves all digests in a JSON file (schema ckpt-tools/fingerprint/1). Write one right after a
save: `ckpt-tools verify --against FILE` then finds any later change.

""" + options.examples(
    "ckpt-tools fingerprint run7/step-1000",
    "ckpt-tools fingerprint run7/step-1000 --write step-1000.fingerprint.json",
    "ckpt-tools fingerprint run7/step-1000 --json | jq -r .digest",
)

_PARAMS = [
    options.checkpoint(),
    click.Option(["-l", "--long"], is_flag=True, help="Also print the digest of every tensor."),
    click.Option(["--write", "target"], metavar="FILE", help="Save the fingerprint in this file."),
    click.Option(["--force"], is_flag=True, help="Replace an existing FILE."),
    options.threads(),
    options.as_json(),
    *options.filters(),
    *options.reading(),
    *options.talk(),
]


@click.command("fingerprint", cls=options.Command, help=_HELP, params=_PARAMS)
def command(
    *,
    ckpt: str,
    long: bool,
    target: str | None,
    force: bool,
    threads: int | None,
    json: bool,
    **_shared: object,
) -> None:
    """Digest the chosen tensors, then print and keep what came out."""
    if target is not None:
        one_file.admit(target, sources=[ckpt], force=force)
    index = options.read(ckpt, asked.reading())
    sources = [ckpt, *sources_of(index)]
    if target is not None:
        one_file.admit(target, sources=sources, force=force)
    chosen = options.choose(index, asked.filters())
    digests = digest(chosen, threads=threads)
    if target is not None:
        data = jsonlib.dumps(to_json(digests), indent=1).encode() + b"\n"
        one_file.write(target, data, sources=sources, force=force)
    if json:
        render.emit_json(to_json(digests))
        return
    render.emit(f"{section:<6} {value}" for section, value in digests.sections.items())
    if long:
        render.emit(f"{t.sha256}  {t.fqn}" for t in digests.tensors)


def digest(index: CheckpointIndex, *, threads: int | None) -> Fingerprint:
    """The fingerprint of these tensors, with a bar. Raises AnswerNo when there are none."""
    with progress.byte_bar(index.count.nbytes, label="fingerprint") as on_bytes, Files() as files:
        digests = fingerprint(index, files, threads=threads, on_bytes=on_bytes)
    if not index.tensors:
        raise AnswerNo(f"{index.root} has no tensors to digest.")
    return digests
