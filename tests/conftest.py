"""Settings for all tests: how hypothesis searches, and which tests this machine can run."""

import gc
import inspect
import os
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, settings
from size_records import DEFAULT, TINY, use
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from ckpt_tools.core.sizes import Sizes

# No deadlines: processes share the cores, so what an example takes says nothing about the code.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)
_PROFILE = "ci" if os.environ.get("CI") else "local"
settings.register_profile("quick", settings.get_profile(_PROFILE), max_examples=30)
settings.load_profile(_PROFILE)

if "mix_stderr" in inspect.signature(CliRunner).parameters:  # click 8.1: behave as 8.2 and newer
    assert CliRunner.__init__.__defaults__ is not None
    CliRunner.__init__.__defaults__ = (*CliRunner.__init__.__defaults__[:-1], False)
    Result.output = property(lambda self: self.stdout + self.stderr)


# Their tests share what took long to make: in two processes each of those would be made twice.
_TOGETHER = ("test_torchrun.py", "test_restarts.py", "test_real_size.py", "test_dcp_per_rank.py")
_TOGETHER += ("test_damage.py",)


class _Sharing(LoadScopeScheduling):
    """Gives those files whole to one process, and all else test by test."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, _ = nodeid.partition("::")
        return file if file.endswith(_TOGETHER) else nodeid

    def mark_test_complete(
        self, node: WorkerController, item_index: int, duration: float = 0
    ) -> None:
        """Forgets what is done: each test would otherwise count all that ran before it."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """How the tests are spread over processes."""
    return _Sharing(config, log)


@pytest.fixture(autouse=True, scope="session")
def unsynced() -> Iterator[None]:
    """Nothing waits for the disk: what fsync changes shows only on a machine that loses power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(params=[pytest.param("default", marks=pytest.mark.slow), "tiny"])
def each_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Runs a test with the sizes that users have, and again with tiny ones.

    The tiny ones alone are quick: they take every way, and commands are tested with those of users.
    """
    sizes = TINY if request.param == "tiny" else DEFAULT
    use(sizes, monkeypatch)
    return sizes


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not each time among all that was imported."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` where there is no CUDA device; torch is loaded only for them."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
