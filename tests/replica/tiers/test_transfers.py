"""Which requests wait for blocks of neighbours."""

from random import Random

import pytest

from api.measured_rate import ENOUGH
from replica.cache.moves import PULLED
from replica.messages import KVSource
from tests.replica.ahead import AheadRunner
from tests.replica.engines import SIZE, RememberingRunner, step, submit
from tests.replica.tiers.movers import Watched, tiered_engine


class Runner(Watched, RememberingRunner):
    pass


class Ahead(Watched, AheadRunner):
    pass


@pytest.fixture(params=[Runner, Ahead])
def runner_type(request: pytest.FixtureRequest) -> type[Watched]:
    found: type[Watched] = request.param
    return found


@pytest.mark.parametrize(("role", "is_read"), [(None, False), ("both", False), ("decode", True)])
def test_what_is_computed_sooner_is_read_only_by_a_replica_that_just_decodes(
    role: str | None, is_read: bool, runner_type: type[Watched]
) -> None:
    own, mover = tiered_engine(runner_type, Random(0), role=role)
    mover.speeds.add(PULLED, 1, 1000.0)
    for _ in range(ENOUGH):
        own.speed.add(1000, 0.001)
    assert submit(own, 1, range(4 * SIZE + 1), 1, sources=[KVSource("tcp://127.0.0.1:1", 4 * SIZE)]) is None
    step(own)
    assert [transfer.pull is not None for transfer in mover.begun] == [True] * is_read
