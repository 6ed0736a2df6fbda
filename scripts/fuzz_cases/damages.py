"""One file of a checkpoint cut, hurt or lost: noticed, or what comes out is still the truth."""

from __future__ import annotations

import os
import random
from pathlib import Path

from fuzz_cases import conversions, sources, states
from fuzz_cases.commands import Commands, Fault
from fuzz_cases.conversions import FORMS
from fuzz_cases.sources import Source
from fuzz_cases.states import State


def damage(rng: random.Random, folder: Path, commands: Commands) -> None:
    """Hurt a checkpoint, then look at it, prove it and convert it."""
    state = states.state_dict(rng)
    source = sources.write(rng, state, folder / "source", rng.choice(FORMS))
    files = [source.path] if source.path.is_file() else sorted(source.path.iterdir())
    file = rng.choice(files)
    way = rng.choice(("cut", "flip", "flip", "flip", "zeros", "lost"))
    if way == "lost" and (len(files) == 1 or file.stat().st_size == 0):
        way = "flip"
    commands.log.append(f"{way} {_hurt(rng, file, way)}")
    is_told = commands.run("verify", source.path).code != 0
    for words in (("verify", "--quick"), ("inspect", "--all"), ("fingerprint",), ("ls", "-l")):
        commands.run(words[0], source.path, *words[1:])
    form = rng.choice(("pt", "safetensors", "dcp", "ranks"))
    truth = states.tensors(source.state)
    hop = conversions.hop_of(rng, source, form, folder / "out")
    commands.write(source, hop.out, *hop.words, reasons=("damage",))
    found = conversions.whole_of(Source(hop.out, form, {}), commands)
    if not is_told:  # conversions check no checksum of a source; that is what verify is for
        _judge(found, truth, is_limit=_is_limit(source, file, way))


def _hurt(rng: random.Random, file: Path, way: str) -> str:
    """Do a damage to a file; says what it was."""
    if way == "lost":
        file.unlink()
        return file.name
    content = bytearray(file.read_bytes())
    if not content:
        return f"nothing of {file.name}"
    at = rng.randrange(len(content))
    if way == "cut":
        os.truncate(file, at)
        return f"{file.name} at {at}"
    if way == "zeros":
        length = min(rng.choice((1, 8, 64, 512)), len(content) - at)
        content[at : at + length] = bytes(length)
    else:
        length = min(rng.choice((1, 1, 1, 4, 16)), len(content) - at)
        for place in range(at, at + length):
            content[place] ^= 1 << rng.randrange(8) if length == 1 else rng.randrange(1, 256)
    file.write_bytes(content)
    return f"{length} bytes of {file.name} at {at}"


def _is_limit(source: Source, file: Path, way: str) -> str | None:
    """What nothing in the format can tell of this damage: see docs/check.md.

    ``values``: no checksum covers the tensors. ``names``: they are in a pickle without one.
    """
    if way == "lost":
        return None
    if source.form == "old pt" or file.suffix in (".safetensors", ".json"):
        return "values"
    return "names" if file.name == ".metadata" else None


def _judge(found: State, truth: State, *, is_limit: str | None) -> None:
    """Raise Fault where the output has other tensors than the source had."""
    if is_limit == "values":
        return
    for name, value in found.items():
        if name not in truth and is_limit == "names":
            continue
        if name not in truth:
            raise Fault(f"exit code 0, and {name} is there, which never was")
        if states.spelled(value) != states.spelled(truth[name]):
            raise Fault(f"exit code 0, and {name} has other values")
    if is_limit is None and found.keys() != truth.keys():
        raise Fault(f"exit code 0, and {sorted(truth.keys() - found.keys())} are lost")
