"""Items alike in all but their elements are told by their bytes; any other difference is seen."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pickled import CHECKPOINTS

from ckpt_tools.formats import locate, read_index
from ckpt_tools.formats.zip.archives import KnownArchives
from ckpt_tools.formats.zip.read import read_archive
from ckpt_tools.storage.reader import Files


def saved(values: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def learned(data: bytes) -> tuple[KnownArchives[str], int, int]:
    """What knows this item, and where its elements begin and end."""
    archive = read_archive(
        lambda start, nbytes: data[start : start + nbytes], offset=0, length=len(data), where="item"
    )
    known: KnownArchives[str] = KnownArchives()
    known.learn(archive, "data/0", "learned")
    start, nbytes, _ = archive.record("data/0")
    return known, start, start + nbytes


def is_known(known: KnownArchives[str], data: bytes) -> bool:
    found = known.find(len(data), lambda at, nbytes: (data[at : at + nbytes], 0))
    return found is not None and found[1] == "learned"


def test_an_item_with_other_elements_is_alike() -> None:
    known, *_ = learned(saved(torch.arange(64.0)))
    assert is_known(known, saved(torch.randn(64)))


@pytest.mark.parametrize("elements", [16, 20_000])
def test_every_changed_byte_outside_of_elements_and_sums_is_seen(elements: int) -> None:
    data = saved(torch.arange(float(elements)))
    known, start, end = learned(data)
    unseen = 0
    for at in [*range(start), *range(end, len(data))]:
        changed = bytearray(data)
        changed[at] ^= 1
        unseen += is_known(known, bytes(changed))

    # The CRC behind the elements and that in the directory; and the random number that torch
    # gives each archive, with its two CRCs.
    assert unseen == 4 + 4 + 40 + 4 + 4


def test_an_item_of_another_type_is_not_alike() -> None:
    whole, floating = torch.arange(64, dtype=torch.int32), torch.arange(64, dtype=torch.float32)
    known, *_ = learned(saved(torch.arange(64)))
    assert not any(is_known(known, saved(values)) for values in (whole, floating))


def located(folder: Path, *, alike: bool) -> object:
    """What every item of a directory is, with or without telling items by those read before."""
    with pytest.MonkeyPatch.context() as patch, Files() as files:
        if not alike:
            patch.setattr(KnownArchives, "find", lambda *_args: None)
        index = locate(read_index(str(folder)), files)
    problems = [(type(problem), problem.message, problem.about) for problem in index.problems]
    return [(entry.fqn, list(entry.chunks)) for entry in index.tensors], problems


# What is unpacked lies in a new temporary file each time; flat pieces without a layout are refused.
DIRECTORIES = [
    path.parent
    for path in sorted(CHECKPOINTS.rglob(".metadata"))
    if "zstd" not in str(path) and path.parent.name != "dcp_local"
]
MANY_ITEMS = CHECKPOINTS / "fsdp2_bf16_fp32optim_dcp_4r/ckpt"


@pytest.mark.parametrize("folder", DIRECTORIES, ids=lambda path: str(path.relative_to(CHECKPOINTS)))
def test_items_of_real_directories_are_what_they_are_when_each_is_opened(folder: Path) -> None:
    assert located(folder, alike=True) == located(folder, alike=False)


@settings(max_examples=30)
@given(data=st.data())
def test_a_damaged_item_is_a_problem_as_when_each_is_opened(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "ckpt"
    shutil.copytree(MANY_ITEMS, folder)
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(sorted(folder.glob("*.distcp"))))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
    assert located(folder, alike=True) == located(folder, alike=False)
    shutil.rmtree(folder)


def test_a_damaged_record_that_holds_no_data_is_no_problem(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(MANY_ITEMS, folder)
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(b".data/serialization_id")] ^= 1
    path.write_bytes(content)
    found = located(folder, alike=False)
    assert found == located(folder, alike=True)
    assert not found[1]
