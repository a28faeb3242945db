"""Sizes and speeds from the engines' counters."""

import pytest

from lab.shadow.replicas import Counted, Followed, Sample, changes, sample_of, summed
from lab.shadow.twin import USUAL, at_pace, speeds_of

VLLM = """# HELP vllm:prefix_cache_queries_total Queries.
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="100"}} 1.0
vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} {waits}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {count}
vllm:request_prefill_time_seconds_sum{{engine="0",model_name="m"}} {prefill}
vllm:request_prefill_time_seconds_count{{engine="0",model_name="m"}} {count}
vllm:inter_token_latency_seconds_sum{{engine="0",model_name="m"}} {gaps}
vllm:inter_token_latency_seconds_count{{engine="0",model_name="m"}} 100
vllm:request_generation_tokens_sum{{engine="0",model_name="m"}} {output}
vllm:request_generation_tokens_count{{engine="0",model_name="m"}} {count}
"""


def sample(scale: int) -> Sample:
    counters = {"queries": 1000, "hits": 400, "waits": 5, "count": 10, "prefill": 3, "gaps": 2, "output": 70}
    found = sample_of(VLLM.format(**{name: value * scale for name, value in counters.items()}).encode())
    assert found is not None
    return found


def vllm(name: str = "a", capacity_tokens: int = 1600) -> Followed:
    return Followed(name, ("m",), False, None, capacity_tokens, 0.0)


def test_counters_tell_what_happened_between_two_looks() -> None:
    assert sample(1).capacity_tokens == 1600
    by_name = changes({"a": sample(1), "b": sample(1), "gone": sample(1)}, {"a": sample(3), "b": sample(2)})
    assert set(by_name) == {"a", "b"}
    both = summed(by_name.values())
    assert (both.query_tokens, both.hit_tokens, both.prefill_s) == (3000, 1200, 9)
    assert both.first_token_s.value == pytest.approx(0.5)
    assert both.output_tokens.value == pytest.approx(7)


def test_a_restarted_engine_counts_from_its_new_beginning() -> None:
    assert changes({"a": sample(3)}, {"a": sample(1)})["a"].query_tokens == 1000


@pytest.mark.parametrize("text", [b"", b"<html>", b"vllm:prefix_cache_hits_total{ 1\n", b"\xff\xff{\n" * 1000])
def test_an_answer_that_is_no_metrics_tells_nothing(text: bytes) -> None:
    found = sample_of(text)
    assert found is None or changes({"a": found}, {"a": found}) == {"a": Counted()}


def test_speeds_are_counted_where_the_replica_does_not_tell_them() -> None:
    counted = changes({"a": sample(1)}, {"a": sample(2)})["a"]
    speeds = speeds_of([vllm(), vllm("b", 3200), vllm("c", 0)], counted)
    assert speeds.capacity_tokens == 2400
    assert speeds.prefill_tokens_per_s == pytest.approx((1000 - 400) / 3)
    assert speeds.output_tokens == 7
    assert speeds.assumed == ()


def test_what_a_replica_tells_and_what_the_user_says_come_first() -> None:
    counted = changes({"a": sample(1)}, {"a": sample(2)})["a"]
    native = Followed("n", ("m",), True, None, 1600, 5000.0)
    assert speeds_of([native], counted).prefill_tokens_per_s == 5000.0
    said = speeds_of([native], counted, capacity_tokens=7, prefill_tokens_per_s=9.0)
    assert (said.capacity_tokens, said.prefill_tokens_per_s, said.pace_tokens_per_s) == (7, 9.0, 9.0)


def test_what_nobody_tells_is_assumed_and_named_with_its_option() -> None:
    speeds = speeds_of([vllm(capacity_tokens=0)], Counted())
    assert (speeds.capacity_tokens, speeds.prefill_tokens_per_s) == (USUAL.capacity_tokens, USUAL.prefill_tokens_per_s)
    assert speeds.assumed == (
        "427,232 tokens of KV cache in each replica; give --capacity-tokens",
        "8,000 prefill tokens/s in each replica; give --prefill-rate",
    )


def test_a_fitted_pace_is_the_rate_where_nobody_tells_it() -> None:
    unknown = at_pace(speeds_of([vllm()], Counted()), 900.0)
    assert (unknown.prefill_tokens_per_s, unknown.pace_tokens_per_s, unknown.assumed) == (900.0, 900.0, ())
    told = at_pace(speeds_of([Followed("n", ("m",), True, None, 1600, 5000.0)], Counted()), 900.0)
    assert (told.prefill_tokens_per_s, told.pace_tokens_per_s) == (5000.0, 900.0)
