"""Any bytes end in a value or in an error of ours, quickly, with nothing imported or run."""

import io
import pickle
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pickled import CASES, archive_of, data_pickle, name, storage, tensor, text

from ckpt_tools.errors import CheckpointError
from ckpt_tools.formats.dcp.metadata import METADATA_GLOBALS, load_metadata
from ckpt_tools.formats.pickle.dtensor_spec import SPEC_CLASSES
from ckpt_tools.formats.pickle.load import load_plain, load_stream, load_tensors
from ckpt_tools.formats.pickle.rebuild import TENSOR_CLASSES, TENSOR_FUNCTIONS
from ckpt_tools.formats.zip.read import read_archive

LOADS: dict[str, Callable[[bytes], object]] = {
    "tensors": lambda data: load_tensors(data, where="x"),
    "metadata": lambda data: load_metadata(data, where="x"),
    "plain": lambda data: load_plain(data, where="x"),
}
METADATA = (CASES / "C54_other_metadata_versions/good/.metadata").read_bytes()
DTENSORS = data_pickle(CASES / "C08_hsdp/ckpt/model_world_size_4_rank_3.pt")
OBJECTS = data_pickle(CASES / "C37_python_objects_in_full/rng.pt")
SHARDED = data_pickle(CASES / "C17_sharded_tensor/ckpt/rank_0.pt")
ARCHIVE = archive_of({"data.pkl": DTENSORS[:300], "byteorder": b"little", "data/0": bytes(100)})

GLOBALS = sorted(
    {*SPEC_CLASSES, *TENSOR_CLASSES, *TENSOR_FUNCTIONS, *METADATA_GLOBALS, "torch.float32"}
)
GLOBALS += [
    "torch.Size",
    "collections.OrderedDict",
    "collections.Counter",
    "builtins.set",
    "_codecs.encode",
    "builtins.complex",
]
GLOBALS += ["argparse.Namespace", "numpy.ndarray", "os.system", "builtins.getattr", "mine.Thing"]
# Each opcode alone is likely to fail at once; these are the pieces that real pickles are made of.
PIECES = st.one_of(
    st.sampled_from(
        [bytes((op,)) for op in b"().012NRa]bdelostu}\x81\x85\x86\x87\x88\x89\x8f\x90"]
    ),
    st.sampled_from(
        [b"\x91", b"\x92", b"\x93", b"\x94", b"K\x01", b"J\xff\xff\xff\xff", b"G" + bytes(8)]
    ),
    st.sampled_from(GLOBALS).map(name),
    st.sampled_from(GLOBALS).map(lambda value: name(value) + b")\x81}"),
    st.sampled_from([storage(), tensor(), b"Q", b"h\x00", b"h\x01", b"q\x00", b"q\x01"]),
    st.sampled_from(["mesh", "placements", "_spec", "latin1", "offsets", "fqn", "storage"]).map(
        text
    ),
    st.integers(0, 255).map(lambda index: bytes((ord("h"), index))),
    st.binary(max_size=3),
)
PROGRAMS = st.lists(PIECES, max_size=40).map(lambda pieces: b"\x80\x04" + b"".join(pieces) + b".")


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Real bytes of which a few were changed, left out, moved or repeated."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), at + draw(st.integers(0, 8)))
        into = draw(st.sampled_from(["change", "cut", "leave out", "repeat"]))
        if into == "cut":
            del data[at:]
        elif into == "change":
            data[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
        else:
            data[at:end] = data[at:end] * (0 if into == "leave out" else 2)
    return bytes(data)


def loaded(load: str, data: bytes) -> str:
    """What went wrong in our own words, or nothing; any other error goes through."""
    try:
        LOADS[load](data)
    except CheckpointError as error:
        return str(error)
    return "x"


def is_told(message: str) -> bool:
    """Whether an error names the file and can be printed on a terminal."""
    return message.startswith("x") and message.isprintable()


@pytest.mark.parametrize("load", LOADS)
@given(data=st.one_of(damaged(METADATA), damaged(DTENSORS), damaged(OBJECTS), damaged(SHARDED)))
def test_damaged_pickles_end_in_a_value_or_our_error(load: str, data: bytes) -> None:
    modules = set(sys.modules)
    assert is_told(loaded(load, data))
    assert set(sys.modules) == modules


@pytest.mark.parametrize("load", LOADS)
@settings(max_examples=settings.default.max_examples * 3)
@given(data=PROGRAMS)
def test_made_up_pickles_end_in_a_value_or_our_error(load: str, data: bytes) -> None:
    modules = set(sys.modules)
    assert is_told(loaded(load, data))
    assert set(sys.modules) == modules


@pytest.mark.parametrize("load", LOADS)
@given(data=st.binary(max_size=200))
def test_random_bytes_end_in_a_value_or_our_error(load: str, data: bytes) -> None:
    assert is_told(loaded(load, data))


@given(data=PROGRAMS)
def test_a_pickle_never_changes_what_the_next_one_gives(data: bytes) -> None:
    before = LOADS["tensors"](DTENSORS)
    loaded("tensors", data)
    assert LOADS["tensors"](DTENSORS) == before


@given(data=damaged(ARCHIVE))
def test_damaged_archives_end_in_records_or_our_error(data: bytes) -> None:
    try:
        archive = read_archive(
            lambda offset, length: data[offset : offset + length],
            offset=0,
            length=len(data),
            where="x",
        )
        found = [archive.read(record) for record in archive.names]
    except CheckpointError:
        return
    assert all(len(record) <= len(data) for record in found)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(2, 5))
def test_a_stream_is_left_where_the_pickle_ends(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    stream = io.BytesIO(data + b"more")
    load_stream(stream, where="x")
    assert stream.tell() == len(data)


@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert load_plain(pickle.dumps(value, protocol), where="x") == value
