"""Starts torchrun jobs, with one thread a rank and a port of their own."""

import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryFile

# Seconds after which a job counts as hanging: on a twentieth of a core the largest takes 245.
PATIENCE = 300
# Ports of jobs, bound until the tests end: no other program gets them, and torch listens there all
# the same, because both say SO_REUSEADDR and only one of them listens.
_HELD: list[socket.socket] = []
BIN = Path(sys.executable).parent
JOBS = Path(__file__).parent / "jobs"
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
    "OMP_NUM_THREADS": "1",
    "PATH": f"{BIN}:{os.environ['PATH']}",
}


def torchrun(
    ranks: int, *arguments: str | Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a job to its end, whatever that is.

    Its agent is torchrun's own, forked from this process, which need not load torch once more.
    """
    import torch.distributed.run  # noqa: F401 (once, for all agents)

    words = ["--standalone", "--nproc-per-node", str(ranks), *map(str, arguments)]
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given = (words, {**ENVIRONMENT, **(env or {})}, out.fileno(), err.fileno())
        agent = multiprocessing.get_context("fork").Process(target=_agent, args=given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            agent.start()
        agent.join(PATIENCE)
        if agent.exitcode is None:
            agent.kill()
            raise subprocess.TimeoutExpired(words, PATIENCE)
        texts = [file.read() for file in (out, err) if file.seek(0) == 0]
    return subprocess.CompletedProcess(words, agent.exitcode, *texts)


def _agent(words: list[str], environment: dict[str, str], out: int, err: int) -> None:
    """What the command torchrun does, in a process that was forked for it."""
    from torch.distributed.run import main  # late: few tests start jobs

    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    logging.root.handlers.clear()  # those of pytest
    os.environ.clear()
    os.environ.update(environment)
    main(words)


def nodes(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    own_disk: Path | None = None,
    rendezvous: str = "static",
) -> list[subprocess.Popen[str]]:
    """Start a job on two nodes of one rank each, which are two agents on this machine.

    The second node sees a disk of its own at ``own_disk``; only root can have that. The rendezvous
    is torchrun's: "static", or "c10d", under which any of the two may get rank 0.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD.append(held)
    port = held.getsockname()[1]
    agents = []
    for number in range(2):
        command = [str(BIN / "torchrun"), "--nnodes", "2", "--nproc-per-node", "1"]
        if rendezvous == "static":
            command += ["--node-rank", str(number), "--master-addr", "127.0.0.1"]
            command += ["--master-port", str(port)]
        else:
            command += ["--rdzv-backend", rendezvous, "--rdzv-id", "test"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
        command += map(str, arguments)
        if own_disk is not None and number == 1:
            mounted = f'mount -t tmpfs none {own_disk} && exec "$@"'
            command = ["unshare", "-m", "sh", "-c", mounted, "sh", *command]
        agents.append(
            subprocess.Popen(
                command,
                env={**ENVIRONMENT, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return agents


def ends(agents: list[subprocess.Popen[str]]) -> list[str]:
    """What the agents said; they must end."""
    try:
        return [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()


def job(ranks: int, name: str, *arguments: str | Path) -> None:
    """Run a job of `tests/jobs`, which must end well."""
    done = torchrun(ranks, JOBS / name, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]


def ckpt_tools(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in one process, which must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "ckpt_tools", *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
