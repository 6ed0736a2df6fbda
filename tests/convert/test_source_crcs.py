"""Damage of the source is refused by default, by whoever copies it."""

import random
from itertools import product
from pathlib import Path

import pytest
import running
from click.testing import Result
from damages import ZIPS, Victim

import ckpt_tools
from ckpt_tools.core.crc import KnownCrcs, crc32
from ckpt_tools.core.index import ByteRange
from ckpt_tools.errors import UnreadableError

COMMANDS = {
    "export": ("export",),
    "one file": ("export", "--only", "all", "--keep-names", "--format", "torch"),
    "rows": ("reshard", "--to-mesh", "3"),
    "workers": ("reshard", "--to-mesh", "3", "-j", "2"),
    "columns": ("reshard", "--to-mesh", "2", "--place", "*emb.weight=S(1)"),
    "cast": ("export", "--dtype", "bf16"),
}


def hurt(base: str, folder: Path, *, seed: int) -> tuple[Victim, str]:
    """A checkpoint with one flipped bit inside of a tensor of the model, and that tensor's name."""
    choose = random.Random(seed)  # noqa: S311 - a test's own choice
    folder.mkdir()
    victim = Victim(base, folder, choose)
    entries = [e for e in victim.index().tensors if e.section == "model" and len(e.shape) == 2]
    entry = choose.choice(entries)
    chunk = choose.choice([chunk for chunk in entry.chunks if chunk.box.numel])
    victim.flip(chunk.data)
    return victim, entry.fqn


def run(victim: Victim, out: Path, kind: str, *options: str) -> Result:
    command, *more = COMMANDS[kind]
    return running.run(command, victim.path, "-o", out, *more, *options)


@pytest.mark.parametrize(
    ("base", "kind"),
    [
        # Workers of one format show what those of the others do.
        pytest.param(
            *way, marks=[pytest.mark.slow] if way[1] == "workers" and way[0] != "dcp" else []
        )
        for way in product(ZIPS, COMMANDS)
    ],
)
def test_a_flipped_bit_is_refused(base: str, kind: str, tmp_path: Path) -> None:
    victim, fqn = hurt(base, tmp_path / "source", seed=len(base) + len(kind))
    out = tmp_path / ("out.pt" if kind == "one file" else "out")
    done = run(victim, out, kind)
    assert done.exit_code == 3, done.output
    # Replicas without a CRC in their header are compared first.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    if "rows hold different ones" not in done.stderr:
        assert f"is damaged: {fqn} [" in done.stderr
        assert "OUT was not created." in done.stderr
        assert run(victim, out, kind, "--no-verify-source").exit_code == 0


@pytest.mark.parametrize("base", ZIPS)
def test_the_library_refuses_a_damaged_tensor_and_reads_its_slices(
    base: str, tmp_path: Path
) -> None:
    victim, fqn = hurt(base, tmp_path / "source", seed=3)
    tensor = ckpt_tools.open_checkpoint(victim.path)[fqn]
    with pytest.raises(UnreadableError, match="is damaged") as raised:
        tensor[:]
    assert "OUT" not in str(raised.value.hint)
    assert len(tensor[0:1]) == 1


def test_a_sound_source_needs_no_note_and_one_without_checksums_has_one(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = Victim("dcp", tmp_path / "source", random.Random(0))  # noqa: S311 - a test's own choice
    done = run(source, tmp_path / "model.safetensors", "export")
    assert "checksums" not in done.stderr
    words = ["export", str(tmp_path / "model.safetensors"), "-o", str(tmp_path / "again")]
    done = running.run(*words)
    assert "Not compared with checksums of the source: " in done.stderr
    assert "of which it keeps none" in done.stderr


def test_what_was_seen_is_packed_and_opened_again() -> None:
    data, seen, other = bytes(range(200)), KnownCrcs(), KnownCrcs()
    seen.add(ByteRange("a", 10, 100), crc32(data[:100]))
    seen.add(ByteRange("a", 110, 100), crc32(data[100:]))
    seen.stored[ByteRange("b", 0, 900)] = ByteRange("b", 704, 16), 5, "record 'data/0'"
    other.add_packed(seen.packed())
    assert other.stored == seen.stored
    assert other.crc_of(ByteRange("a", 10, 200)) == crc32(data)
    assert other.crc_of(ByteRange("a", 10, 150)) is None
    assert other.nbytes == 200
