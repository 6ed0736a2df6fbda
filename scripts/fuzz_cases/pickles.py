"""A pickle with some bytes changed: refused with one error, or read as torch reads it."""

from __future__ import annotations

import json
import random
import re
import shlex
import warnings
import zipfile
from pathlib import Path

import torch
from fuzz_cases import sources, states
from fuzz_cases.commands import Commands, Fault

# Opcodes, and globals that torch's pickles, or nobody's, name.
_OPCODES = b"()0122RaQb]dehjlqstu}\x81\x85\x86\x87\x8f\x90\x91\x92\x93\x94N"
_GLOBALS = (
    b"ctorch\nSize\n",
    b"ccollections\nOrderedDict\n",
    b"cnumpy\nndarray\n",
    b"cargparse\nNamespace\n",
    b"cmine\nThing\n",
    b"cos\nsystem\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
)
# What the command that an error ends with does without.
_LEFT_OUT = re.compile(r" -x ('[^']*'|\S+)")


def change(rng: random.Random, folder: Path, commands: Commands) -> None:
    """Change the pickle of a checkpoint, not its checksums, and look at what is left."""
    state = states.state_dict(rng)
    source = sources.write(rng, state, folder / "source", rng.choice(("pt", "pt", "old pt", "dcp")))
    file = source.path / ".metadata" if source.form == "dcp" else source.path
    rewrite = _in_zip if source.form == "pt" else _in_file
    rewrite(rng, file)
    listed = commands.run("ls", source.path, "--json")
    commands.run("inspect", source.path, "--all")
    if source.form == "pt":
        refused = commands.run("diff", source.path, source.path).stderr
        if listed.code == 0:
            _compare(json.loads(listed.stdout)["entries"], source.path, refused)


def _in_file(rng: random.Random, file: Path) -> None:
    file.write_bytes(_changed(rng, file.read_bytes()))


def _in_zip(rng: random.Random, file: Path) -> None:
    """Change the ``data.pkl`` of a file of torch.save, which stays a right zip archive."""
    with zipfile.ZipFile(file) as archive:
        records = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            is_pickle = name.endswith("/data.pkl")
            archive.writestr(name, _changed(rng, content) if is_pickle else content)


def _changed(rng: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 6, 12))):
        at = rng.randrange(len(found) + 1)
        other = rng.randrange(len(found) + 1)
        length = rng.choice((1, 2, 9, 40, 300))
        way = rng.choice(("byte", "bit", "opcode", "lost", "global", "twice"))
        if way == "lost":
            del found[at : at + length]
        elif way in ("global", "twice"):
            part = rng.choice(_GLOBALS) if way == "global" else found[other : other + length]
            found[at:at] = part
        elif at < len(found):
            bit = found[at] ^ 1 << rng.randrange(8)
            found[at] = {"byte": rng.randrange(256), "bit": bit}.get(way, rng.choice(_OPCODES))
    return bytes(found)


def _compare(listed: list[dict[str, object]], file: Path, refused: str) -> None:
    """Raise Fault where torch loads a tensor that was not listed, or listed as another.

    An entry that was refused by its name may hold tensors: a dict with a key that is no name does.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(file, weights_only=True, map_location="cpu")
    except Exception:  # noqa: BLE001 (anything can be in it)
        return
    if states.has_twins(loaded) or isinstance(loaded, torch.Tensor):  # which has no name
        return
    truth = states.tensors(loaded)
    named = {name for name in truth if "<" not in name}  # a key can be any object
    left_out = _LEFT_OUT.findall(refused)
    closed = [f"{one['fqn']}." for one in listed if shlex.quote(str(one["fqn"])) in left_out]
    lost = {name for name in named if not name.startswith((*closed,))}
    lost -= {str(one["fqn"]) for one in listed}
    if lost:
        raise Fault(f"not listed, and torch loads {sorted(lost)}")
    for one in listed:
        value = truth.get(str(one["fqn"]))
        if value is not None and one["kind"] == "tensor":
            found = one["dtype"], one["shape"]
            right = str(value.dtype).removeprefix("torch."), list(value.shape)
            if found != right:
                raise Fault(f"{one['fqn']!r} is {found}, and torch loads {right}")
