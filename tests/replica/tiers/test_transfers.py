"""When requests begin to wait for blocks, and when the blocks begin to move."""

from random import Random

import pytest

from api.measured_rate import ENOUGH
from replica.cache.moves import PULLED
from replica.engine.engine import Engine
from replica.engine.scheduler import Batch
from replica.messages import KVSource
from tests.replica.ahead import AheadRunner
from tests.replica.engines import SIZE, RememberingRunner, generate, step, submit
from tests.replica.tiers.movers import RememberingMover, Watched, tiered_engine


class Runner(Watched, RememberingRunner):
    pass


class Ahead(Watched, AheadRunner):
    pass


@pytest.fixture(params=[Runner, Ahead])
def runner_type(request: pytest.FixtureRequest) -> type[Watched]:
    found: type[Watched] = request.param
    return found


def one_copies_what_another_is_given(runner_type: type[Watched]) -> tuple[Engine, RememberingMover]:
    """In one step, from a block into which the other's prompt is loaded."""
    own, mover = tiered_engine(runner_type, Random(0), num_blocks=8)
    mover.fails = False
    generate(own, range(17), 1)
    generate(own, range(100, 110), 1)
    generate(own, range(200, 217), 1)
    assert submit(own, 1, [*range(100, 106), 0, 0], 2) is None
    assert submit(own, 2, range(17), 1) is None
    step(own)
    assert own.scheduler.transfers
    while own.busy:
        step(own)
    return own, mover


def test_a_block_is_loaded_only_when_it_has_been_copied_for_another(runner_type: type[Watched]) -> None:
    own, mover = one_copies_what_another_is_given(runner_type)
    assert mover.runner.copied_tokens == 2
    assert own.scheduler.transfers.loaded_tokens == {"CPU": 16}


def test_the_test_notices_a_block_that_is_loaded_while_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_all(own: Engine, _: Batch) -> None:
        while own._due and own.mover is not None:
            own.mover.begin(own._due.popleft())

    monkeypatch.setattr(Engine, "_begin_due", begin_all)
    with pytest.raises(AssertionError, match="a step and a transfer both use"):
        one_copies_what_another_is_given(Ahead)


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
