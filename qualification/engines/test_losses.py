"""Losses in the stream of a real engine: nothing wrong is claimed without an event that explains it later."""

import math
from collections.abc import Iterator

import pytest

from qualification.engines.engine import Engine, SGLang, missing
from qualification.engines.losses import EVENTS, Mirror, for_good, measure, small_engine

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]


@pytest.fixture(scope="module", params=(Engine.kind, SGLang.kind))
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with small_engine(tmp_path_factory.mktemp("engine"), request.param) as one:
        yield one


@pytest.fixture(scope="module", params=(False, True), ids=("alone", "mirrored"))
def mirror(request: pytest.FixtureRequest, running: Engine) -> Iterator[Mirror | None]:
    one = Mirror(running) if request.param else None
    yield one
    if one is not None:
        one.end()


@pytest.mark.parametrize("name", EVENTS)
def test_after_a_loss_the_router_claims_nothing_wrong_and_is_exact_again_if_it_can_know(
    name: str, running: Engine, mirror: Mirror | None
) -> None:
    measured = measure(name, running, 1, mirror)
    if for_good(name, running, mirror):
        assert measured.took_s == math.inf and not measured.tally.wrong
    else:
        assert measured.took_s < math.inf
    assert measured.wrong == 0, measured.tally.wrong
