"""Retention in an engine in virtual time: what requests ask to keep, and for how long."""

from typing import Any

import pytest

from api.retention import Retain
from replica.engine.engine import Engine
from tests.replica.engines import SIZE, drain, engine, generate, step, submit

BLOCKS = 32
KEPT = list(range(100, 100 + 4 * SIZE + 1))
TTL_S = 300.0


def small(**changes: Any) -> Engine:
    return engine(num_blocks=BLOCKS, retained_share=0.5, retained_tenant_share=0.5, **changes)


def press(one: Engine) -> None:
    """Use every block that is not retained."""
    for number in range(4):
        generate(one, [number + 1] * (10 * SIZE), 1)


def cached(one: Engine, prompt: list[int], **extra: str) -> int:
    return generate(one, prompt, 1, **extra)[1]


def wait(one: Engine, seconds: float) -> None:
    one.clock.sleep(seconds)
    one.expire_retention()
    one.check()


def test_no_time_passes_while_a_request_runs() -> None:
    one = small()
    assert submit(one, 1, KEPT, 8, retain=[Retain(len(KEPT), TTL_S)]) is None
    step(one)
    wait(one, 10 * TTL_S)
    drain(one)
    assert one.stats().pool.retained == 4


def test_running_requests_get_retained_blocks_rather_than_being_preempted() -> None:
    one = small()
    generate(one, KEPT, 1, retain=[Retain(len(KEPT), TTL_S)])
    text, _ = generate(one, [7] * (BLOCKS * SIZE - 8), 8)
    assert len(text) == 8
    assert one.scheduler.preemptions == 0
    assert one.stats().pool.retained == 0


@pytest.mark.parametrize("own", [1, 6], ids=["one salt", "six salts"])
def test_salts_of_one_key_share_its_share(own: int) -> None:
    """The router puts the key's own salt before what its client adds."""
    one = small()
    for number in range(6):
        prompt, salt = [number] * (2 * SIZE + 1), f"{'a' * 32}.{number % own}"
        generate(one, prompt, 1, cache_salt=salt, retain=[Retain(len(prompt), TTL_S)])
    assert one.stats().pool.retained == BLOCKS // 4
    generate(one, KEPT, 1, cache_salt="b" * 32, retain=[Retain(len(KEPT), TTL_S)])
    assert one.stats().pool.retained == BLOCKS // 4 + 4
