"""What interop runs, row by row: who saves, the command that converts, who goes on."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """``job`` is the program, ``before`` and ``after`` are its sides.

    ``convert`` are the words of the command line, with {saved}, {out} and {ranks}; ``loads`` is
    what the framework is then given. ``packages`` must be there, the first ones are shown.
    ``cause`` says why losses differ where they do so without ckpt-tools, too.
    """

    name: str
    job: str
    before: str
    convert: str
    after: str
    packages: tuple[str, ...]
    loads: str = "{out}"
    cause: str = ""


_RESHARD = "reshard {saved} -o {out} --to-mesh {ranks}"
_SHARDS = f"{_RESHARD} --layout accelerate"
_WHOLE = "export {saved} -o {out} --layout accelerate"
_LIGHTNING = f"{_RESHARD} --layout lightning-"
_COMPOSER = f"{_RESHARD} --layout composer".replace("{saved}", "{saved}/ep0-ba3")
_MONOLITH = _COMPOSER.replace("ep0-ba3", "ep0-ba3-rank0.pt")
_EMPTY = "Accelerate's FSDP1 loads no optimizer from shards: it fills a new one by what that has"

_TORCH = ("torch", "torchdata")
_TRAINER = ("transformers", "accelerate")
_TITAN = ("torchtitan",)
_VERL = ("verl", "transformers", "accelerate", "ray", "tensordict")
_ACTOR = "{out}/global_step_3/actor"


def _of_step(words: str) -> str:
    """The conversion of a step in the folder of a run."""
    return words.replace("{saved}", "{saved}/checkpoint-3")


def _of_titan(layout: str) -> str:
    return f"{_RESHARD} --layout {layout}".replace("{saved}", "{saved}/checkpoint/step-3")


ROWS = (
    Row("torch-1", "plain", "fsdp2", f"{_RESHARD} --keep-rank-states", "fsdp1", _TORCH),
    Row("torch-2", "plain", "fsdp1", f"{_RESHARD} --keep-rank-states", "fsdp2", _TORCH),
    Row("accelerate-1", "accelerated", "fsdp2-sharded", _SHARDS, "fsdp2-sharded", ("accelerate",)),
    Row("accelerate-2", "accelerated", "fsdp2-sharded", _WHOLE, "fsdp1-full", ("accelerate",)),
    Row("accelerate-3", "accelerated", "fsdp1-full", _SHARDS, "fsdp2-sharded", ("accelerate",)),
    Row("accelerate-4", "accelerated", "fsdp1-sharded", _WHOLE, "fsdp2-full", ("accelerate",)),
    Row(
        *("accelerate-5", "accelerated", "fsdp1-sharded", _SHARDS, "fsdp1-sharded"),
        packages=("accelerate",),
        cause=_EMPTY,
    ),
    Row("lightning-1", "lightnings", "fsdp2", f"{_LIGHTNING}fsdp1", "fsdp1", ("lightning",)),
    Row("lightning-2", "lightnings", "fsdp1", f"{_LIGHTNING}fsdp2", "fsdp2", ("lightning",)),
    Row("trainer-1", "trainers", "fsdp2-sharded", _of_step(_SHARDS), "fsdp2-sharded", _TRAINER),
    Row("trainer-2", "trainers", "fsdp2-sharded", _of_step(_WHOLE), "fsdp1-full", _TRAINER),
    Row("trainer-3", "trainers", "fsdp1-full", _of_step(_SHARDS), "fsdp2-sharded", _TRAINER),
    Row("titan-1", "titan", "fsdp2", _of_titan("titan"), "fsdp2", _TITAN, "{out}/step-3"),
    Row("composer-1", "composers", "fsdp1", _COMPOSER, "fsdp2", ("mosaicml",), "{out}/ep0-ba3"),
    Row("composer-2", "composers", "fsdp2", _COMPOSER, "fsdp1", ("mosaicml",), "{out}/ep0-ba3"),
    Row(
        *("composer-3", "composers", "fsdp1-full", _MONOLITH, "fsdp2", ("mosaicml",)),
        loads="{out}/ep0-ba3",
    ),
    Row("verl-1", "verl_manager", "fsdp2", f"{_RESHARD} --layout verl", "fsdp2", _VERL, _ACTOR),
)
