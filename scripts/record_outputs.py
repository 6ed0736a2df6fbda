"""Records the SHA-256 of every file that export and reshard write, to compare two commits.

Eight real sources x (export, reshard to DCP, reshard to rank files) x (one process, two workers,
four ranks under torchrun): one JSON object a line. Two commits that write the same give the same
record:

    scripts/record --outputs before.jsonl; git switch …; scripts/record --outputs after.jsonl
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

DATA = "tests/data/checkpoints"
SOURCES = (
    "fsdp2_dcp_hsdp_2x4/ckpt",
    "fsdp2_tp_dcp_2x2/ckpt",
    "fsdp2_torchsave_1d_4r/ckpt",
    "fsdp1_sharded_mesh1d_dcp/ckpt",
    "fsdp2_full_torchsave_4r/ckpt/consolidated.pt",
    "torchtitan_llama3_4r/ckpt/checkpoint_full/step-2",
    "hf_sharded_safetensors/ckpt",
    "dcp_zstd_4r/ckpt",
)
JOBS = {
    "export": ("export", "--only", "all", "--max-shard-size", "2KB"),
    "dcp": ("reshard", "--to-mesh", "2x2"),
    "ranks": ("reshard", "--to-mesh", "2x2", "--format", "ranks"),
}
RUNS = {
    "alone": (sys.executable, "-m", "ckpt_tools"),
    "workers": (sys.executable, "-m", "ckpt_tools"),
    "ranks": (
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"),
        *("--master-port", "29653", "-m", "ckpt_tools"),
    ),
}


def digests(folder: str) -> dict[str, str]:
    """The SHA-256 of each file below a folder, by its path there."""
    found = {}
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[os.path.relpath(path, folder)] = digest
    return dict(sorted(found.items()))


def outputs(source: str) -> Iterator[str]:
    """What each job writes from one source, in each way to run it."""
    for job, words in JOBS.items():
        for run, program in RUNS.items():
            folder = tempfile.mkdtemp()
            out = os.path.join(folder, "out")
            more = ("-j", "2") if run == "workers" else ()
            command = [*program, words[0], f"{DATA}/{source}", "-o", out, *words[1:], *more]
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
            facts = {"source": source, "job": job, "run": run, "exit_code": done.returncode}
            yield json.dumps(facts | {"files": digests(out)})
            shutil.rmtree(folder)


def main() -> None:
    """Write the record to the file that is named."""
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for source in SOURCES:
            for line in outputs(source):
                file.write(line + "\n")
                file.flush()


if __name__ == "__main__":
    main()
