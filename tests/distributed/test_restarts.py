"""torchrun --max-restarts: the second attempt goes on with what the first has left.

`scripts/kill_test` kills at all of the named moments and at random ones, by every engine.
"""

import os
import random
import time
from pathlib import Path

import pytest
from launching import JOBS, ckpt_tools, contents, ends, nodes, torchrun

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = DATA / "fsdp2_dcp_1d_4r" / "ckpt"
RANKS = DATA / "fsdp2_torchsave_1d_4r" / "ckpt"
# Which rank is killed as which function begins, for the how manieth time.
MOMENTS = {
    "before the manifest": "0:copying.atomic_output:_start:1",
    "while planning": "1:convert.reshard:plan_reshard:1",
    "in the copy": "1:copying.task_writer:TaskWriter.write:1",
    "while others wait": "0:distributed.agreement:require_all_written:1",
    "between fsync and rename": "0:copying.atomic_output:_put_folder:1",
    "after the rename": "0:copying.atomic_output:_tidy:1",
    "at the very end": "1:distributed.group:Group.leave:1",
}
# How many kills at random moments; `scripts/kill_test` asks for more.
KILLS = int(os.environ.get("CKPT_TOOLS_KILLS", "0"))
ALWAYS = ("in the copy", "at the very end")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    out = tmp_path_factory.mktemp("alone") / "out"
    ckpt_tools("reshard", DCP, "-o", out, "--to-mesh", "4x8")
    return contents(out)


def restarted(out: Path, kill: str, *options: str, source: Path = DCP) -> str:
    """What a job of 2 ranks says whose first attempt is killed; it must end well."""
    words = ("--max-restarts", "1", JOBS / "killed.py", "reshard", source, "-o", out)
    done = torchrun(2, *words, "--to-mesh", "4x8", *options, env=killing(kill, out.parent))
    assert done.returncode == 0, done.stderr[-4000:]
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    return done.stderr


def killing(kill: str, folder: Path) -> dict[str, str]:
    """The environment of a job of which a rank is killed."""
    killed = str(folder.with_name(f"{folder.name}.killed"))
    return {"KILL": kill, "KILLED": killed, "CKPT_TOOLS_PEER_TIMEOUT": "5"}


@pytest.mark.parametrize("moment", MOMENTS if KILLS else ALWAYS)
def test_a_rank_killed_at_any_moment_ends_with_the_right_output(
    moment: str, alone: dict[str, bytes], tmp_path: Path
) -> None:
    restarted(tmp_path / "out", MOMENTS[moment])
    assert contents(tmp_path / "out") == alone


def at_random(number: int) -> str:
    """A rank, and the seconds after which it is killed."""
    choose = random.Random(number)  # noqa: S311 - a test's own choice
    return f"{choose.randrange(2)}:{choose.uniform(0.1, 4):.2f}"


@pytest.mark.skipif(not KILLS, reason="scripts/kill_test runs it")
@pytest.mark.parametrize("number", range(KILLS))
def test_a_rank_killed_at_a_random_moment_ends_with_the_right_output(
    number: int, alone: dict[str, bytes], tmp_path: Path
) -> None:
    restarted(tmp_path / "out", at_random(number))
    assert contents(tmp_path / "out") == alone


@pytest.mark.parametrize("moment", ["while others wait", *(["at the very end"] if KILLS else [])])
def test_the_engine_gather_is_restarted(moment: str, tmp_path: Path) -> None:
    ckpt_tools("reshard", RANKS, "-o", tmp_path / "alone", "--to-mesh", "4x8")
    job = tmp_path / "job"
    job.mkdir()
    words = ("--max-restarts", "1", JOBS / "killed.py", "reshard", RANKS, "-o", job / "out")
    env = killing(MOMENTS[moment], job)
    done = torchrun(4, *words, "--to-mesh", "4x8", "--engine", "gather", env=env)
    assert done.returncode == 0, done.stderr[-4000:]
    assert contents(job / "out") == contents(tmp_path / "alone")
    if moment == "while others wait":
        assert "of an earlier run is removed" in done.stderr


OF_TWO = [*MOMENTS, *map(str, range(KILLS))] if KILLS else ["while others wait"]


@pytest.mark.parametrize("moment", OF_TWO)
def test_a_rank_of_two_nodes_is_killed(
    moment: str, alone: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("--max-restarts", "1", JOBS / "killed.py", "reshard", DCP, "-o", out)
    env = killing(MOMENTS.get(moment) or at_random(int(moment)), tmp_path)
    agents = nodes(*words, "--to-mesh", "4x8", env=env, rendezvous="c10d")
    said = ends(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert contents(out) == alone


@pytest.mark.skipif(not KILLS, reason="scripts/kill_test runs it")
@pytest.mark.parametrize("seconds", [2.0, 3.0, 4.0])
def test_a_job_whose_agents_are_killed_is_started_again_by_hand(
    seconds: float, alone: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("-m", "ckpt_tools", "reshard", DCP, "-o", out, "--to-mesh", "4x8")
    agents = nodes(*words, env={"CKPT_TOOLS_PEER_TIMEOUT": "5"})
    time.sleep(seconds)
    for agent in agents:  # and the store with them
        agent.kill()
    done = torchrun(2, *words, "--resume")
    ends(agents)
    assert done.returncode == 0, done.stderr[-4000:]
    assert contents(out) == alone
