"""Measures reading from a web server over a line of known width, as root.

    python scripts/bench/stores.py --mbit 2000 --gib 1 --rounds 3

nginx serves a DCP directory in a network namespace of its own, through a line that `tc` limits.
`curl` fetches all files in parallel to nowhere and to a folder; ckpt-tools fingerprints them and
exports them. nginx, curl and iproute2 must be installed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import data
import table
from measure import Cost, measure

_SERVER, _CLIENT = "10.213.0.1", "10.213.0.2"
_SPACE = "ckpt-tools-bench"
_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 256; }}
http {{
    access_log off; sendfile on; autoindex on; client_body_temp_path {folder}/body;
    server {{ listen {address}:8080; root {folder}; }}
}}
"""


def _run(*words: str) -> None:
    subprocess.run(words, check=True)  # noqa: S603 - our own words


@contextmanager
def server(folder: Path, *, mbit: int) -> Iterator[str]:
    """The address of a web server of this folder behind a line of so many Mbit/s."""
    _run("ip", "netns", "add", _SPACE)
    try:
        _run(*"ip link add bench0 type veth peer bench1 netns".split(), _SPACE)  # noqa: SIM905
        _run(*f"ip addr add {_CLIENT}/24 dev bench0".split())
        _run(*["ip", "link", "set", "bench0", "up"])
        inside = ("ip", "netns", "exec", _SPACE)
        _run(*inside, *f"ip addr add {_SERVER}/24 dev bench1".split())
        _run(*inside, *["ip", "link", "set", "bench1", "up"])
        limit = f"tc qdisc add dev bench1 root tbf rate {mbit}mbit burst 4mb latency 50ms"
        _run(*inside, *limit.split())
        conf = folder / "nginx.conf"
        conf.write_text(_NGINX.format(folder=folder, address=_SERVER))
        nginx = subprocess.Popen([*inside, "nginx", "-c", str(conf)])  # noqa: S603
        try:
            yield f"http://{_SERVER}:8080/dcp"
        finally:
            nginx.terminate()
            nginx.wait()
    finally:
        _run("ip", "netns", "del", _SPACE)


def main() -> None:
    """Measure all commands in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=2000, help="width of the line")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    os.environ["PYTHONPATH"] = data.compiled(Path(__file__).parents[2])
    costs: dict[str, list[Cost]] = {}
    shm = Path("/dev/shm")  # noqa: S108 - a folder in it is made
    with tempfile.TemporaryDirectory(dir=shm) as name:
        folder = Path(name)
        folder.chmod(0o755)
        full = folder / "model.safetensors"
        data.write_full(full, data.llama(int(asked.gib * 2**30), 2), "BF16")
        data.dcp_rows(full, folder / "dcp")
        full.unlink()
        files = [
            str(Path(file).relative_to(folder / "dcp")) for file in data.files_of(folder / "dcp")
        ]
        out = folder / "out"
        with server(folder, mbit=asked.mbit) as address:
            urls = [f"{address}/{file}" for file in files]
            curl = ("curl", "-sS", "-Z", "--parallel-max", "16")
            nowhere = [word for url in urls for word in ("-o", "/dev/null", url)]
            kept = [
                word
                for file, url in zip(files, urls, strict=True)
                for word in ("-o", f"{out}/{file}", url)
            ]
            ways = {
                "curl to nowhere": (*curl, *nowhere),
                "curl to a folder": (*curl, "--create-dirs", *kept),
                "ckpt-tools fingerprint": (*data.OURS, "fingerprint", address, "-q"),
                "ckpt-tools export": (
                    *data.OURS,
                    "export",
                    address,
                    "-o",
                    f"{out}/all.safetensors",
                    "-q",
                ),
            }
            for _ in range(asked.rounds):
                for way, words in ways.items():
                    out.mkdir()
                    costs.setdefault(way, []).append(measure(words))
                    shutil.rmtree(out)
    print(table.HEADER)
    for row in table.rows(
        f"{asked.mbit} Mbit/s", costs, ours="ckpt-tools export", base="curl to a folder"
    ):
        print(row)


if __name__ == "__main__":
    sys.exit(main())
