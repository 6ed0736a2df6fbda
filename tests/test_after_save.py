"""The callback of docs/check.md, run as it is written, on a real save."""

import os
import re
import shutil
import types
from pathlib import Path

import pytest
from running import ran

ROOT = Path(__file__).parent.parent
SAVE = ROOT / "tests" / "data" / "checkpoints" / "fsdp2_dcp_toplevel_multifile_4r" / "ckpt"


class _Base:
    """What stands for the classes of frameworks, which need not be installed."""

    def save(self, curr_step: int) -> None:
        """Nothing is trained here."""


def test_the_callback_checks_a_save_and_writes_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 40
    trainer = types.SimpleNamespace(TrainerCallback=_Base)
    checkpoint = types.SimpleNamespace(CheckpointManager=_Base)
    titan = types.SimpleNamespace(components=types.SimpleNamespace(checkpoint=checkpoint))
    known = {"transformers": trainer, "torchtitan": titan}
    exec(compile(code, "check.md", "exec"), known)  # noqa: S102 (our own page)
    folder = shutil.copytree(SAVE, tmp_path / "checkpoint-3")
    assert known["after_save"](str(folder), rank=1) is None
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert known["after_save"](str(folder)).wait() == 0
    assert "complete" in Path(f"{folder}.check.log").read_text()
    ran("verify", folder, "--against", f"{folder}.fingerprint.json")
    os.unlink(folder / "__1_0.distcp")
    assert known["after_save"](str(folder)).wait() != 0
    assert "NOT COMPLETE" in Path(f"{folder}.check.log").read_text()
