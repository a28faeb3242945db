"""Predictions for real engines behind a gateway, with fewer requests."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from qualification.engines.behind import WAYS, Worker, run, started
from qualification.engines.engine import missing

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    with ExitStack() as stack:
        yield started(tmp_path_factory.mktemp("live"), stack, 2)


@pytest.mark.parametrize("way", WAYS)
def test_predictions_called_exact_are_what_the_engines_find(workers: list[Worker], way: str) -> None:
    tally = run(workers, way, 150, 1)
    assert not tally.failed, tally.errors
    assert not tally.unmatched, tally.errors
    assert not tally.unexplained, tally.wrong
    assert tally.equal >= 0.98 * tally.exact, tally.wrong  # a busy machine holds up events
    assert tally.exact > 100, tally.doubts
