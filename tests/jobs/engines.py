"""Many reshards in one torchrun job, since a job costs seconds to start.

    torchrun … tests/jobs/engines.py TASKS.json [tiny]

TASKS is a list of {"ckpt", "out", "engine", "mesh", "place", "check"}; `{rank}` in a checkpoint's
path is the rank's own number, as where each node has its own disk. An error is written to
OUT.error.RANK, else notes to OUT.notes.RANK.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from size_records import DEFAULT, TINY

from ckpt_tools.convert.reshard import ReshardOptions, ReshardPlan, reshard_of
from ckpt_tools.convert.write import Conversion, WriteOptions
from ckpt_tools.core.mesh_spec import parse_mesh, parse_rule
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed import environment
from ckpt_tools.distributed.run import Read, engine_named, run
from ckpt_tools.errors import CkptError
from ckpt_tools.formats import ReadOptions


def do(task: dict[str, object], rank: int, sizes: Sizes) -> None:
    mesh = parse_mesh(str(task["mesh"]))
    rules = tuple(parse_rule(text, mesh) for text in task.get("place", ()))
    write = WriteOptions(check=bool(task.get("check")), sizes=sizes)
    ckpt, out = str(task["ckpt"]).replace("{rank}", str(rank)), str(task["out"])
    options = ReshardOptions(mesh, rules=rules)

    def make(read: Read) -> Conversion[ReshardPlan]:
        return reshard_of(read(ckpt, ReadOptions()), out, write, options)

    try:
        plan = run(make, out, write, engine=engine_named(str(task["engine"]), options))
        Path(f"{task['out']}.notes.{rank}").write_text("\n".join(plan.notes))
    except CkptError as error:
        Path(f"{task['out']}.error.{rank}").write_text(f"{type(error).__name__}: {error.message}")


if __name__ == "__main__":
    here = environment.place()
    sizes = TINY if "tiny" in sys.argv else DEFAULT
    for one in json.loads(Path(sys.argv[1]).read_text()):
        do(one, here.rank if here is not None else 0, sizes)
