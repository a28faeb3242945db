"""Losses in the stream of a real engine: nothing wrong is claimed without an event that explains it later."""

import math
from collections.abc import Iterator

import pytest

from qualification.engines.engine import Engine, SGLang, missing
from qualification.engines.losses import EVENTS, FOR_GOOD, measure, small_engine

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module", params=(Engine.kind, SGLang.kind))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with small_engine(tmp_path_factory.mktemp("engine"), request.param) as one:
        yield one


@pytest.mark.parametrize("name", EVENTS)
def test_after_a_loss_the_router_claims_nothing_wrong_and_is_exact_again_if_it_can_know(
    name: str, running: Engine
) -> None:
    measured = measure(name, running, 1)
    if name in FOR_GOOD.get(running.kind, ()):
        assert measured.took_s == math.inf and not measured.tally.wrong
    else:
        assert measured.took_s < math.inf
    assert measured.wrong == 0, measured.tally.wrong
