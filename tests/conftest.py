"""Set the effort of the property tests, and let Ctrl-C arrive.

They try the same examples every time, so that no change fails by chance: few of them among the fast tests, many in
`make qualify`. `make search` tries new ones.
"""

import fcntl
import gc
import logging
import os
import re
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from replica.fetching.fetch import smollm2_folder
from replica.model.demo import CACHE_VARIABLE, demo_folder

HERE = Path(__file__).parent

QUICK_TO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
COMMON = settings(deadline=None, phases=QUICK_TO_SHRINK, suppress_health_check=[HealthCheck.too_slow])

# Workers share the cores, and torch's threads would spin until each of them had had its turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A bar of transformers has a thread that outlives it.
os.environ.setdefault("TQDM_DISABLE", "1")

settings.register_profile("default", COMMON, max_examples=15, derandomize=True)
settings.register_profile("thorough", COMMON, max_examples=60, derandomize=True)
settings.register_profile("search", COMMON, max_examples=5000)
settings.load_profile("default")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's `&` has it, and the programs under test would
    signal.signal(signal.SIGINT, signal.default_int_handler)


NOWHERE = pytest.StashKey[list[str]]()


def runs_nowhere(folder: Path, marks: set[str], text: str) -> bool:
    """Return True if no target of the Makefile would find this test of a file with this text."""
    slow = bool(marks & {"chaos", "peers", "grid"})
    says_slow = re.search(r"mark\.(chaos|peers|grid)", text) is not None  # SLOW_FILES
    if folder == HERE / "chaos":  # which FAST ignores
        return not (slow and says_slow)
    return (slow and not says_slow) or ("hypothesis" in marks and "hypothesis" not in text)  # PROPERTIES


@pytest.hookimpl(tryfirst=True)  # before any is deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the names of tests that only a run of everything would find; a test demands that there are none."""
    texts = {path: path.read_text() for path in {item.path for item in items}}
    config.stash[NOWHERE] = [
        item.nodeid
        for item in items
        if runs_nowhere(item.path.parent, {mark.name for mark in item.iter_markers()}, texts[item.path])
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Ten thousand tests and all that they import live until the end: no collection of garbage need look at them.

    And pytest listens to each logger whose messages go no further, for each test; torch has forty of them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
                logger.propagate = True
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of smollm2 in the user's cache; on first use it is fetched, by one of the workers of a run."""
    return smollm2_folder()


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
