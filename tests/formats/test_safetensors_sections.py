"""Containers and sections are written so that every name comes back to its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tools.core import names
from ckpt_tools.core.index import SECTIONS
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.safetensors.header import (
    SECTIONS_KEY,
    Home,
    homes_by_prefix,
    homes_in,
)
from ckpt_tools.formats.safetensors.write import stated_homes

parts = st.text("ab.", min_size=1, max_size=3)
homes = st.builds(Home, st.lists(parts, max_size=2).map(tuple), st.sampled_from(SECTIONS))


@given(st.dictionaries(st.tuples(homes, parts), st.none(), max_size=8))
def test_every_name_comes_back_to_its_home(placed: dict[tuple[Home, str], None]) -> None:
    known = {names.join((*home.container, rest)): home for home, rest in placed}
    metadata = stated_homes(known)
    found = homes_in(metadata, known, "x.safetensors") or homes_by_prefix([], known)
    assert found == known
    assert stated_homes(known) == metadata


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "[" * 100_000,
        '{"containers":1,"names":{}}',
        '{"containers":[],"names":[]}',
        '{"containers":[["model","model"]],"names":{}}',
        '{"containers":[[[],"weights"]],"names":{}}',
    ],
)
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UnreadableError, match="cannot be read"):
        homes_in({SECTIONS_KEY: text}, ["w"], "x.safetensors")
