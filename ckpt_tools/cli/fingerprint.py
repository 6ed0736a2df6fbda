"""`ckpt-tools fingerprint`: a digest of each section that no format and no sharding changes."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass

from ckpt_tools.cli import choosing, options, render
from ckpt_tools.copying import one_file
from ckpt_tools.core.names import Filters
from ckpt_tools.core.options import option
from ckpt_tools.errors import AnswerNo
from ckpt_tools.formats.frameworks import sources_of
from ckpt_tools.proof.fingerprint import fingerprint
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the command line asks for."""

    ckpt: str = options.ckpt()
    long: bool = option(False, "-l --long", "Also print the digest of every tensor.")
    write: str | None = option(
        None, "--write", "Save the fingerprint in this file.", metavar="FILE"
    )
    force: bool = option(False, "--force", "Replace an existing FILE.")
    threads: int | None = options.threads()
    json: bool = options.as_json()
    filters: Filters
    reading: choosing.Reading


@options.command("fingerprint", _Asked, help=_HELP)
def command(asked: _Asked) -> None:
    """Digest the chosen tensors, then print and keep what came out."""
    ckpt, target, force = asked.reading.find(asked.ckpt), asked.write, asked.force
    if target is not None:
        one_file.admit(target, sources=[ckpt], force=force)
    index = choosing.read(ckpt, asked.reading.options)
    sources = [ckpt, *sources_of(index)]
    if target is not None:
        one_file.admit(target, sources=sources, force=force)
    chosen = choosing.choose(index, asked.filters)
    with render.byte_bar(chosen.count.nbytes, label="fingerprint") as on_bytes, Files() as files:
        digests = fingerprint(chosen, files, threads=asked.threads, on_bytes=on_bytes)
    if not chosen.tensors:
        raise AnswerNo(f"{chosen.root} has no tensors to digest.")
    if target is not None:
        data = jsonlib.dumps(digests.to_dict(), indent=1).encode() + b"\n"
        one_file.write(target, data, sources=sources, force=force)
    if asked.json:
        render.emit_json(digests.to_dict())
        return
    render.emit(f"{section:<6} {value}" for section, value in digests.sections.items())
    if asked.long:
        render.emit(f"{t.sha256}  {t.fqn}" for t in digests.tensors)
