"""Measures reading from an S3 with latency, beside obstore, torch and s5cmd.

    python scripts/bench/s3.py                  1, 10 and 50 ms, three rounds
    python scripts/bench/s3.py --ms 50 --rounds 1

moto serves a DCP directory of 46 MB (164 tensors, 4 ranks) from this machine, behind a proxy that
holds each request back and counts requests and bytes. Whole files are read by obstore's own get,
the ranges of a part by its get_ranges, the checkpoint by torch's FsspecReader (through s3fs), all
of it copied by s5cmd where that is installed. Each is a process: seconds have its start in them.
In each round all run in turn; medians are shown. moto, boto3, obstore, s3fs and torch must be
installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import data

_KEYS = {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "y", "DEFAULT_REGION": "us-east-1"}
_RUN, _PART = "s3://bench/run", "layers.[0-5].*"
_STORE = "import json, os, sys, obstore, obstore.store as s; from concurrent.futures import *\n"
_STORE += "b = s.from_url('s3://bench', client_options={'allow_http': True})\n"
_WHOLE = _STORE + (
    "names = [o['path'] for o in obstore.list_with_delimiter(b, 'run')['objects']]\n"
    "with ThreadPoolExecutor(32) as p: list(p.map(lambda n: obstore.get(b, n).bytes(), names))\n"
)
_RANGES = _STORE + (
    "files = json.load(open(sys.argv[1])).items()\n"
    "def get(file): return obstore.get_ranges(b, file[0], starts=file[1][0], ends=file[1][1])\n"
    "with ThreadPoolExecutor(32) as p: list(p.map(get, files))\n"
)
_TORCH = (
    "import torch, torch.distributed.checkpoint as dcp\n"
    "from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader\n"
    "r = FsspecReader('s3://bench/run'); m = r.read_metadata().state_dict_metadata\n"
    "t = {n: torch.empty(e.size, dtype=e.properties.dtype) for n, e in m.items()"
    " if hasattr(e, 'chunks')}\n"
    "dcp.load(t, storage_reader=r, no_dist=True)\n"
)


class Cost(NamedTuple):
    """Of one process: seconds, those of its cores, and what it asked the server for."""

    seconds: float
    cpu: float
    requests: int
    nbytes: int


async def _proxy(port: int, *, seconds: float) -> None:
    """Pass on what comes in at ``port`` to the next one, each request after so many seconds; the
    one after that gives and clears the counts.
    """
    counts = [0, 0]

    async def passed(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_request: bool
    ) -> None:
        with suppress(ConnectionError):
            while part := await reader.read(1 << 18):
                counts[0] += part.count(b" HTTP/1.1\r\n") if is_request else 0
                counts[1] += 0 if is_request else len(part)
                await asyncio.sleep(seconds if is_request else 0)
                writer.write(part)
                await writer.drain()
        writer.close()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server = await asyncio.open_connection("127.0.0.1", port + 1)
        there = passed(reader, to_server[1], is_request=True)
        await asyncio.gather(there, passed(to_server[0], writer, is_request=False))

    async def counted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(counts).encode())
        counts[:] = 0, 0
        writer.close()

    await asyncio.start_server(counted, "127.0.0.1", port + 2)
    server = await asyncio.start_server(client, "127.0.0.1", port)
    await server.serve_forever()


def serve(port: int, milliseconds: float, folder: str) -> None:
    """Serve this folder as s3://bench/run until killed."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.disable()
    ThreadedMotoServer(port=port + 1, verbose=False).start()
    s3 = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port + 1}")
    s3.create_bucket(Bucket="bench")
    for path in Path(folder).iterdir():
        s3.upload_file(str(path), "bench", f"run/{path.name}")
    asyncio.run(_proxy(port, seconds=milliseconds / 1000))


@contextmanager
def _served(folder: Path, *, port: int, milliseconds: float) -> Iterator[None]:
    words = (sys.executable, __file__, "--serve", str(port), str(milliseconds), str(folder))
    process = subprocess.Popen(words)  # noqa: S603 - our own words, here and below
    try:
        while process.poll() is None:
            with suppress(OSError):
                _counts(port)
                break
            time.sleep(0.1)
        yield
    finally:
        process.kill()
        process.wait()


def _counts(port: int) -> tuple[int, int]:
    with socket.create_connection(("127.0.0.1", port + 2)) as line:
        requests, nbytes = json.loads(line.recv(100))
    return requests, nbytes


def _measured(words: tuple[str, ...], *, port: int, out: Path) -> Cost:
    _counts(port)
    begun, used = time.monotonic(), getrusage(RUSAGE_CHILDREN)  # of the server not before its end
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    seconds, now = time.monotonic() - begun, getrusage(RUSAGE_CHILDREN)
    shutil.rmtree(out, ignore_errors=True)
    cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Cost(seconds, cpu, *_counts(port))


def _ranges(folder: Path, path: Path) -> None:
    """Note the bytes of the elements that an export of the part reads, by object."""
    import ckpt_tools
    from ckpt_tools import formats
    from ckpt_tools.core.names import Filters, select
    from ckpt_tools.storage.reader import Files

    index = select(ckpt_tools.open_checkpoint(str(folder)).index, Filters(include=(_PART,)))
    found: dict[str, tuple[list[int], list[int]]] = {}
    with Files() as files:
        for entry in formats.locate(index, files).tensors:
            for where, offset, length in (chunk.data for chunk in entry.chunks):
                starts, ends = found.setdefault(f"run/{Path(where).name}", ([], []))
                starts.append(offset)
                ends.append(offset + length)
    path.write_text(json.dumps(found))


def _ways(ranges: Path, out: Path) -> dict[str, tuple[str, ...]]:
    python, ours, to = (sys.executable, "-c"), (*data.OURS,), ("-o", str(out), "-q")
    ways = {
        "start alone": (*ours, "--version"),
        "inspect": (*ours, "inspect", _RUN, "-q"),
        "obstore get, all files": (*python, _WHOLE),
        "verify": (*ours, "verify", _RUN, "-q"),
        "fingerprint": (*ours, "fingerprint", _RUN, "-q"),
        "reshard to 2 ranks": (*ours, "reshard", _RUN, "--to-mesh", "2", *to),
        "export of all": (*ours, "export", _RUN, *to),
        "torch FsspecReader, all": (*python, _TORCH),
        "obstore get_ranges, a third": (*python, _RANGES, str(ranges)),
        "export of a third": (*ours, "export", _RUN, "-i", _PART, *to),
    }
    if shutil.which("s5cmd"):
        at = ("--endpoint-url", os.environ["AWS_ENDPOINT_URL"])
        ways["s5cmd cp, all files"] = ("s5cmd", *at, "cp", f"{_RUN}/*", f"{out}/")
    return ways


def _shapes() -> data.Shapes:
    layer = {f"{name}.weight": (416, 416) for name in ("wq", "wk", "wv", "wo", "w1", "w2", "w3")}
    layer |= {"n1.weight": (416,), "n2.weight": (416,)}
    shapes = {f"layers.{n}.{name}": shape for n in range(18) for name, shape in layer.items()}
    return shapes | {"emb.weight": (2000, 416), "out.weight": (2000, 416)}


def main() -> None:
    """Measure all in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ms", type=float, nargs="*", default=[1, 10, 50])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=9740)
    parser.add_argument("--only", default="", help="rows or their beginnings, commas between")
    asked = parser.parse_args()
    endpoint = {"ENDPOINT_URL": f"http://127.0.0.1:{asked.port}"}
    os.environ |= {f"AWS_{name}": value for name, value in {**_KEYS, **endpoint}.items()}
    ours = data.compiled(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ours, os.getenv("PYTHONPATH")]))
    rows: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as name:
        full, folder, ranges = (Path(name) / part for part in ("m.safetensors", "dcp", "ranges"))
        data.write_full(full, _shapes(), "BF16")
        data.dcp_rows(full, folder, ranks=4)
        _ranges(folder, ranges)
        measure = partial(_measured, port=asked.port, out=Path(name) / "out")
        for milliseconds in asked.ms:
            with _served(folder, port=asked.port, milliseconds=milliseconds):
                ways = _ways(ranges, Path(name) / "out")
                ways = {n: ways[n] for n in ways if n.startswith(tuple(asked.only.split(",")))}
                in_turn = [[measure(words) for words in ways.values()] for _ in range(asked.rounds)]
                for way, costs in zip(ways, zip(*in_turn, strict=True), strict=True):
                    cells = [f"{costs[-1].requests:,}", f"{costs[-1].nbytes / 1e6:.1f}"]
                    cells.append(f"{median(cost.cpu for cost in costs):.2f}")
                    seconds = median(cost.seconds for cost in costs)
                    rows.setdefault(way, cells).append(f"{seconds:.2f}")
                    print(f"{way}, {milliseconds:g} ms: {costs}", file=sys.stderr)
    print(f"| | requests | MB | CPU s | {' | '.join(f'{ms:g} ms' for ms in asked.ms)} |")
    print(f"|---|{'--:|' * (3 + len(asked.ms))}")
    for way, cells in rows.items():
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
    main()
