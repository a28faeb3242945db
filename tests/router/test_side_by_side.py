import random
import statistics
from functools import cache

import pytest

from router.placement import load
from tests.router.side_by_side import World

PROMPTS = 200
SEEDS = range(4)


def mixed_prompts(seed: int) -> list[int]:
    """Lengths with a mean of about 2,400 tokens and a long tail."""
    rng = random.Random(seed)
    return [int(min(30_000, rng.lognormvariate(7.3, 1.0))) for _ in range(PROMPTS)]


@cache
def imbalance(routers: int, over_s: float, *, reports: bool = True, elsewhere_tokens: int = 0) -> float:
    found = [
        World(routers, 4, 10 * seed, reports=reports).run(mixed_prompts(seed), over_s, elsewhere_tokens)
        for seed in SEEDS
    ]
    return statistics.mean(found)


@pytest.mark.parametrize(("routers", "over_s"), [(1, 0.2), (2, 2.0), (4, 0.2)])
def test_routers_side_by_side_do_not_herd_on_a_burst(routers: int, over_s: float) -> None:
    assert imbalance(routers, over_s) < 1.2


def test_they_do_herd_if_each_takes_itself_for_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = imbalance(4, 0.2)
    monkeypatch.setattr(load, "MAX_CROWD", 1.0)
    assert imbalance.__wrapped__(4, 0.2) > counted + 0.06


def test_without_reports_other_routers_requests_are_invisible() -> None:
    assert imbalance(2, 2.0, elsewhere_tokens=80_000) < 1.2
    assert imbalance(2, 2.0, reports=False, elsewhere_tokens=80_000) > 1.3
