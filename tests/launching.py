"""Starts torchrun jobs, with one thread a rank and a port of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

# Seconds after which a job counts as hanging: on a twentieth of a core the largest takes 245.
PATIENCE = 300
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
    """Run a job to its end, whatever that is."""
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, *map(str, arguments)],
        env={**ENVIRONMENT, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
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


def ends(agents: list[subprocess.Popen[str]], *, within: float = PATIENCE) -> list[str]:
    """What the agents said; they must end within so many seconds."""
    try:
        return [agent.communicate(timeout=within)[0] for agent in agents]
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
