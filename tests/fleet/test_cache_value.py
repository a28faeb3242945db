"""Value of a replica's cache: how much its removal would cost."""

from events.native import Load
from fleet.control.reconcile import cache_value
from fleet.host.report import Report


def holding(blocks: int, hit_rate: float, prompt_tokens_per_s: float, block_size: int = 16) -> Report:
    load = Load(cached_blocks=blocks)
    rates = {"hit_rate": hit_rate, "prompt_tokens_per_s": prompt_tokens_per_s}
    return Report(name="m-0", host="h", load=load, block_size=block_size, **rates)  # type: ignore[arg-type]


def test_an_unused_cache_is_worth_nothing_even_if_full() -> None:
    assert cache_value(holding(100_000, 0.0, 5000)) == cache_value(None) < cache_value(holding(10, 0.5, 10))


def test_what_is_asked_for_more_often_is_worth_more() -> None:
    assert cache_value(holding(100_000, 0.8, 500)) > cache_value(holding(100_000, 0.2, 1000))


def test_one_common_prefix_is_worth_less_than_many_conversations() -> None:
    """The shared prefix is computed once more, and then it is cached again."""
    everybodys, conversations = cache_value(holding(125, 0.9, 50_000)), cache_value(holding(6000, 0.7, 4000))
    assert [everybodys, conversations] == [(2000, 45_000), (96_000, 2800)]
    assert everybodys < conversations


def test_an_engine_that_does_not_say_what_it_holds_is_judged_by_its_hits() -> None:
    assert cache_value(holding(0, 0.5, 100, block_size=0)) == (3000.0, 50.0)
