"""No name moves the cursor: not those of files, tensors and classes, in answers and in errors."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from pickled import CHECKPOINTS, archive_of, name, tensor, text
from safetensors.numpy import save_file
from terminals import shown_by

DCP = CHECKPOINTS / "fsdp2_dcp_1d_4r" / "ckpt"
# Clears the screen, rings, breaks the line, turns the direction of reading; ten bytes.
EVIL = "\x1b[2J\x07\n\u202e\x7f"
# Sets the title, and clears the screen in one character; as long as the name of a data file.
EVIL_FILE = "\x1b]0;x\x07\x9b2J\r\n"
OURS = re.compile(r"\x1b\[(0|1|31|32|33|1;31|31;1|38;5;\d+;48;5;\d+)?m")  # the colours that we show

# Runs the commands one after another as if each had a process of its own.
DRIVER = """
import json, sys
from ckpt_tools.cli import main

for words in json.loads(sys.argv[1]):
    sys.argv = ["ckpt-tools", *words]
    print("--- " + json.dumps(words), flush=True)
    try:
        main()
    except SystemExit as end:
        print(end.code)
"""


def _changed(folder: Path, old: str, new: str) -> str:
    """A copy of a DCP directory with another text of the same length in its metadata."""
    shutil.copytree(DCP, folder)
    assert len(old.encode()) == len(new.encode())
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(old.encode(), new.encode()))
    return str(folder)


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Checkpoints whose names of all kinds are hostile."""
    run, model = tmp_path / f"run{EVIL}", tmp_path / f"hf{EVIL}"
    model.mkdir()
    weights = {EVIL: np.ones((2, 2), np.float32), f"{EVIL}.b": np.zeros(4, np.float32)}
    save_file(weights, model / f"m{EVIL_FILE}.safetensors", {EVIL: EVIL})
    listed = tmp_path / "listed"
    listed.mkdir()
    weight_map = {"weight_map": {EVIL: EVIL_FILE}}
    (listed / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    odd = b"\x8c\x07m\x1b[2J\x07K" + text("C") + b"\x93)\x81"
    values = text(EVIL) + text(EVIL) + text("o") + odd + text("w") + tensor() + text("d")
    body = b"\x80\x02}(" + values + name("torch.device") + text("cpu") + b"\x85R" + b"u."
    records = {"data.pkl": body, "version": b"3\n", "data/0": bytes(24)}
    (tmp_path / f"t{EVIL}.pt").write_bytes(archive_of(records))
    return {
        "dcp": _changed(run / "step-1", "emb.weight", EVIL),
        "lost": _changed(run / "step-2", "__2_0.distcp", EVIL_FILE),
        "run": str(run),
        "hf": str(model),
        "listed": str(listed),
        "torch": str(tmp_path / f"t{EVIL}.pt"),
        "out": str(tmp_path / f"out{EVIL}"),
        "none": str(tmp_path / f"none{EVIL}"),
    }


COMMANDS = """
inspect dcp | inspect dcp --all --shards | inspect run | inspect lost | inspect none
inspect listed | inspect listed -vv | inspect torch --all | inspect hf --html none
ls dcp | ls dcp -l | ls dcp --tree | ls dcp --json | ls dcp --jsonl | ls hf --csv | ls torch
show dcp NAME | show hf EVIL | show hf b | show torch EVIL | show torch o | show dcp emb
layout dcp | layout dcp NAME | layout hf | layout lost | stats hf | fingerprint hf -l
verify dcp | verify dcp --quick | verify run | verify lost --quick | verify torch
verify hf --against dcp | diff dcp hf | diff hf lost
export hf -o out --check | export hf -o out | export hf -o out --dtype bf16 --force
export torch -o none.pt | export lost -o none | reshard hf -o none --to-mesh 2 --dry-run -vv
reshard lost -o none --to-mesh 2 | inspect EVIL | inspect --EVIL | EVIL dcp
ls dcp -i EVIL | ls dcp -x re:EVIL(
"""


def test_no_name_reaches_the_terminal_as_it_is(places: dict[str, str]) -> None:
    words = {**places, "EVIL": EVIL, "--EVIL": f"--{EVIL}", "NAME": f"app.model.{EVIL}"}
    words |= {"re:EVIL(": f"re:{EVIL}(", "none.pt": f"{places['none']}.pt"}
    commands = [
        [words.get(word, word) for word in command.split()]
        for line in COMMANDS.strip().splitlines()
        for command in line.split("|")
    ]
    shown = shown_by("-c", DRIVER, json.dumps(commands))
    parts = shown.split("--- ")[1:]
    assert len(parts) == len(commands) > 40
    for part in parts:
        assert "itself failed" not in part
        for line in re.split("\r\n|\r", OURS.sub("", part)):  # a bar goes back to its beginning
            assert line.isprintable(), part
