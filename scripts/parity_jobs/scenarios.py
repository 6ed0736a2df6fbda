"""What parity compares, row by row: who trains and saves, how it is carried over, who goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sides import Side

Saved = Literal["full", "dcp", "ranks", "flattened", "numbered"]
World = Literal["same", "other"]

STEPS_BEFORE, STEPS_AFTER = 3, 3

FSDP2_OVER_TP = (
    "--place",
    "*fc1*=S(0),S(0)",
    "--place",
    "*fc2.weight*=S(0),S(1)",
    "--place",
    "*.step=R,R",
)


@dataclass(frozen=True)
class Row:
    """One comparison.

    ``target`` is what the conversion writes: a DCP directory, rank files, or one file (`export`).
    ``world`` says if the job that goes on has as many ranks as the one that saved.
    """

    before: Side
    saved: Saved
    target: Literal["dcp", "ranks", "torch"]
    after: Side
    world: World = "same"
    kind: str = "plain"
    needs: Literal["", "cuda", "4 ranks"] = ""
    short: bool = False

    @property
    def source(self) -> str:
        """The folder of the training that this row goes on from."""
        side = self.before
        words = [side.engine, side.mesh, side.strategy, self.kind]
        words += [name for name in ("bf16", "offload", "accumulate") if getattr(side, name)]
        return "-".join(words + ([] if side.orig_params else ["flat"]))


def _one(**options: object) -> Side:
    return Side("fsdp1", **options)  # type: ignore[arg-type]


def _two(**options: object) -> Side:
    return Side("fsdp2", **options)  # type: ignore[arg-type]


ROWS = (
    Row(_one(), "full", "dcp", _two(), short=True),
    Row(_one(), "dcp", "dcp", _two(mesh="hsdp")),
    Row(_one(), "dcp", "ranks", _two(), world="other"),
    Row(_one(), "ranks", "ranks", _two()),
    Row(_one(), "ranks", "dcp", _two(mesh="hsdp"), world="other"),
    Row(_one(mesh="none"), "dcp", "dcp", _two(), world="other"),
    Row(_one(mesh="none"), "full", "ranks", _two(mesh="hsdp")),
    Row(_one(strategy="SHARD_GRAD_OP"), "dcp", "dcp", _two(strategy="SHARD_GRAD_OP")),
    Row(_one(strategy="NO_SHARD"), "full", "dcp", _two()),
    Row(_one(mesh="hsdp", strategy="HYBRID_SHARD"), "dcp", "dcp", _two(), world="other"),
    Row(_one(mesh="hsdp", strategy="HYBRID_SHARD"), "full", "dcp", _two(mesh="hsdp")),
    Row(_one(orig_params=False), "full", "dcp", _two(orig_params=False)),
    Row(_one(orig_params=False), "dcp", "ranks", _two(orig_params=False), world="other"),
    Row(_one(bf16=True), "dcp", "dcp", _two(bf16=True)),
    Row(_one(), "full", "dcp", _two(meta=True)),
    Row(_one(), "full", "dcp", _two(mesh="tp"), needs="4 ranks"),
    Row(_one(), "dcp", "dcp", _two(mesh="tp")),
    Row(_one(), "full", "dcp", _two(mesh="hsdp"), kind="tied"),
    Row(_one(), "dcp", "dcp", _two(), kind="lora", world="other"),
    Row(_one(), "full", "ranks", _two(meta=True), kind="lora"),
    Row(_one(accumulate=True), "dcp", "dcp", _two(accumulate=True)),
    Row(_one(accumulate=True), "full", "dcp", _two(accumulate=True, mesh="hsdp")),
    Row(_one(offload=True), "full", "dcp", _two(offload=True), needs="cuda"),
    Row(_two(), "dcp", "dcp", _one(), short=True),
    Row(_two(), "flattened", "dcp", _one(), world="other"),
    Row(_two(), "full", "dcp", _one(mesh="hsdp", strategy="HYBRID_SHARD")),
    Row(_two(), "ranks", "torch", _one(), world="other"),
    Row(_two(), "ranks", "dcp", _one(mesh="none")),
    Row(_two(), "numbered", "dcp", _one()),
    Row(_two(mesh="hsdp"), "dcp", "dcp", _one(strategy="SHARD_GRAD_OP")),
    Row(_two(mesh="hsdp"), "ranks", "dcp", _one(), world="other"),
    Row(_two(mesh="tp"), "dcp", "dcp", _one()),
    Row(_two(mesh="tp"), "ranks", "torch", _one(), world="other"),
    Row(_two(bf16=True), "dcp", "dcp", _one(bf16=True)),
    Row(_two(), "dcp", "torch", _one(strategy="NO_SHARD"), kind="tied"),
    Row(_two(), "dcp", "dcp", _one(), kind="lora", world="other"),
    Row(_two(accumulate=True), "dcp", "dcp", _one(accumulate=True)),
    Row(_two(offload=True), "dcp", "dcp", _one(offload=True), needs="cuda"),
)


def reason_to_skip(row: Row, *, world: int, cuda: bool) -> str | None:
    """Why a row cannot run here, or None."""
    if row.needs == "cuda" and not cuda:
        return "CPU offload needs a GPU: FSDP1's crashes on the CPU, FSDP2's policy asks for CUDA"
    if row.needs == "4 ranks" and world < 4:
        return "needs 4 ranks"
    return None
