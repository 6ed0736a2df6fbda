"""Exports and reshards: the command lines, and what torch must find in what they write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from realsize_jobs import model, reading, running
from realsize_jobs.model import Flat, Tensors
from realsize_jobs.reading import Wrong


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that ``ranks`` have saved, its leaves by torch's flat names, and the tensors of
    the model by their own. Commands run in ``folder``, and write there.
    """

    form: str
    path: Path
    folder: Path
    ranks: int
    leaves: Flat
    tensors: Tensors

    @property
    def optim(self) -> Flat:
        """The optimizer's leaves without the name of their container."""
        inside = (item for item in self.leaves.items() if item[0].startswith("optim."))
        return {name.removeprefix("optim."): leaf for name, leaf in inside}

    def without(self, *ends: str) -> Source:
        """The same without names that end so."""
        leaves = {name: leaf for name, leaf in self.leaves.items() if not name.endswith(ends)}
        tensors = {name: leaf for name, leaf in self.tensors.items() if not name.endswith(ends)}
        return replace(self, leaves=leaves, tensors=tensors)

    def remove(self, *names: str) -> None:
        """Remove what was written under these names, finished or not."""
        for path in (self.folder / f"{name}{end}" for name in names for end in ("", ".partial")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


# The leaves of each checkpoint below OUT, by its path there.
Written = Mapping[str, Flat]
Wants = Callable[[Source], Written]


class Conversion(NamedTuple):
    """A command that writes ``out``, run by so many ``ranks`` of torchrun, if by any.

    Only sources of the format ``form`` can be its, if one is named. One that is ``huge`` has the
    tensor above 4 GiB to move, if there is one.
    """

    text: str
    wants: Wants
    out: str = "out"
    ranks: int = 0
    form: str | None = None
    huge: bool = False

    @property
    def name(self) -> str:
        """What a case is called."""
        return f"torchrun {self.ranks}: {self.text}" if self.ranks else self.text

    def fits(self, form: str, ranks: int) -> bool:
        """Whether a source of this format, saved by so many ranks, can be converted so."""
        return self.form in (None, form) and ("gather" not in self.text or ranks == self.ranks)

    def command(self, source: Source, *more: str) -> list[str]:
        """The whole command line."""
        verb, *words = self.text.split()
        words += ["--device-type", "cpu"] if verb == "reshard" else []
        words += ["-x", f"*{model.HUGE}"] if not self.huge and model.HUGE in source.tensors else []
        sources = [str(source.path)] * (2 if verb == "average" else 1)  # of itself: itself
        words = [verb, *sources, "-o", self.out, *words, *more]
        return running.command(*running.OURS, *words, ranks=self.ranks)


def convert(case: Conversion, source: Source) -> None:
    """Run it, and compare what it wrote."""
    running.end(running.start(case.command(source), source.folder))
    compare(case, source)


def compare(case: Conversion, source: Source) -> None:
    """Raise Wrong unless all that was to be written is there as torch reads it."""
    out, moved = source.folder / case.out, source if case.huge else source.without(model.HUGE)
    for below, wanted in case.wants(moved).items():
        if wanted:
            reading.check(out / below if below else out, wanted)


# --------------------------------------------------------------------------- what is to be written


def everything(source: Source) -> Written:
    """The source as it is."""
    return {"": source.leaves}


def bare_model(source: Source) -> Written:
    """The model's tensors, without a container."""
    return {"": source.tensors}


def _kept_model(source: Source) -> dict[str, torch.Tensor]:
    """The model's tensors by the names that the source has for them."""
    inside = "" if source.form == "safetensors" else "model."
    return {f"{inside}{name}": tensor for name, tensor in source.tensors.items()}


def _made(make: Callable[[Tensors], Tensors]) -> Wants:
    """What a rule of `model` makes of the model's tensors, which are the same in all sources."""
    known: list[Tensors] = []

    def wants(source: Source) -> Written:
        if not known:
            known.append(make(source.tensors))
        return {"": known[0]}

    return wants


def _cast(dtype: torch.dtype) -> Wants:
    return _made(lambda tensors: model.cast(tensors, dtype))


# ----------------------------------------------------------------------- folders of the frameworks


def _under(container: str, leaves: Flat) -> Flat:
    return {f"{container}.{name}": leaf for name, leaf in leaves.items()}


def _in_one(of_model: str, of_optim: str, below: str = "", **more: object) -> Wants:
    """Model and optimizer in one checkpoint, each in its container."""
    return lambda source: {
        below: {**_under(of_model, source.tensors), **_under(of_optim, source.optim), **more}
    }


def _accelerate(source: Source) -> Written:
    optim = _under("optimizer", source.optim)
    return {"pytorch_model_fsdp_0": _under("model", source.tensors), "optimizer_0": optim}


def _whole_accelerate(source: Source) -> Written:
    return {"pytorch_model_fsdp.bin": source.tensors, "optimizer.bin": source.optim}


def _titan(source: Source) -> Written:
    """The model at the top, hyper-parameters parameter by parameter."""
    optim, found = source.optim, dict[str, object](source.tensors)
    for name, leaf in optim.items():
        if name.startswith("state."):
            found[f"optimizer.{name}"] = leaf
            continue
        _, group, option = name.split(".")
        if option != "params":
            fqns = optim[f"param_groups.{group}.params"]
            found |= {f"optimizer.param_groups.{fqn}.{option}": leaf for fqn in fqns}
    return {"step-1": found}


def _verl(source: Source) -> Written:
    """The optimizer's parameters numbered, in the order of its groups."""
    numbers = {fqn: number for number, fqn in enumerate(model.TRAINED)}
    optim = dict[str, object]()
    for name, leaf in source.optim.items():
        is_list = name.startswith("param_groups.") and name.endswith(".params")
        fqn = next((fqn for fqn in numbers if name.startswith(f"state.{fqn}.")), None)
        place = name if fqn is None else name.replace(fqn, str(numbers[fqn]))
        optim[place] = [numbers[fqn] for fqn in leaf] if is_list else leaf
    files = {**_under("model", source.tensors), **_under("optim", optim)}
    return {"global_step_1/actor": files if optim else source.tensors}


# Of each layout: who writes it, with which words more, and what it is.
LAYOUTS: dict[str, tuple[int, str, Wants]] = {
    "plain": (0, "", _in_one("model", "optim")),
    "accelerate": (2, "", _accelerate),
    "titan": (0, "-j 2", _titan),
    "verl": (0, "--param-names names.txt", _verl),
    "lightning": (3, "", _in_one("model", "optimizer")),
    "lightning-fsdp1": (0, "", _in_one("model", "optimizer_0")),
    "lightning-fsdp2": (0, "", _in_one("state_dict", "optimizer_0")),
    "composer": (0, "", _in_one("state.model", "state.optimizers.AdamW", "ep0-ba1", rng=[])),
}


def _layout(name: str, ranks: int, words: str, wants: Wants) -> Conversion:
    """With the model and the optimizer alone."""
    text = f"reshard --to-mesh 2 --layout {name} -x extra.* {words}".rstrip()
    return Conversion(text, lambda source: wants(source.without(*model.EXTRA)), ranks=ranks)


# ------------------------------------------------------------------------------------ the commands

FOLDER = Conversion("export --max-shard-size 200MB", bare_model, huge=True)
COLUMNS = Conversion(
    "reshard --to-mesh dp=2,tp=2 --only model --placements S(0),S(1) --place *norm*=S(0),R -j 2",
    lambda source: {"": _kept_model(source)},
)
HSDP = Conversion("reshard --to-mesh 4x8", everything, huge=True)


def _exports() -> list[Conversion]:
    all_of_it, lora = "--only all --keep-names", f"--merge-lora --lora-alpha {model.LORA_ALPHA}"
    one, pt = "out.safetensors", "out.pt"
    return [
        FOLDER,
        FOLDER._replace(ranks=2),
        Conversion("export -j 2 --check", bare_model),
        Conversion("export --format safetensors", bare_model, one, huge=True),
        Conversion("export --dtype bf16", _cast(torch.bfloat16), one),
        Conversion("export --dtype float8_e4m3fn -j 2", _cast(torch.float8_e4m3fn)),
        Conversion(f"export --format torch {all_of_it}", everything, pt, huge=True),
        Conversion(f"export --format torch {all_of_it} -j 2 --check", everything, pt, huge=True),
        Conversion("export --map map.toml", _made(model.mapped)),
        Conversion(f"export {lora}", _made(model.merged)),
        Conversion("export --layout accelerate", _whole_accelerate),
        Conversion("average --weights 1,3 -j 2 --check", bare_model, huge=True),
    ]


def _reshards() -> list[Conversion]:
    in_bf16: Wants = lambda source: {"": model.cast(_kept_model(source), torch.bfloat16)}  # noqa: E731
    reshard = "reshard --to-mesh"
    return [
        HSDP,
        Conversion(f"{reshard} 3 -j 2", everything, huge=True),
        Conversion(f"{reshard} 2 --check", everything, huge=True),
        Conversion(f"{reshard} 2 --max-memory 2MiB", everything, huge=True),
        Conversion(f"{reshard} 3 --format ranks -j 2", everything, huge=True),
        COLUMNS,
        Conversion(f"{reshard} 2 --only model --dtype bf16", in_bf16),
        Conversion(f"{reshard} 2 --only model --map map.toml", _made(model.mapped)),
        Conversion(f"{reshard} 2 --only model --untie", _made(model.tied)),
        Conversion("reshard --only model --dtype bf16 --check", in_bf16, form="dcp"),
    ]


def _of_ranks() -> list[Conversion]:
    """All ways in which ranks of torchrun share the work."""
    rows = [
        (2, "4x8", None),
        (3, "3 --check", None),
        (3, "2 --format ranks", None),
        (2, "2 --max-memory 8MiB", None),
        (2, "2 --engine dcp", "dcp"),
        (3, "3 --engine dcp --check", "dcp"),
        (3, "4x8 --engine gather", "ranks"),
        (3, "2 --engine gather --check", "ranks"),
        (3, "2 --engine gather --format ranks", "ranks"),
    ]
    return [
        Conversion(f"reshard --to-mesh {words}", everything, ranks=ranks, form=form, huge=True)
        for ranks, words, form in rows
    ]


def conversions() -> list[Conversion]:
    """All of them, in the order in which they run."""
    layouts = (_layout(name, *how) for name, how in LAYOUTS.items())
    return [*_exports(), *_reshards(), *_of_ranks(), *layouts]


# ------------------------------------------------------------------- more than one run of a command


def resumed(case: Conversion, source: Source) -> str:
    """Kill it on its way, resume, and see that the finished files were not written once more."""
    out, partial = source.folder / case.out, source.folder / f"{case.out}.partial"
    nbytes = sum(v.nbytes for v in source.leaves.values() if isinstance(v, torch.Tensor))
    for part in (0.6, 0.8, 0.9, 0.5, 0.3):
        source.remove(case.out)
        process = running.start(case.command(source), source.folder)
        if not running.killed(process, partial, int(nbytes * part)):
            continue
        begun = time.time_ns()
        running.end(running.start(case.command(source, "--resume"), source.folder))
        compare(case, source)
        files = [file.stat() for file in out.rglob("*") if file.is_file()]
        total = sum(file.st_size for file in files)
        written = sum(file.st_size for file in files if file.st_mtime_ns >= begun)
        if written < total:
            return f"{written / total:.0%} written after the kill"
    raise Wrong("whenever it was killed, --resume wrote all of it again")


def two_at_once(first: Conversion, second: Conversion, source: Source) -> None:
    """Two conversions of one source at the same time."""
    cases = (first, second._replace(out=f"other-{second.out}"))
    processes = [running.start(case.command(source), source.folder) for case in cases]
    try:
        for process in processes:
            running.end(process)
    finally:
        for process in processes:
            running.kill(process)
    for case in cases:
        compare(case, source)
