"""A key's share of what is retained, whatever its clients add to its salt."""

import pytest

from api.retention import Retain
from tests.replica.engines import SIZE, drain, engine, generate, submit

BLOCKS = 32
KEPT = list(range(100, 100 + 4 * SIZE + 1))
TTL_S = 300.0


@pytest.mark.parametrize("own", [1, 6], ids=["one salt", "six salts"])
def test_salts_of_one_key_share_its_share(own: int) -> None:
    """The router puts the key's own salt before what its client adds."""
    one = engine(num_blocks=BLOCKS, retained_share=0.5)
    for number in range(6):
        prompt, salt = [number] * (2 * SIZE + 1), f"{'a' * 32}.{number % own}"
        generate(one, prompt, 1, cache_salt=salt, retain=[Retain(len(prompt), TTL_S)])
    assert one.stats().pool.retained == BLOCKS // 4
    generate(one, KEPT, 1, cache_salt="b" * 32, retain=[Retain(len(KEPT), TTL_S)])
    assert one.stats().pool.retained == BLOCKS // 4 + 4


@pytest.mark.parametrize("is_cold", [True, False])
def test_a_prompt_that_will_not_come_again_takes_no_place_in_the_cache(is_cold: bool) -> None:
    one = engine(num_blocks=BLOCKS)
    generate(one, KEPT, 1)
    for number in range(BLOCKS):
        prompt = [*KEPT[: 2 * SIZE], *[number] * (8 * SIZE)]
        assert generate(one, prompt, 1, is_cold=is_cold)[1] == 2 * SIZE
    assert generate(one, KEPT, 1)[1] == (4 if is_cold else 2) * SIZE


def test_a_preempted_prompt_finds_its_own_blocks_though_they_will_not_come_again() -> None:
    one = engine(num_blocks=12)
    for number in range(2):
        assert submit(one, number, [number] * (4 * SIZE), 5 * SIZE, is_cold=True) is None
    drain(one)
    assert one.stats().pool.preempted_hit_tokens > 0 and not one.scheduler.pool.resident()
