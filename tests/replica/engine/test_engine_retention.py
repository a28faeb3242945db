"""A key's share of what is retained, whatever its clients add to its salt."""

import pytest

from api.retention import Retain
from tests.replica.engines import SIZE, engine, generate

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
