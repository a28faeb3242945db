"""Ratios with intervals: where they are wide, where they leave out 1, and how often they are right."""

import math
import random
import statistics

import pytest

from lab.bench.compare import RATES, Pair, Ratio, compare, paired, rate_ratio
from lab.bench.figures import figures
from lab.bench.outcome import Outcome

Chance = random.Random


def answered(number: int, ttft_s: float, **fields: object) -> Outcome:
    told = {"prompt_tokens": 100, "cached_tokens": 50, "output_tokens": 11, "status": 200} | fields
    return Outcome(str(number), 0, False, 0.0, first_s=ttft_s, end_s=ttft_s + 1, **told)  # type: ignore[arg-type]


def side(chance: Chance, count: int, factor: float, noise: float = 0.3) -> list[Outcome]:
    return [answered(n, factor * math.exp(chance.gauss(0, noise))) for n in range(count)]


def ratios(rounds: list[tuple[list[Outcome], list[Outcome]]], seed: str = "1", draws: int = 200) -> dict[str, Ratio]:
    pairs = [paired(first, second) for first, second in rounds]
    of_rounds = [(figures([first]), figures([second])) for first, second in rounds]
    return {ratio.name: ratio for ratio in compare(pairs, of_rounds, seed, draws)}


def test_a_real_difference_is_found_and_its_interval_leaves_out_1() -> None:
    chance = Chance(1)
    found = ratios([(side(chance, 80, 1.0), side(chance, 80, 1.5)) for _ in range(3)])["TTFT mean"]
    assert found.ratio is not None and found.low is not None and found.high is not None
    assert found.low < 1.5 < found.high
    assert found.is_sure
    assert found.high - found.low < 0.4


def test_the_same_twice_has_a_ratio_of_exactly_1() -> None:
    same = side(Chance(1), 50, 1.0)
    found = ratios([(same, same)] * 3)
    for name in ("TTFT mean", "TTFT p50", "e2e p95", "TPOT mean", "hit rate"):
        assert (found[name].low, found[name].ratio, found[name].high) == (1, 1, 1)


@pytest.mark.chaos
def test_equal_endpoints_have_1_in_the_interval_as_often_as_claimed() -> None:
    """Not quite 95 %: with few rounds a bootstrap is known to be somewhat too sure."""
    chance, right, trials = Chance(2), 0, 40
    for _ in range(trials):
        found = ratios([(side(chance, 20, 1.0), side(chance, 20, 1.0)) for _ in range(4)])["TTFT mean"]
        right += not found.is_sure
    assert 0.8 < right / trials < 1


def test_what_differs_from_round_to_round_makes_the_interval_wider() -> None:
    chance = Chance(3)
    steady = ratios([(side(chance, 50, 1.0), side(chance, 50, 1.0)) for _ in range(4)])["TTFT mean"]
    moods = ratios([(side(chance, 50, 1.0), side(chance, 50, f)) for f in (0.6, 0.8, 1.3, 1.6)])["TTFT mean"]
    assert width(moods) > 2 * width(steady)


def width(ratio: Ratio) -> float:
    assert ratio.low is not None and ratio.high is not None
    return ratio.high - ratio.low


def test_requests_that_both_have_slow_alike_do_not_blur_the_ratio() -> None:
    """Long prompts are slow at both: drawn together, they cancel."""
    chance = Chance(4)
    first = side(chance, 100, 1.0, noise=1.0)
    second = [answered(n, one.first_s * 1.1) for n, one in enumerate(first) if one.first_s is not None]
    together = ratios([(first, second)])["TTFT mean"]
    chance.shuffle(second)
    for number, one in enumerate(second):
        one.talk = str(number)
    apart = ratios([(first, second)])["TTFT mean"]
    assert together.ratio == pytest.approx(1.1)
    assert width(apart) > 10 * width(together)


def test_equal_seeds_have_equal_intervals() -> None:
    rounds = [(side(Chance(5), 20, 1.0), side(Chance(6), 20, 1.0))]
    assert ratios(rounds) == ratios(rounds)
    assert ratios(rounds)["TTFT mean"] != ratios(rounds, "2")["TTFT mean"]


def test_pairs_are_the_same_request_and_failures_are_unpaired() -> None:
    failed = Outcome("1", 0, False, 0.0, error="timeout")
    warm = Outcome("7", 0, True, 0.0)
    first, second = [answered(0, 1.0), answered(1, 1.0), warm], [failed, answered(0, 2.0), answered(2, 3.0)]
    assert paired(first, second) == [Pair(first[0], second[1]), Pair(first[1], None), Pair(None, second[2])]


def test_missing_figures_have_no_ratio() -> None:
    silent = [answered(0, 1.0, cached_tokens=None)]
    cold = [answered(0, 1.0, cached_tokens=0)]
    assert ratios([(silent, silent)])["hit rate"].ratio is None
    assert ratios([(cold, [answered(0, 1.0)])])["hit rate"].ratio is None


def test_a_rate_has_students_interval_over_the_rounds() -> None:
    found = rate_ratio("requests/s", [(10, 11), (10, 12), (20, 25)])
    logs = [math.log(ratio) for ratio in (1.1, 1.2, 1.25)]
    half = 4.303 * statistics.stdev(logs) / math.sqrt(3)
    assert found.ratio == pytest.approx(math.exp(statistics.mean(logs)))
    assert found.low == pytest.approx(math.exp(statistics.mean(logs) - half), rel=1e-3)
    assert found.high == pytest.approx(math.exp(statistics.mean(logs) + half), rel=1e-3)


def test_a_rate_of_one_round_has_no_interval() -> None:
    assert rate_ratio("requests/s", [(10, 11)]) == Ratio("requests/s", 10, 11, 1.1, None, None)
    assert rate_ratio("requests/s", [(0, 11), (10, 10)]).ratio is None
    assert not rate_ratio("requests/s", [(10, 11)]).is_sure


def test_every_rate_is_compared() -> None:
    chance = Chance(8)
    found = ratios([(side(chance, 20, 1.0), side(chance, 20, 1.0)) for _ in range(3)])
    assert all(found[name].low is not None for name, _ in RATES)
