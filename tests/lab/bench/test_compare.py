"""Ratios with intervals: where they are wide, where they leave out 1, and how often they are right."""

import math
import random
import statistics

import pytest

from lab.bench.client import Outcome
from lab.bench.figures import Ratio, compare, figures, ratio

Chance = random.Random


def answered(number: int, ttft_s: float, **fields: object) -> Outcome:
    told = {"prompt_tokens": 100, "cached_tokens": 50, "output_tokens": 11, "status": 200} | fields
    return Outcome(str(number), 0, False, 0.0, first_s=ttft_s, end_s=ttft_s + 1, **told)  # type: ignore[arg-type]


def side(chance: Chance, count: int, factor: float, noise: float = 0.3) -> list[Outcome]:
    return [answered(n, factor * math.exp(chance.gauss(0, noise))) for n in range(count)]


def ratios(rounds: list[tuple[list[Outcome], list[Outcome]]]) -> dict[str, Ratio]:
    return {found.name: found for found in compare([(figures([first]), figures([second])) for first, second in rounds])}


def is_sure(ratio: Ratio) -> bool:
    return ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high


def test_the_same_twice_has_a_ratio_of_exactly_1() -> None:
    same = side(Chance(1), 50, 1.0)
    found = ratios([(same, same)] * 3)
    assert all((each.low, each.ratio, each.high) == (1, 1, 1) for each in found.values())


def test_equal_endpoints_have_1_in_the_interval_as_often_as_claimed() -> None:
    chance, right, trials = Chance(2), 0, 200
    for _ in range(trials):
        found = ratios([(side(chance, 20, 1.0), side(chance, 20, 1.0)) for _ in range(4)])["TTFT mean"]
        right += not is_sure(found)
    assert 0.9 < right / trials < 0.99


def test_missing_figures_have_no_ratio() -> None:
    silent = [answered(0, 1.0, cached_tokens=None)]
    cold = [answered(0, 1.0, cached_tokens=0)]
    assert ratios([(silent, silent)])["hit rate"].ratio is None
    assert ratios([(cold, [answered(0, 1.0)])])["hit rate"].ratio is None


def test_a_ratio_has_students_interval_over_the_rounds() -> None:
    found = ratio("requests/s", [(10, 11), (10, 12), (20, 25)])
    logs = [math.log(ratio) for ratio in (1.1, 1.2, 1.25)]
    half = 4.303 * statistics.stdev(logs) / math.sqrt(3)
    assert found.ratio == pytest.approx(math.exp(statistics.mean(logs)))
    assert found.low == pytest.approx(math.exp(statistics.mean(logs) - half), rel=1e-3)
    assert found.high == pytest.approx(math.exp(statistics.mean(logs) + half), rel=1e-3)


def test_a_ratio_of_one_round_has_no_interval() -> None:
    assert ratio("requests/s", [(10, 11)]) == Ratio("requests/s", 10, 11, 1.1, None, None)
    assert ratio("requests/s", [(0, 11), (10, 10)]).ratio is None
    assert not is_sure(ratio("requests/s", [(10, 11)]))
