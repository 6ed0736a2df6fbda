"""One conversion or several in a row; what comes out is what torch makes of the same state dict."""

from __future__ import annotations

import copy
import math
import pickle
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from fuzz_cases import sources, states
from fuzz_cases.commands import Commands, Fault
from fuzz_cases.sources import Source
from fuzz_cases.states import State
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

FORMS = ("pt", "dcp", "ranks", "old pt", "safetensors")
_MESHES = ("1", "2", "3", "4", "2x2", "1x3", "dp_shard=2,tp=2", "dp_shard=3,tp=2", "a=2,b=1,c=2")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES |= {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
_DTYPES |= {"fp64": torch.float64}
if torch.tensor(1e9).to(torch.float8_e4m3fn).double().isnan():  # as torch had it before 2.13
    del _DTYPES["float8_e4m3fn"]
# Beside codes of these types a float may be their scale, and --dtype then refuses to cast it.
_CODES = (*states.WHOLES, *states.SMALL_FLOATS, *states.PACKED)


@dataclass(frozen=True, slots=True)
class Hop:
    """A command that writes ``out`` in the format ``form``, and what it may be refused for."""

    form: str
    out: Path
    words: tuple[str | Path, ...]
    reasons: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()
    placed: tuple[Placement, ...] | None = None


def convert(rng: random.Random, folder: Path, commands: Commands) -> None:
    """One conversion with any options."""
    is_cast = rng.random() < 0.25
    source = _source(rng, folder, can_be_nan=not is_cast)
    read(source, commands)
    form = rng.choice(("pt", "safetensors", "dcp", "ranks"))
    hop = hop_of(rng, source, form, folder / "out")
    if is_cast:
        source, hop = _cast(rng, source, hop)
    elif rng.random() < 0.2:
        _filter(rng, source, hop, commands)
        return
    _carry_out(rng, source, hop, commands)


def chain(rng: random.Random, folder: Path, commands: Commands) -> None:
    """Two to four conversions in a row, and the first source's fingerprint in the end."""
    source = _source(rng, folder)
    first = commands.json("fingerprint", source.path) if _is_read(source) else None
    forms = [rng.choice(("pt", "dcp", "ranks")) for _ in range(rng.choice((1, 2, 2, 3)))]
    for place, form in enumerate([*forms, rng.choice(("pt", "safetensors", "dcp"))]):
        hop = hop_of(rng, source, form, folder / f"out{place}")
        source = _carry_out(rng, source, hop, commands)
    if first is None:
        return
    told = first["sections"], commands.json("fingerprint", source.path)["sections"]
    if told[0] != told[1]:
        raise Fault(f"the fingerprint was {told[0]} and is {told[1]}")


def _source(rng: random.Random, folder: Path, *, can_be_nan: bool = True) -> Source:
    state = states.state_dict(rng, can_be_nan=can_be_nan)
    return sources.write(rng, state, folder / "source", rng.choice(FORMS))


def _is_read(source: Source) -> bool:
    return not states.has_twins(source.state) and not states.has_wrapped_twins(source.state)


def read(source: Source, commands: Commands) -> None:
    """The commands that only look agree with torch about a sound checkpoint."""
    if not _is_read(source):
        commands.run("verify", source.path)
        return
    whole = commands.json("verify", source.path)
    if whole["whole"] is not True:
        raise Fault(f"verify finds fault with a sound checkpoint: {whole['problems']}")
    found = commands.json("fingerprint", source.path)["tensors"]
    wanted = {
        name: {
            "sha256": sha256(states.content(value)).hexdigest(),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
        }
        for name, value in states.tensors(source.state).items()
    }
    ours = {
        name: {key: told[key] for key in ("sha256", "dtype", "shape")}
        for name, told in found.items()
    }  # type: ignore[attr-defined]
    if ours != wanted:
        raise Fault(f"fingerprint: {_first_difference(ours, wanted)}")


# ------------------------------------------------------------------------------------- the commands


def hop_of(rng: random.Random, source: Source, form: str, out: Path) -> Hop:
    """A command that converts a source, with options of its format, and its reasons to refuse."""
    reasons = ["two entries of one name"] if states.has_twins(source.state) else []
    options: list[str | Path] = []
    if rng.random() < 0.3:
        options.append("--check")
    if rng.random() < 0.2:
        options += ["--threads", "1", "--max-memory", rng.choice(("1MiB", "2MiB"))]
    options += ["-j", "2"] if rng.random() < 0.005 else []
    if form in ("pt", "safetensors"):
        return _export(rng, source, Hop(form, out, tuple(options), tuple(reasons)))
    return _reshard(rng, source, Hop(form, out, tuple(options), tuple(reasons)))


def _export(rng: random.Random, source: Source, hop: Hop) -> Hop:
    reasons = list(hop.reasons)
    out = hop.out
    words: list[str | Path] = ["export", source.path, "--only", "all", "--keep-names"]
    if hop.form == "pt":
        out = out.with_name(f"{out.name}.pt")
    else:
        if rng.random() < 0.5:
            out = out.with_name(f"{out.name}.safetensors")
        else:
            words += ["--max-shard-size", rng.choice(("5GB", "1B", "100B", "1kB"))]
        held = states.tensors(source.state).values()
        if not all(map(states.is_in_safetensors, held)):
            reasons.append("a type that safetensors lacks")
    return replace(hop, out=out, words=(*words, "-o", out, *hop.words), reasons=tuple(reasons))


def _reshard(rng: random.Random, source: Source, hop: Hop) -> Hop:
    mesh = rng.choice(_MESHES)
    shape = tuple(int(number) for number in re.findall(r"\d+", mesh))
    words: list[str | Path] = ["reshard", source.path, "-o", hop.out, "--to-mesh", mesh]
    words += ["--format", hop.form, "--keep-rank-states", "--device-type", "cpu"]
    if rng.random() < 0.4:
        return replace(hop, words=(*words, *hop.words), mesh=shape)
    placed = tuple(
        Shard(rng.choice((0, 0, 0, 0, 0, 0, 1, 2))) if rng.random() < 0.7 else Replicate()
        for _ in shape
    )
    text = ",".join(f"S({p.dim})" if isinstance(p, Shard) else "R" for p in placed)
    reasons = list(hop.reasons)
    shapes = [value.shape for value in states.tensors(source.state).values() if value.ndim]
    dims = [p.dim for p in placed if isinstance(p, Shard)]
    if any(len(one) <= dim for one in shapes for dim in dims):
        reasons.append("a cut along a dimension that a tensor lacks")
    if mesh.startswith("dp_shard") and len(set(dims)) == 1 and len(dims) == 2:
        placed = (_StridedShard(dims[0], split_factor=shape[1]), Shard(dims[0]))
        if any(len(one) > dims[0] and one[dims[0]] % shape[1] for one in shapes):
            reasons.append("a strided cut that torch computes wrong")
    words += ["--place", f"*={text}", *hop.words]
    return replace(hop, words=tuple(words), reasons=tuple(reasons), mesh=shape, placed=placed)


def _cast(rng: random.Random, source: Source, hop: Hop) -> tuple[Source, Hop]:
    """The same with --dtype, and the state dict cast by torch."""
    name, kind = rng.choice(list(_DTYPES.items()))
    reasons = list(hop.reasons)
    if any(value.dtype in _CODES for value in states.tensors(source.state).values()):
        reasons.append("a cast of what may be a quantized weight's")
    cast = states.mapped(source.state, lambda v: v.to(kind) if v.dtype in states.FLOATS else v)
    words = (*hop.words, "--dtype", name)
    return replace(source, state=cast), replace(hop, words=words, reasons=tuple(reasons))  # type: ignore[arg-type]


def _filter(rng: random.Random, source: Source, hop: Hop, commands: Commands) -> None:
    """The same of some names only: those that the patterns choose are there, and no others."""
    names = [one.name for one in states.leaves(source.state)]
    patterns = [re.sub(r"[^a-z.]", "?", rng.choice(names)), "*a*", "*.b*", "w*", "*", "re:^model"]
    include = [rng.choice(patterns) for _ in range(rng.choice((0, 1, 2)))]
    exclude = [rng.choice(patterns[:4]) for _ in range(rng.choice((0, 0, 1)))]
    words = [word for text in include for word in ("-i", text)]
    words += [word for text in exclude for word in ("-x", text)]

    def chosen(name: str) -> bool:
        wanted = not include or any(_matches(name, text) for text in include)
        return wanted and not any(_matches(name, text) for text in exclude)

    held = states.tensors(source.state)
    wanted = {name: value for name, value in held.items() if chosen(name)}
    reasons = [*hop.reasons, *["no tensor is chosen"] * (not wanted)]
    commands.write(source, hop.out, *hop.words, *words, reasons=reasons)
    whole = whole_of(Source(hop.out, hop.form, {}), commands)
    _compare(whole, wanted, "tensors that the filters choose")


def _matches(name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.search(pattern[3:], name) is not None
    return fnmatchcase(name, pattern)


# -------------------------------------------------------------------------------------- the checks


def _carry_out(rng: random.Random, source: Source, hop: Hop, commands: Commands) -> Source:
    """Convert and compare; gives the output as the source of what comes next."""
    commands.write(source, hop.out, *hop.words, reasons=hop.reasons)
    keeps = source.keeps_order and hop.form != "dcp"
    made = Source(hop.out, hop.form, source.state, keeps_order=keeps)
    checks: dict[str, Callable[[Source, Hop], State]] = {
        "pt": _check_torch_file,
        "safetensors": _check_safetensors,
        "dcp": _check_dcp,
        "ranks": _check_ranks,
    }
    is_flat = hop.form == "safetensors"
    state = dict(states.tensors(source.state)) if is_flat else _as_read(source)
    found = replace(made, state=checks[hop.form](replace(made, state=state), hop))
    whole = commands.json("verify", found.path)
    if whole["whole"] is not True:
        raise Fault(f"verify finds fault with what was written: {whole['problems']}")
    if rng.random() < 0.2:
        read(found, commands)
    return found


def _as_read(source: Source) -> State:
    """The state dict as torch reads it from the source: DCP keeps fewer kinds of containers."""
    if source.form != "dcp":
        return source.state
    return sources.through_dcp(source.state, source.path.parent / f"{source.path.name}-by-torch")


def _check_torch_file(made: Source, hop: Hop) -> State:  # noqa: ARG001
    found = torch.load(made.path, weights_only=False)
    _compare(found, made.state, "torch.load", in_order=made.keeps_order)
    return made.state


def _check_safetensors(made: Source, hop: Hop) -> State:  # noqa: ARG001
    _compare(_load_safetensors(made.path), made.state, "load_file")
    return made.state


def _load_safetensors(path: Path) -> State:
    found: State = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return found


def _compare(found: object, wanted: object, what: str, *, in_order: bool = False) -> None:
    """Raise Fault where two values differ; the order of keys counts only where it is asked for."""
    ours, theirs = states.spelled(found), states.spelled(wanted)
    if not in_order:
        ours, theirs = _unordered(ours), _unordered(theirs)
    if ours != theirs:
        raise Fault(f"{what}: {_first_difference(ours, theirs)}")


def _unordered(spelled: object) -> object:
    """The same with the keys of each dict in one order."""
    if isinstance(spelled, list):
        if all(isinstance(one, tuple) and len(one) == 3 for one in spelled):
            return sorted(((*key, _unordered(item)) for *key, item in spelled), key=repr)
        return [_unordered(one) for one in spelled]
    if isinstance(spelled, tuple):
        return tuple(_unordered(one) for one in spelled)
    return spelled


def _first_difference(ours: object, theirs: object) -> str:
    """Where two values differ first."""
    if _are_items(ours) and _are_items(theirs):
        ours, theirs = ({key[1]: key[-1] for key in items} for items in (ours, theirs))  # type: ignore[attr-defined]
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            more, lost = (
                sorted(map(repr, keys))
                for keys in (ours.keys() - theirs.keys(), theirs.keys() - ours.keys())
            )  # type: ignore[operator]
            return f"{more} too many, {lost} lost"
        key = next((key for key in ours if ours[key] != theirs[key]), "the order of keys")
        return f"{key}: {_first_difference(ours.get(key), theirs.get(key))}"
    lists = isinstance(ours, list | tuple) and isinstance(theirs, list | tuple)
    if lists and len(ours) == len(theirs):  # type: ignore[arg-type]
        one, other = next((a, b) for a, b in zip(ours, theirs, strict=True) if a != b)  # type: ignore[call-overload]
        return _first_difference(one, other)
    if isinstance(ours, bytes) and isinstance(theirs, bytes) and len(ours) == len(theirs):
        at = next(place for place in range(len(ours)) if ours[place] != theirs[place])
        return f"byte {at}: {ours[at : at + 8].hex()} and not {theirs[at : at + 8].hex()}"
    return f"{ours!r:.200} and not {theirs!r:.200}"


def _are_items(value: object) -> bool:
    """Whether this is what `spelled` makes of the items of a dict."""
    if not isinstance(value, list):
        return False
    return all(
        isinstance(one, tuple) and len(one) == 3 and isinstance(one[0], type) for one in value
    )


# ------------------------------------------------------------------------------------- DCP


def _check_dcp(made: Source, hop: Hop) -> State:
    by_torch = made.path.with_name(f"{made.path.name}-torchs")
    sources.save_dcp(made.state, by_torch)
    ours, theirs = _metadata(made.path), _metadata(by_torch)
    if _said(ours) != _said(theirs):
        raise Fault(f".metadata: {_first_difference(_said(ours), _said(theirs))}")
    _check_boxes(ours, states.tensors(made.state), hop)
    try:
        wanted = _loaded(made.state, by_torch)
    except (CheckpointException, NotImplementedError):  # such as of an empty dict in a list
        return made.state
    _compare(_loaded(made.state, made.path), wanted, "dcp.load")
    return made.state


def _metadata(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 (our own)
    return found


def _said(found: Metadata) -> list[tuple[object, ...]]:
    kinds = found.state_dict_metadata
    return [
        (fqn, path, isinstance(kinds[fqn], BytesStorageMetadata))
        for fqn, path in (found.planner_data or {}).items()
    ]


def _check_boxes(found: Metadata, tensors: Mapping[str, torch.Tensor], hop: Hop) -> None:
    """Each tensor is cut as torch cuts it for these placements, where the command said which."""
    if hop.placed is None:
        return
    for name, value in tensors.items():
        entry = found.state_dict_metadata.get(name)
        if entry is None or isinstance(entry, BytesStorageMetadata) or not value.ndim:
            continue  # a tensor of a tuple stands in an object
        boxes = {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if math.prod(c.sizes)}
        wanted = set()
        for rank in range(math.prod(hop.mesh)):
            mesh = sources.mesh_of(hop.mesh, rank)
            part, at = sources.local(value, hop.placed, mesh)
            wanted |= {(at, tuple(part.shape))} if part.numel() else set()
        if boxes != wanted:
            raise Fault(f"{name} is cut into {sorted(boxes)}, by torch into {sorted(wanted)}")


def _loaded(state: State, folder: Path) -> object:
    template = _emptied(copy.deepcopy(state))  # torch changes what is in a tuple
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(template, checkpoint_id=folder)
    return template


def _emptied(value: object) -> object:
    """The same containers with other values, for torch to fill."""
    if isinstance(value, torch.Tensor):
        empty = torch.empty(value.shape, dtype=value.dtype)
        empty.reshape(-1).view(torch.uint8).fill_(0)
        return empty
    if isinstance(value, Mapping):
        kind = type(value) if type(value).__name__ != "defaultdict" else dict
        return kind((key, _emptied(item)) for key, item in value.items())  # type: ignore[call-arg]
    if isinstance(value, list):
        return [_emptied(item) for item in value]
    return value if isinstance(value, tuple) else None


# -------------------------------------------------------------------------------------- rank files


def _check_ranks(made: Source, hop: Hop) -> State:
    for rank in range(math.prod(hop.mesh)):
        found = _rank_file(made, rank)
        mesh = sources.mesh_of(hop.mesh, rank)
        wanted = _of_rank(found, made.state, hop, mesh)
        _compare_trees(found, wanted)
    return made.state


def _rank_file(made: Source, rank: int) -> State:
    """What a rank's files hold: all of it, or a file for each part of a well-known name."""
    files = sorted(made.path.glob(f"*_rank_{rank}.pt"))
    loaded = {
        file.name.partition("_world_size_")[0]: torch.load(file, weights_only=False)
        for file in files
    }
    is_of_parts = all(isinstance(part, Mapping) for part in made.state.values())
    if len(loaded) == 1 and not (is_of_parts and set(loaded) == set(made.state)):
        return next(iter(loaded.values()))  # type: ignore[no-any-return]
    return type(made.state)((key, loaded.get(key)) for key in made.state)


def _of_rank(found: object, whole: object, hop: Hop, mesh: object) -> object:
    """What a rank holds of the state dict: cut where its file has a DTensor."""
    if isinstance(found, DTensor) and isinstance(whole, torch.Tensor):
        placed = hop.placed or found.placements
        part, _ = sources.local(whole.detach().resolve_conj().resolve_neg(), placed, mesh)  # type: ignore[arg-type]
        return "DTensor", tuple(placed), tuple(whole.shape), states.spelled(part)
    if isinstance(found, Mapping) and isinstance(whole, Mapping):
        kind = states.kind_of(whole)
        return kind, {k: _of_rank(found.get(k), v, hop, mesh) for k, v in whole.items()}
    lists = isinstance(whole, Sequence) and isinstance(found, Sequence)
    if lists and len(found) == len(whole) and states.has_tensor(whole):  # type: ignore[arg-type]
        pairs = zip(found, whole, strict=True)  # type: ignore[call-overload]
        return type(whole), [_of_rank(one, other, hop, mesh) for one, other in pairs]
    return states.spelled(whole)


def _compare_trees(found: object, wanted: object) -> None:
    ours = _spelled_of_rank(found, wanted)
    if ours != wanted:
        raise Fault(f"rank file: {_first_difference(ours, wanted)}")


def _spelled_of_rank(found: object, wanted: object) -> object:
    if isinstance(found, DTensor):
        part = states.spelled(found._local_tensor)  # noqa: SLF001 (what is on disk)
        return "DTensor", tuple(found.placements), tuple(found.shape), part
    if isinstance(found, Mapping) and isinstance(wanted, tuple) and isinstance(wanted[1], dict):
        below = wanted[1]
        return states.kind_of(found), {
            k: _spelled_of_rank(v, below.get(k)) for k, v in found.items()
        }
    if isinstance(found, list | tuple) and isinstance(wanted, tuple) and states.has_tensor(found):
        below = wanted[1] if isinstance(wanted[1], list) else []
        pairs = zip(found, [*below, *[None] * len(found)], strict=False)
        return type(found), [_spelled_of_rank(one, other) for one, other in pairs]
    return states.spelled(found)


def whole_of(made: Source, commands: Commands) -> State:
    """All tensors of an output by their names."""
    if made.form == "safetensors":
        return _load_safetensors(made.path)
    if made.form == "pt":
        return dict(states.tensors(torch.load(made.path, weights_only=False)))
    out = made.path.with_name("whole.pt")
    answer = commands.run("export", made.path, "-o", out, "--only", "all", "--keep-names")
    if answer.code == 1 and "objects only" in answer.stderr:
        return {}
    if answer.code:
        raise Fault(f"what was written is not read: {answer.stderr[:500]}")
    return dict(states.tensors(torch.load(out, weights_only=False)))
