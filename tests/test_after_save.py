"""The callback of docs/check.md, run as it is written, on a real save."""

import os
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from running import ran

ROOT = Path(__file__).parent.parent
SAVE = ROOT / "tests" / "data" / "checkpoints" / "fsdp2_dcp_toplevel_multifile_4r" / "ckpt"


class _Base:
    """What stands for the classes of frameworks, which need not be installed."""

    def save(self, curr_step: int, last_step: bool) -> bool:  # noqa: ARG002, FBT001 (TorchTitan's)
        """Nothing is trained here."""
        return last_step

    def _create_checkpoint_id(self, step: int) -> str:
        return f"nowhere/step-{step}"


def _module(name: str, **held: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(held)
    return module


def test_the_callback_checks_a_save_and_writes_its_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "check.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    assert len([line for line in code.splitlines() if line]) <= 40
    for name, held in {
        "transformers": {"TrainerCallback": _Base},
        "torchtitan": {},
        "torchtitan.components": {},
        "torchtitan.components.checkpoint": {"CheckpointManager": _Base},
    }.items():
        monkeypatch.setitem(sys.modules, name, _module(name, **held))
    known: dict[str, Any] = {}
    exec(compile(code, "check.md", "exec"), known)  # noqa: S102 (our own page)
    assert _Base().save(7, True) is True  # noqa: FBT003
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
