"""Random damages of small real checkpoints, each from a seed, and what catches them.

Run as a script it prints the table of the README.
"""

import os
import pickle
import random
import shutil
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ckpt_tools import formats
from ckpt_tools.api import export
from ckpt_tools.convert.export import ExportOptions
from ckpt_tools.core.index import ByteRange, CheckpointIndex
from ckpt_tools.errors import CkptError
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.proof.compare import compare, compare_checkpoints
from ckpt_tools.proof.diff import diff
from ckpt_tools.proof.diff_options import DiffOptions
from ckpt_tools.proof.fingerprint import fingerprint
from ckpt_tools.proof.verify import verify, verify_quick
from ckpt_tools.storage.reader import Files

DATA = Path(__file__).parent / "data" / "checkpoints"
BASES = {
    "dcp": "fsdp2_shard1_dcp_4r/ckpt",
    "dcp-hsdp": "fsdp2_dcp_hsdp_2x4/ckpt",
    "ranks": "fsdp2_torchsave_1d_4r/ckpt",
    "ranks-hsdp": "fsdp2_torchsave_hsdp_2x4/ckpt",
    "torch": "fsdp2_full_torchsave_4r/ckpt/consolidated.pt",
    "torch-old": "fsdp2_full_torchsave_4r/ckpt/consolidated_legacy.pt",
    "safetensors": "hf_sharded_safetensors/ckpt",
    "safetensors-ranks": "dcp_hf_sharded_4r/ckpt",
}
DCP, RANKS = ("dcp", "dcp-hsdp"), ("ranks", "ranks-hsdp")
ZIPS = (*DCP, *RANKS, "torch")
SAFE = ("safetensors", "safetensors-ranks")
CATCHERS = (
    "verify --quick",
    "verify",
    "fingerprint",
    "verify --against",
    "nothing: no entry changed",
)
# What `export --check` does: it refuses, or proves a copy of the sound values, or of what is there.
REFUSED, SOUND, AS_IT_IS = COPIES = ("refused", "sound", "as it is")


class Damaged(NamedTuple):
    """A damage: its kind, the checkpoint it was done to, and what was done.

    ``copied`` is what `export --check` made of it: one of `COPIES`.
    """

    kind: str
    base: str
    seed: int
    what: str
    caught_by: str
    copied: str


class Victim:
    """A copy of a real checkpoint, to be damaged."""

    def __init__(self, base: str, folder: Path, rng: random.Random) -> None:
        self.base = base
        self.rng = rng
        source = DATA / BASES[base]
        self.path = folder / source.name
        if source.is_dir():
            shutil.copytree(source, self.path)
        else:
            shutil.copy(source, self.path)
        for path in self.files:
            path.chmod(0o644)

    @property
    def files(self) -> list[Path]:
        """Its files, in order."""
        return [self.path] if self.path.is_file() else sorted(self.path.iterdir())

    def data_files(self) -> list[Path]:
        """Those of its files that hold tensors."""
        suffixes = (".distcp", ".pt", ".safetensors")
        return [path for path in self.files if path.suffix in suffixes and path.stat().st_size]

    def index(self) -> CheckpointIndex:
        """Its index, with raw chunks."""
        with Files() as files:
            return formats.locate(formats.read_index(str(self.path)), files)

    def ranges(self) -> list[ByteRange]:
        """The byte ranges of its tensors, replicas included."""
        return [
            data
            for entry in self.index().tensors
            for chunk in entry.chunks
            for data in (chunk.data, *chunk.replicas)
            if data.length
        ]

    def flip(self, data: ByteRange) -> str:
        """Flip one bit of a byte somewhere in a range."""
        place = data.offset + self.rng.randrange(data.length)
        content = bytearray(Path(data.path).read_bytes())
        content[place] ^= 1 << self.rng.randrange(8)
        Path(data.path).write_bytes(content)
        return f"byte {place} of {os.path.basename(data.path)}"


class Zip(NamedTuple):
    """An archive: its bytes in a file, its records by name, and where its directory begins."""

    data: ByteRange
    records: dict[str, torch_zip.Record]
    directory: int


def zips(victim: Victim) -> list[Zip]:
    """The torch.save archives of a checkpoint: its files, or the items of its DCP files."""
    if victim.base not in DCP:
        places = [ByteRange(str(path), 0, path.stat().st_size) for path in victim.data_files()]
    else:
        index = formats.read_index(str(victim.path))
        places = [chunk.data for entry in index.tensors for chunk in entry.chunks]
        places += [entry.data for entry in index.objects]
    return [_zip(place) for place in places]


def _zip(place: ByteRange) -> Zip:
    with Files() as files:
        archive = torch_zip.read_archive(
            lambda offset, length: files.read(place.path, offset, length),
            offset=place.offset,
            length=place.length,
            where=place.path,
        )
        records = {name: archive.record(name) for name in archive.names}
        content = files.read(*place)
    return Zip(place, records, place.offset + content.index(b"PK\x01\x02"))


# ------------------------------------------------------------------------------------------ damages


def flip_tensor(victim: Victim) -> str:
    return victim.flip(victim.rng.choice(victim.ranges()))


def flip_pickle(victim: Victim) -> str:
    archive = victim.rng.choice(zips(victim))
    record = archive.records["data.pkl"]
    return victim.flip(ByteRange(archive.data.path, record.offset, record.length))


def flip_old_pickle(victim: Victim) -> str:
    first = min(victim.ranges(), key=lambda data: data.offset)
    return victim.flip(ByteRange(first.path, 0, first.offset))


def flip_object(victim: Victim) -> str:
    index = formats.read_index(str(victim.path))
    return victim.flip(victim.rng.choice(index.objects).data)


def flip_directory(victim: Victim) -> str:
    archive = victim.rng.choice(zips(victim))
    end = archive.data.offset + archive.data.length
    return victim.flip(ByteRange(archive.data.path, archive.directory, end - archive.directory))


def flip_between(victim: Victim) -> str:
    """In the local headers of records and the padding before their bytes."""
    archive = victim.rng.choice(zips(victim))
    gaps, end = [], archive.data.offset
    for record in sorted(archive.records.values()):
        gaps.append(ByteRange(archive.data.path, end, record.offset - end))
        end = record.offset + record.length
    return victim.flip(victim.rng.choice([gap for gap in gaps if gap.length]))


def flip_metadata(victim: Victim) -> str:
    path = victim.path / ".metadata"
    return victim.flip(ByteRange(str(path), 0, path.stat().st_size))


def flip_header(victim: Victim) -> str:
    path = victim.rng.choice(victim.data_files())
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    return victim.flip(ByteRange(str(path), 0, length))


def flip_index_json(victim: Victim) -> str:
    path = victim.path / "model.safetensors.index.json"
    return victim.flip(ByteRange(str(path), 0, path.stat().st_size))


def zero_block(victim: Victim) -> str:
    """Zeros where a tensor's bytes were, as a hole in a file leaves them."""
    data = victim.rng.choice([data for data in victim.ranges() if data.length >= 8])
    content = bytearray(Path(data.path).read_bytes())
    content[data.offset : data.offset + data.length] = bytes(data.length)
    if bytes(content) == Path(data.path).read_bytes():
        return flip_tensor(victim)
    Path(data.path).write_bytes(content)
    return f"{data.length} bytes of {os.path.basename(data.path)}"


def cut(victim: Victim) -> str:
    path = victim.rng.choice(victim.data_files())
    length = victim.rng.randrange(path.stat().st_size)
    os.truncate(path, length)
    return f"{path.name} at {length}"


def lose_file(victim: Victim) -> str:
    path = victim.rng.choice(victim.data_files())
    path.unlink()
    return path.name


def swap(victim: Victim) -> str:
    one, other = victim.rng.sample(victim.data_files(), 2)
    here, there = one.read_bytes(), other.read_bytes()
    one.write_bytes(there)
    other.write_bytes(here)
    return f"{one.name} and {other.name}"


def copy_over(victim: Victim) -> str:
    one, other = victim.rng.sample(victim.data_files(), 2)
    shutil.copy(one, other)
    return f"{one.name} over {other.name}"


def copy_beside(victim: Victim) -> str:
    """One rank's file once more, under the name of a rank that there never was."""
    one = victim.rng.choice(victim.data_files())
    other = one.with_name(f"model_rank{len(victim.files)}.pt")
    shutil.copy(one, other)
    return f"{one.name} as {other.name}"


def lose_chunk(victim: Victim) -> str:
    """A chunk is no longer in `.metadata`, as an interrupted or de-duplicated save leaves it."""
    path = victim.path / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # noqa: S301 - our own test data
    tensors = metadata.state_dict_metadata
    cut_ones = sorted(
        fqn for fqn, entry in tensors.items() if len(getattr(entry, "chunks", ())) > 1
    )
    fqn = victim.rng.choice(cut_ones)
    chunk = tensors[fqn].chunks.pop(victim.rng.randrange(len(tensors[fqn].chunks)))
    metadata.storage_data = {
        key: value
        for key, value in metadata.storage_data.items()
        if (key.fqn, key.offset) != (fqn, chunk.offsets)
    }
    path.write_bytes(pickle.dumps(metadata))
    return f"{fqn} {list(chunk.offsets)}"


def make_stale(victim: Victim) -> str:
    """One file is of an older save: the same layout, other values, checksums that fit."""
    path = victim.rng.choice(victim.data_files())
    content = bytearray(path.read_bytes())
    if victim.base not in ZIPS:
        for data in victim.ranges():
            if data.path == str(path):
                content[data.offset] ^= 1
        path.write_bytes(content)
        return path.name
    for archive in zips(victim):
        if archive.data.path == str(path):
            _age(content, archive)
    path.write_bytes(content)
    return path.name


def _age(content: bytearray, archive: Zip) -> None:
    """Change the storages of an archive, and their CRCs in its directory."""
    for name, record in archive.records.items():
        if not name.startswith("data/") or not record.length or record.crc is None:
            continue
        content[record.offset] ^= 1
        crc = zlib.crc32(content[record.offset : record.offset + record.length])
        end = archive.data.offset + archive.data.length
        at = content.index(record.crc.to_bytes(4, "little"), archive.directory, end)
        content[at : at + 4] = crc.to_bytes(4, "little")


class Kind(NamedTuple):
    """A kind of damage, what it is done to, and how many of it there are."""

    name: str
    bases: Sequence[str]
    damage: Callable[[Victim], str]
    count: int


KINDS = (
    Kind("bit flipped in a tensor (torch.save, DCP)", ZIPS, flip_tensor, 12),
    Kind(
        "bit flipped in a tensor (safetensors, old torch.save)",
        (*SAFE, "torch-old"),
        flip_tensor,
        6,
    ),
    Kind("bit flipped in a pickle (torch.save, DCP)", ZIPS, flip_pickle, 8),
    Kind("bit flipped in the pickles of an old torch.save", ("torch-old",), flip_old_pickle, 6),
    Kind("bit flipped in an object of DCP", ("dcp-hsdp",), flip_object, 6),
    Kind("bit flipped in a zip directory", ZIPS, flip_directory, 10),
    Kind("bit flipped in zip headers or padding", ZIPS, flip_between, 8),
    Kind("bit flipped in .metadata", DCP, flip_metadata, 20),
    Kind("bit flipped in a safetensors header", SAFE, flip_header, 10),
    Kind("bit flipped in an index.json", ("safetensors",), flip_index_json, 6),
    Kind("tensor overwritten with zeros (torch.save, DCP)", ZIPS, zero_block, 5),
    Kind("tensor overwritten with zeros (safetensors, old)", (*SAFE, "torch-old"), zero_block, 3),
    Kind("file cut short", tuple(BASES), cut, 12),
    Kind("file lost", (*DCP, *RANKS, *SAFE), lose_file, 8),
    Kind("files of two ranks swapped", (*DCP, *RANKS, "safetensors-ranks"), swap, 8),
    Kind(
        "one rank's file copied over another's", (*DCP, *RANKS, "safetensors-ranks"), copy_over, 8
    ),
    Kind("one rank's file again under a new name", RANKS, copy_beside, 4),
    Kind("chunk lost from .metadata", DCP, lose_chunk, 6),
    Kind("file of an older save (torch.save, DCP)", ZIPS, make_stale, 8),
    Kind("file of an older save (safetensors, old)", (*SAFE, "torch-old"), make_stale, 4),
)


# ---------------------------------------------------------------------------------------- catching


def catcher(path: Path, original: Path) -> str:
    """What catches that a checkpoint is not the original any more: the first of `CATCHERS`."""
    with Files() as files:
        try:
            index = formats.read_index(str(path))
            if not verify_quick(index, files).whole:
                return CATCHERS[0]
            if not verify(index, files).whole:
                return CATCHERS[1]
            told = formats.read_index(str(original))
            if not compare(index, fingerprint(told, files), files).same:
                return CATCHERS[2]
            if not compare_checkpoints(index, told, files).same:
                return CATCHERS[3]
            # Nothing else may have changed: what no check sees must be no change at all.
            assert diff(index, told, files, options=DiffOptions()).equal
            return CATCHERS[4]
        except CkptError:
            return CATCHERS[0]


def copy_of(path: Path, original: Path, out: Path) -> str:
    """What `export --check` makes of every tensor and plain object of a damaged checkpoint."""
    options = ExportOptions(format="torch", only=None, keep_names=True)
    try:
        export(path, out, options=options, check=True)
    except CkptError:
        return REFUSED
    with Files() as files:
        sound = fingerprint(formats.read_index(str(original)), files)
        return SOUND if compare(formats.read_index(str(out)), sound, files).same else AS_IT_IS


def do_one(kind: Kind, base: str, seed: int) -> Damaged:
    """Damage a copy of a checkpoint, and see what catches it."""
    rng = random.Random(f"{kind.name}/{base}/{seed}")  # noqa: S311 - a test's own choice
    with TemporaryDirectory() as folder:
        victim = Victim(base, Path(folder), rng)
        what = kind.damage(victim)
        original = DATA / BASES[base]
        copied = copy_of(victim.path, original, Path(folder, "copy.pt"))
        return Damaged(kind.name, base, seed, what, catcher(victim.path, original), copied)


def do_kind(kind: Kind) -> Iterator[Damaged]:
    """All damages of one kind, its checkpoints in turn."""
    for seed in range(kind.count):
        yield do_one(kind, kind.bases[seed % len(kind.bases)], seed)


def table(done: Sequence[Damaged]) -> str:
    """How many of each kind are caught by what, as Markdown."""
    kinds: dict[str, list[Damaged]] = defaultdict(list)
    for damaged in done:
        kinds[damaged.kind].append(damaged)
    head = ["damage", "done", *CATCHERS, f"export --check: {REFUSED}"]
    lines = [_row(head), "|---|" + "--:|" * (len(head) - 1)]
    lines += [_row([kind, *_counts(found)]) for kind, found in kinds.items()]
    return "\n".join([*lines, _row(["**all**", *_counts(done)])])


def _counts(done: Sequence[Damaged]) -> list[str]:
    found = Counter(damaged.caught_by for damaged in done)
    refused = sum(damaged.copied == REFUSED for damaged in done)
    return [str(count or "") for count in (len(done), *(found[by] for by in CATCHERS), refused)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    everything = [damaged for kind in KINDS for damaged in do_kind(kind)]
    sys.stdout.write(table(everything) + "\n")
    if "-v" in sys.argv:
        sys.stdout.writelines("\t".join(map(str, damaged)) + "\n" for damaged in everything)
