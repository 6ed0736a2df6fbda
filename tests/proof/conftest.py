"""Everything here runs with the default sizes and with tiny ones."""

import pytest

from ckpt_tools.core.sizes import Sizes


@pytest.fixture(autouse=True)
def sizes(each_size: Sizes) -> Sizes:
    """The sizes that are the default ones here."""
    return each_size
