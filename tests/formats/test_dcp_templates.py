"""Items alike in all but their elements are told by their bytes; any other difference is seen."""

import io
from pathlib import Path

import pytest
import torch

from ckpt_tools.core.index import ByteRange
from ckpt_tools.formats.dcp.templates import Found, Templates
from ckpt_tools.formats.pickle.load import load_tensors
from ckpt_tools.formats.pickle.torch_stubs import StoredTensor
from ckpt_tools.formats.zip import read as torch_zip
from ckpt_tools.storage.reader import Files


def saved(values: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def items(path: Path, *contents: bytes) -> list[ByteRange]:
    path.write_bytes(b"".join(contents))
    ends = [sum(map(len, contents[: n + 1])) for n in range(len(contents))]
    return [
        ByteRange(str(path), end - len(data), len(data))
        for end, data in zip(ends, contents, strict=True)
    ]


def learned(files: Files, item: ByteRange) -> tuple[Templates, Found]:
    """Templates that know this item, and what it is."""

    def read(offset: int, length: int) -> bytes:
        return files.read(item.path, offset, length)

    archive = torch_zip.read_archive(read, offset=item.offset, length=item.length, where="item")
    stored = load_tensors(archive.read("data.pkl"), where="item")
    assert isinstance(stored, StoredTensor)
    record = archive.record("data/0")
    found = Found(stored, record.offset - item.offset, record.length, None)
    size = Path(item.path).stat().st_size
    templates = Templates(files, {item.path: size})
    templates.learn(item, archive, found)
    return templates, found


def test_an_item_with_other_elements_is_alike(tmp_path: Path) -> None:
    first, second = items(tmp_path / "f", saved(torch.arange(64.0)), saved(torch.randn(64)))

    with Files() as files:
        templates, found = learned(files, first)

        assert templates.find(second) == found


@pytest.mark.parametrize("elements", [16, 20_000])
def test_every_changed_byte_outside_of_elements_and_sums_is_seen(
    tmp_path: Path, elements: int
) -> None:
    data = saved(torch.arange(float(elements)))
    with Files() as files:
        first, *_ = items(tmp_path / "f", data)
        templates, found = learned(files, first)
        unseen = []
        for at in [*range(found.offset), *range(found.offset + found.length, len(data))]:
            changed = bytearray(data)
            changed[at] ^= 1
            path = tmp_path / "g"
            path.write_bytes(changed)
            files.close()
            fresh = Templates(files, {str(path): len(data)})
            fresh._known = templates._known
            if fresh.find(ByteRange(str(path), 0, len(data))):
                unseen.append(at)

    # The CRC behind the elements and that in the directory; and the random number that torch
    # gives each archive, with its two CRCs.
    assert len(unseen) == 4 + 4 + 40 + 4 + 4


def test_an_item_of_another_type_is_not_alike(tmp_path: Path) -> None:
    whole, floating = torch.arange(64, dtype=torch.int32), torch.arange(64, dtype=torch.float32)
    first, *others = items(tmp_path / "f", *(saved(values) for values in (whole, floating)))

    with Files() as files:
        templates, _ = learned(files, first)

        assert [templates.find(other) for other in others] == [None]
