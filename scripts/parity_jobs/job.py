"""One torchrun job of parity: `job.py save|resume FOLDER ROWS…` runs many rows one after another.

Results go to FOLDER as JSON, by rank 0. `save` trains, saves each way, and goes on uninterrupted;
`resume` loads what was converted, goes on, and compares.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import checkpoints
import compare
import torch
import torch.distributed as dist
from scenarios import ROWS, STEPS_BEFORE, Row
from sides import Run
from torch.distributed.checkpoint.api import CheckpointException

_PATIENCE = timedelta(seconds=90)  # a rank that waits longer has lost the others


def main() -> None:
    """Do the rows that the command line names by their numbers."""
    verb, folder, *numbers = sys.argv[1:]
    cuda = torch.cuda.is_available()
    local = int(os.environ["LOCAL_RANK"])
    if cuda:
        torch.cuda.set_device(local)
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    do = save_all if verb == "save" else resume_all
    do(folder, [int(number) for number in numbers], device)
    dist.barrier()
    dist.destroy_process_group()


def save_all(folder: str, numbers: list[int], device: torch.device) -> None:
    """Train each source once; save it in every way that a row wants."""
    wanted: dict[str, list[Row]] = {}
    for number in numbers:
        wanted.setdefault(ROWS[number].source, []).append(ROWS[number])
    failures: dict[str, str] = {}
    for source, rows in wanted.items():
        failure = _told(lambda: _save(os.path.join(folder, source), rows, device))  # noqa: B023
        if failure:
            failures[source] = failure
    _write(folder, "save.json", failures)


def _save(stem: str, rows: list[Row], device: torch.device) -> None:
    run = Run(rows[0].before, rows[0].kind, device)
    for step in range(STEPS_BEFORE):
        run.backward(step)
        run.step()
    for saved in dict.fromkeys(row.saved for row in rows):
        checkpoints.save(run, f"{stem}-{saved}", saved)
    truth = compare.go_on(run)
    if dist.get_rank() == 0:
        torch.save(truth, f"{stem}.truth")


def resume_all(folder: str, numbers: list[int], device: torch.device) -> None:
    """Go on from each converted checkpoint, and compare with the run that was not interrupted."""
    for number in numbers:
        result: dict[str, object] = {}
        failure = _told(lambda: result.update(_resume(folder, number, device)))  # noqa: B023
        _write(folder, f"row-{number}.json", result | ({"failure": failure} if failure else {}))


def _resume(folder: str, number: int, device: torch.device) -> dict[str, object]:
    row = ROWS[number]
    run = Run(row.after, row.kind, device)
    path = os.path.join(folder, f"converted-{number}")
    checkpoints.load(run, f"{path}.pt" if row.target == "torch" else path, row)
    mine = compare.go_on(run)
    if dist.get_rank() > 0:
        return {}
    truth = torch.load(os.path.join(folder, f"{row.source}.truth"), weights_only=True)
    return compare.compared(truth, mine, bf16=row.after.bf16)


def _told(do: Callable[[], None]) -> str | None:
    """What went wrong, in one line, from any rank; the others go on to the next row with it."""
    failure = None
    try:
        do()
    except (Exception, CheckpointException) as error:  # noqa: BLE001  (a row's failure is an answer)
        traceback.print_exc()
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failure)
    return next((one for one in everyone if one), None)


def _write(folder: str, name: str, value: object) -> None:
    if dist.get_rank() == 0:
        with open(os.path.join(folder, name), "w") as file:
            json.dump(value, file)


if __name__ == "__main__":
    main()
