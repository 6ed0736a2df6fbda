"""--check reads the output back before it gets its name, and the proof stands in the output."""

import dataclasses
import json
import random
import struct
from contextlib import nullcontext
from pathlib import Path
from zlib import crc32

import pytest
import torch
import torch.distributed.checkpoint as dcp
from alone import ALONE
from damages import Victim
from dtensor_files import ROWS, drifted, dtensor, mesh_of, shard
from reader_contract import DATA
from running import run
from safetensors import safe_open
from safetensors.torch import save_file
from size_records import DEFAULT

from ckpt_tools import api, formats
from ckpt_tools.convert import check as checking
from ckpt_tools.convert.export import ExportOptions, export_of
from ckpt_tools.convert.reshard import ReshardOptions, plan_reshard
from ckpt_tools.convert.write import WriteOptions
from ckpt_tools.copying import write as copy
from ckpt_tools.copying.parallel import Listener
from ckpt_tools.core.crc import KnownCrcs
from ckpt_tools.core.index import ByteRange
from ckpt_tools.core.layout import Mesh
from ckpt_tools.core.sizes import Sizes
from ckpt_tools.distributed.run import write_here
from ckpt_tools.errors import UnreadableError, WriteError
from ckpt_tools.formats.rank_files import entries
from ckpt_tools.proof import damage
from ckpt_tools.storage.reader import Files

WHOLE = torch.arange(24, dtype=torch.float32).view(6, 4)
DCP = str(DATA / "checkpoints" / "fsdp2_dcp_hsdp_2x4" / "ckpt")


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_an_export_says_and_keeps_what_was_proven(dtype: str, tmp_path: Path) -> None:
    result = run("export", DCP, "-o", str(tmp_path / "out"), "--check", "--dtype", dtype)
    assert result.exit_code == 0
    words = result.stderr.splitlines()[-1]
    assert words.startswith("Proven by comparison: the 13 tensors written")
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata()["proof"].rstrip() == words


def test_a_reshard_keeps_the_proof_beside_the_shards(tmp_path: Path) -> None:
    assert (
        run("reshard", DCP, "-o", str(tmp_path / "out"), "--to-mesh", "3", "--check").exit_code == 0
    )
    told = json.loads((tmp_path / "out" / "ckpt_tools_proof.json").read_text())
    assert "equal the source: 46 bit for bit." in told["proof"]
    assert "So are its 14 objects and 17 containers, by value." in told["proof"]


@pytest.mark.parametrize("command", ["export", "reshard"])
def test_an_output_with_a_wrong_value_never_gets_its_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copy.write_files

    def faulty(plans: object, **options: object) -> None:
        real(plans, **options)
        for path in Path(str(options["root"])).parent.rglob("*"):
            if path.suffix in (".safetensors", ".distcp") and path.stat().st_size:
                data = bytearray(path.read_bytes())
                data[-900 if path.suffix == ".distcp" else -1] ^= 1
                path.write_bytes(data)

    monkeypatch.setattr(copy, "write_files", faulty)
    more = ["--to-mesh", "2"] if command == "reshard" else []
    result = run(command, DCP, "-o", str(tmp_path / "out"), "--check", *more)
    assert result.exit_code in (3, 4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("form", "file", "record"),
    [
        ("ranks", "model_world_size_4_rank_3.pt", "data/0"),  # a replica of rank 1's
        ("dcp", "__1_0.distcp", ".data/serialization_id"),  # torch reads it, too
    ],
)
def test_an_output_that_is_wrong_where_no_tensor_is_read_never_gets_its_name(
    form: str, file: str, record: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = copy.write_files

    def faulty(plans: object, **options: object) -> None:
        real(plans, **options)
        path = next(Path(str(options["root"])).parent.rglob(file))
        data = bytearray(path.read_bytes())
        local = data.rindex(b"PK\3\4", 0, data.index(f"/{record}".encode()))
        data[local + 30 + sum(struct.unpack_from("<2H", data, local + 26))] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(copy, "write_files", faulty)
    out = str(tmp_path / "out")
    result = run("reshard", DCP, "-o", out, "--to-mesh", "2x2", "--format", form, "--check")
    assert (result.exit_code, (tmp_path / "out").exists()) == (4, False)
    assert "read back, is damaged" in result.stderr


def test_the_check_of_several_folders_is_refused(tmp_path: Path) -> None:
    result = run(
        "reshard", DCP, "-o", str(tmp_path / "o"), "--to-mesh", "2", "--check",
        "--layout", "accelerate",
    )  # fmt: skip
    assert result.exit_code == 2


# ------------------------------------------------------------------ the source's own checksums


def flipped(victim: Victim) -> str:
    """Flip a bit in the last chunk of the largest tensor of the model, and give its name."""
    model = [entry for entry in victim.index().tensors if entry.section == "model"]
    entry = max(model, key=lambda entry: entry.nbytes)
    victim.flip(entry.chunks[-1].data)
    return entry.fqn


def victim(base: str, folder: Path) -> Victim:
    folder.mkdir(exist_ok=True)
    return Victim(base, folder, random.Random(base))  # noqa: S311 - a test's own choice


WAYS = {
    "export": ["export"],
    "cast": ["export", "--dtype", "bf16"],
    "pt": ["export", "--format", "torch"],
    "reshard": ["reshard", "--to-mesh", "3"],
    "ranks": ["reshard", "--to-mesh", "3", "--format", "ranks"],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("base", ["dcp", "dcp-hsdp", "ranks", "torch"])
def test_the_copy_of_a_damaged_source_is_never_proven(base: str, way: str, tmp_path: Path) -> None:
    hurt = victim(base, tmp_path / "source")
    name = flipped(hurt)
    result = run(*WAYS[way], str(hurt.path), "-o", str(tmp_path / "out"), "--check")
    assert result.exit_code == 3
    assert f"is damaged: {name} [" in result.stderr
    assert "Proven" not in result.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("base", ["torch", "ranks", "dcp"])
def test_damage_of_what_was_not_chosen_is_no_damage_of_the_copy(base: str, tmp_path: Path) -> None:
    hurt = victim(base, tmp_path / "source")
    name = flipped(hurt)
    words = ["export", str(hurt.path), "-o", str(tmp_path / "out"), "--check"]
    assert "checksums in the source were checked, and are right" in run(*words, "-x", name).stderr
    assert run(*words, "--force").exit_code == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_damaged_object_of_the_source_is_never_proven(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "cursor": bytearray(2 << 20)}
    source = tmp_path / "source"
    dcp.save(state, checkpoint_id=source, **ALONE)
    (entry,) = formats.read_index(str(source)).objects
    data = bytearray((source / "__0_0.distcp").read_bytes())
    data[entry.data.offset + entry.data.length // 2] ^= 1
    (source / "__0_0.distcp").write_bytes(data)
    result = run("reshard", str(source), "-o", str(tmp_path / "out"), "--to-mesh", "2", "--check")
    assert result.exit_code == 3
    assert "cursor" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_optimizer_without_its_weights_is_proven_too(tmp_path: Path) -> None:
    words = ["reshard", DCP, "-o", str(tmp_path / "out"), "--to-mesh", "2", "--check"]
    result = run(*words, "-x", "re:model.*weight")
    assert result.exit_code == 0
    assert "Proven by comparison" in result.stderr


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_damage_that_is_copied_along_is_said_of_the_source(tmp_path: Path) -> None:
    source = tmp_path / "source"
    dcp.save({"w": torch.ones(3), "odd": {1, 2}}, checkpoint_id=source, **ALONE)
    (data,) = (entry.data for entry in formats.read_index(str(source)).objects)
    raw = bytearray(Path(data.path).read_bytes())
    place = raw.index(b"serialization_id", data.offset)
    raw[place + 15] = ord("f")
    Path(data.path).write_bytes(raw)
    result = run("reshard", str(source), "-o", str(tmp_path / "out"), "--to-mesh", "2", "--check")
    assert result.exit_code == 3
    assert f"{source}: what was read of it is damaged: odd." in result.stderr


def test_the_proof_says_when_a_source_has_no_checksums(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(3)}, source)
    result = run("export", str(source), "-o", str(tmp_path / "out"), "--check")
    assert result.stderr.rstrip().endswith("The source has no checksums of them.")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["one file", "items"])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("exit_code", [0, 3])
def test_large_records_are_checked_without_reading_them_again(
    kind: str,
    dtype: str,
    exit_code: int,
    each_size: Sizes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mib = 1 << 20 if each_size == DEFAULT else 16 << 10  # large for tiny sizes, too
    again: list[ByteRange] = []
    real = damage._Checker._blocks

    def blocks(self: damage._Checker, data: ByteRange) -> object:
        again.append(data)
        return real(self, data)

    monkeypatch.setattr(damage._Checker, "_blocks", blocks)
    monkeypatch.setattr("ckpt_tools.formats.zip.archives._PART_BYTES", 3 * mib)
    state = {"w": torch.arange(4 * mib).view(torch.float32), "v": torch.ones(mib)}
    source = tmp_path / ("source.pt" if kind == "one file" else "source")
    if kind == "one file":
        torch.save(state, source)
    else:
        dcp.save(state, checkpoint_id=source, **ALONE)
    index = formats.read_index(str(source))
    with Files() as files:
        place = formats.locate(index, files).tensor("w").chunks[0].data
    if exit_code:
        content = bytearray(Path(place.path).read_bytes())
        content[place.offset + place.length - 1] ^= 1
        Path(place.path).write_bytes(content)
    words = ["export", str(source), "-o", str(tmp_path / "out"), "--check", "--dtype", dtype]
    assert run(*words).exit_code == exit_code
    assert max((data.length for data in again), default=0) < mib


def test_a_record_that_was_seen_in_parts_is_known_only_when_all_of_it_was_seen() -> None:
    data = bytes(range(200))
    seen = KnownCrcs()
    for start, end in ((0, 50), (50, 51), (51, 120), (0, 20), (130, 200)):
        seen.add(ByteRange("f", 1000 + start, end - start), crc32(data[start:end]))
    assert seen.crc_of(ByteRange("f", 1000, 120)) == crc32(data[:120])
    assert seen.crc_of(ByteRange("f", 1050, 70)) == crc32(data[50:120])
    assert seen.crc_of(ByteRange("f", 1000, 119)) is None
    assert seen.crc_of(ByteRange("f", 1000, 200)) is None
    assert seen.crc_of(ByteRange("g", 1000, 50)) is None


# ---------------------------------------------------------------------------------------- replicas


@pytest.fixture
def thousand(monkeypatch: pytest.MonkeyPatch) -> int:
    """So many columns make a replica large."""
    monkeypatch.setattr(entries, "MAX_COMPARED", 15_000)
    return 1000


@pytest.mark.parametrize("command", [["export"], ["reshard", "--to-mesh", "2"]])
def test_large_replicas_that_differ_are_never_proven(
    command: list[str], thousand: int, tmp_path: Path
) -> None:
    source = drifted(tmp_path / "source", columns=thousand)
    words = [*command, str(source), "-o", str(tmp_path / "out")]
    result = run(*words, "--check")
    assert result.exit_code == 3
    assert "different ones, so it is not known which is right: w [4:8, 0:1000]" in result.stderr
    assert "(rank 1 and rank 3, after " in result.stderr
    assert not (tmp_path / "out").exists()
    unchecked = run(*words)
    assert unchecked.exit_code == 0
    assert "Replicas too large to be compared in passing: w. verify and --check" in unchecked.stderr


def test_the_proof_says_that_large_replicas_were_compared(thousand: int, tmp_path: Path) -> None:
    source = drifted(tmp_path / "source", by=0.0, columns=thousand)
    result = run("export", str(source), "-o", str(tmp_path / "out"), "--check")
    assert "The replicas of 1 tensor, compared byte by byte, are equal." in result.stderr


def test_each_rank_that_gathers_compares_its_own_replicas(tmp_path: Path) -> None:
    """A plain tensor is taken from one rank; the others find that theirs is another one."""
    source = tmp_path / "source"
    source.mkdir()
    for rank in range(2):
        mesh = mesh_of((2,), rank)
        plain = torch.zeros(600_000)[:300_000]
        plain[5] += rank
        state = {"w": dtensor(shard(WHOLE, ROWS, mesh), WHOLE.shape, ROWS, mesh), "p": plain}
        torch.save(state, source / f"rank{rank}.pt")
    index = formats.read_index(str(source))
    plan = plan_reshard(index, ReshardOptions(Mesh((1,))))
    api.reshard(index, tmp_path / "out", Mesh((1,)))
    for rank, refused in enumerate([False, True]):
        with nullcontext() if not refused else pytest.raises(WriteError, match="are not what"):
            checking.check(
                str(tmp_path / "out"),
                plan,
                Files(),
                threads=1,
                own={str(source / f"rank{rank}.pt")},
            )


def test_each_rank_that_gathers_checks_the_checksums_of_its_own_files(tmp_path: Path) -> None:
    hurt = victim("ranks", tmp_path / "source")
    index = formats.read_index(str(hurt.path))
    hurt.flip(max(hurt.index().tensors, key=lambda entry: entry.nbytes).chunks[1].data)
    plan = plan_reshard(index, ReshardOptions(Mesh((2,))))
    copied = dataclasses.replace(
        index, files=tuple(file._replace(state=None) for file in index.files)
    )
    unchecked = WriteOptions(verify_source=False)
    api.reshard(copied, tmp_path / "out", Mesh((2,)), write=unchecked)
    for rank, path in enumerate(hurt.data_files()):
        with nullcontext() if rank != 1 else pytest.raises(UnreadableError, match="is damaged"):
            checking.check(
                str(tmp_path / "out"),
                plan,
                Files(),
                threads=1,
                own={str(path)},
            )


def test_what_is_read_back_is_part_of_the_bar(tmp_path: Path) -> None:
    done, totals = [], []
    write = WriteOptions(check=True)
    out = str(tmp_path / "out.safetensors")
    export = export_of(formats.read_index(DCP), out, write, ExportOptions())
    plan = write_here(export, listener=Listener(done.append, totals.append))
    assert totals == [2 * plan.files.length]
    assert sum(done) == plan.files.length + plan.nbytes
