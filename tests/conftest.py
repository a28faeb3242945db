"""Set the effort of the property tests, and let Ctrl-C arrive.

They try the same examples every time, so that no change fails by chance: few of them among the fast tests, many among
the slow ones. `make search` tries new ones.
"""

import fcntl
import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from replica.model.demo import CACHE_VARIABLE, demo_folder

QUICK_TO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
COMMON = settings(deadline=None, phases=QUICK_TO_SHRINK, suppress_health_check=[HealthCheck.too_slow])

# Workers share the cores, and torch's threads would spin until each of them had had its turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("default", COMMON, max_examples=30, derandomize=True)
settings.register_profile("thorough", COMMON, max_examples=60, derandomize=True)
settings.register_profile("search", COMMON, max_examples=5000)
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it, and the programs under test would
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Ten thousand tests and all that they import live until the end: no collection need look at them."""
    gc.freeze()


@pytest.fixture(scope="session")
def demo_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the demo model; all workers of a run share it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with (folder / "demo.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patch.setenv(CACHE_VARIABLE, str(folder / "demo"))
        demo_folder()
    return folder / "demo"
