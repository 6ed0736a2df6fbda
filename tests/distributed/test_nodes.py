"""Jobs on two nodes, which are two torchrun agents on this machine: what they write, and how they
end when a rank or an agent is killed.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import JOBS, PATIENCE, ckpt_tools, contents, ends, nodes

from ckpt_tools.copying.atomic_output import place_of

pytestmark = [pytest.mark.torchrun, pytest.mark.slow]

DATA = Path(__file__).parents[1] / "data" / "checkpoints"
DCP = DATA / "fsdp2_dcp_1d_4r" / "ckpt"
RANKS = DATA / "torch-2.11-cuda-fsdp2-2" / "ranks"
TO_MESH = ("--to-mesh", "4x8")


# ------------------------------------------------------------------------------ what they write


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_nodes_write_what_one_process_writes_by_every_engine(
    tmp_path: Path, rendezvous: str
) -> None:
    sources = {"copy": DCP, "dcp": DCP, "gather": RANKS}
    tasks = [
        {"engine": engine, "ckpt": source, "mesh": "2", "out": tmp_path / engine, "check": True}
        for engine, source in sources.items()
    ]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks, default=str))
    agents = nodes(JOBS / "engines.py", tmp_path / "tasks.json", rendezvous=rendezvous)
    said = ends(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    for engine, source in sources.items():
        alone = tmp_path / f"{engine}-alone"
        ckpt_tools("reshard", source, "-o", alone, "--to-mesh", "2", "--check")
        if engine == "dcp":  # torch's own files
            ckpt_tools("diff", alone, tmp_path / engine)
        else:
            for folder in (tmp_path / engine, alone):
                (folder / "ckpt_tools_proof.json").unlink()  # it says who compared
            assert contents(tmp_path / engine) == contents(alone)


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_nodes_export_what_one_process_exports(tmp_path: Path, rendezvous: str) -> None:
    command = ("export", DCP, "--max-shard-size", "50KB", "--check")
    agents = nodes("-m", "ckpt_tools", *command, "-o", tmp_path / "out", rendezvous=rendezvous)
    said = ends(agents)
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "".join(said).count("Proven by ") == 1
    ckpt_tools(*command, "-o", tmp_path / "alone")
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.parametrize(
    "command",
    [
        "export {} -o {}",
        "reshard {} -o {} --to-mesh 2",
        "reshard {} -o {} --to-mesh 2 --engine dcp",
    ],
)
def test_a_source_that_one_node_sees_in_part_is_refused(tmp_path: Path, command: str) -> None:
    for rank in range(2):
        shutil.copytree(DCP, tmp_path / f"source{rank}")
    (tmp_path / "source1" / "__2_0.distcp").unlink()
    asked = command.format(f"{tmp_path}/source$RANK", tmp_path / "out")
    agents = nodes("--no-python", "sh", "-c", f"exec ckpt-tools {asked}")
    said = ends(agents)
    errors = re.findall(r"^Error: .*", "".join(said), re.MULTILINE)
    assert len(errors) == 1, said
    assert errors[0].startswith("Error: Rank 1: ")
    assert "__2_0.distcp" in errors[0]
    assert "exitcode  : 3" in said[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source0", "source1"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a node its own disk")
def test_dcp_into_a_nodes_own_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = ("reshard", DCP, "-o", tmp_path / "out", "--to-mesh", "2", "--engine", "dcp")
    said = ends(nodes("-m", "ckpt_tools", *arguments, own_disk=tmp_path))
    assert f"Error: Rank 1: {tmp_path}/out.partial on " in said[0]
    assert "exitcode  : 2" in said[0]
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- how they end


class Job:
    """A reshard on two nodes, one rank of which stands still where it was asked to."""

    def __init__(self, folder: Path, stall: str, rendezvous: str) -> None:
        self.arguments = ("reshard", DCP, "-o", folder / "out", *TO_MESH)
        self.rank = int(stall[0])
        self._out = place_of(str(folder / "out"))
        self._marker = folder / "stalled"
        env = {"CKPT_TOOLS_PEER_TIMEOUT": "5", "STALL": f"{stall}:{self._marker}"}
        words = (JOBS / "stall.py", *self.arguments)
        self.agents = nodes(*words, env=env, rendezvous=rendezvous)
        until(lambda: self._marker.exists() and len(self._ranks()) == 2)
        self._stalled = int(self._marker.read_text())

    def other_finishes(self) -> None:
        """Wait until the other rank has finished files of its share."""
        until(lambda: self._out.has_finished)

    def kill_rank(self) -> None:
        """Kill the rank that stands still."""
        os.kill(self._stalled, signal.SIGKILL)

    def kill_agent(self) -> None:
        """Kill the agent of the rank that stands still, and let this go on."""
        status = Path(f"/proc/{self._stalled}/stat").read_text()
        agent = int(status.rpartition(")")[2].split()[1])
        os.kill(agent, signal.SIGKILL)
        until(lambda: not is_alive(agent))
        self._marker.unlink()

    def end(self) -> list[str]:
        """What the agents said. Both have to end, and all ranks with them."""
        said = ends(self.agents)
        self.ranks_end()
        return said

    def ranks_end(self) -> None:
        """Wait until all ranks have ended."""
        until(lambda: not any(map(is_alive, self._ranks())))

    def _ranks(self) -> list[int]:
        """The processes of those that have begun."""
        files = self._marker.parent.glob("stalled.[01]")
        return [int(number) for file in files if (number := file.read_text())]


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    """Whether a process runs: one that nobody waits for has ended."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str, str], Job]]:
    """Starts a job, of which nothing is left in the end."""
    jobs: list[Job] = []

    def starting(stall: str, rendezvous: str) -> Job:
        jobs.append(Job(tmp_path, stall, rendezvous))
        return jobs[-1]

    yield starting
    for agent in (agent for job in jobs for agent in job.agents):
        agent.kill()
    for file in tmp_path.glob("stalled.[01]"):
        subprocess.run(["kill", "-9", file.read_text()], check=False, capture_output=True)
    for agent in (agent for job in jobs for agent in job.agents):
        agent.communicate()


def resumes(arguments: tuple[str | Path, ...], folder: Path) -> str:
    """What the same command says with --resume, which must write what a run alone writes."""
    assert not (folder / "out").exists()
    resumed = ckpt_tools(*arguments, "--resume")
    ckpt_tools(*arguments[:3], folder / "alone", *arguments[4:])
    assert contents(folder / "out") == contents(folder / "alone")
    return resumed.stderr


@pytest.mark.parametrize(
    ("stall", "words"),
    [
        ("1:group:join", r"Of the 2 ranks of this torchrun job, 1 did not join within 10 s"),
        ("1:run:_lead_or_follow", r"Rank 1 on .* sent no heartbeat for 5 seconds"),
    ],
)
def test_a_rank_killed_before_all_have_met_ends_the_job_with_one_error(
    tmp_path: Path, start: Callable[[str, str], Job], stall: str, words: str
) -> None:
    job = start(stall, "static")
    job.kill_rank()
    said = job.end()
    assert "exitcode  : 4" in said[0]
    (error,) = re.findall(r"^Error: .*", "".join(said), re.MULTILINE)
    assert re.search(words, error)
    resumes(job.arguments, tmp_path)


@pytest.mark.parametrize("stall", ["0::", "0:run:write_share"])
def test_a_job_whose_store_dies_with_its_agent_ends_and_resume_goes_on(
    tmp_path: Path, start: Callable[[str, str], Job], stall: str
) -> None:
    job = start(stall, "static")
    if stall != "0::":
        job.other_finishes()
    job.kill_agent()
    ended, other = job.end()
    words = (
        r"The torchrun job's store at .* is gone|Nothing listens at .* the job's store has ended"
    )
    assert "exitcode  : 4" in other
    for said in (ended, other):
        (error,) = re.findall(r"^Error: .*", said, re.MULTILINE)  # on each node, for its own
        assert re.search(words, error)
    assert ("Resuming: " in resumes(job.arguments, tmp_path)) == (stall != "0::")


@pytest.mark.parametrize("stall", ["1::", "1:run:write_share"])
def test_the_ranks_of_an_agent_that_is_killed_finish(
    tmp_path: Path, start: Callable[[str, str], Job], stall: str
) -> None:
    job = start(stall, "static")
    job.kill_agent()
    job.ranks_end()
    ckpt_tools(*job.arguments[:3], tmp_path / "alone", *TO_MESH)
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


@pytest.mark.parametrize(("killed", "speaks"), [(1, 0), (0, 1)])
def test_a_rank_killed_under_a_static_rendezvous_ends_the_job_and_resume_goes_on(
    tmp_path: Path, start: Callable[[str, str], Job], killed: int, speaks: int
) -> None:
    job = start(f"{killed}:run:write_share", "static")
    job.other_finishes()
    job.kill_rank()
    said = job.end()
    assert "exitcode  : 4" in said[speaks]
    assert len(re.findall(r"^Error: ", said[speaks], re.MULTILINE)) == 1
    assert "Resuming: " in resumes(job.arguments, tmp_path)
