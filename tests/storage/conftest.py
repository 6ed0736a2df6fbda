"""Here a store that does not answer is asked again at once."""

import pytest

from ckpt_tools.storage.waiting import WAITING


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first wait, which each later one doubles."""
    monkeypatch.setattr(WAITING, "pause", 0.01)
