"""Figures from the relevant lines of a replica's /metrics."""

from typing import Any

import pytest

from engines import METRICS
from router.console.samples import Samples
from router.dashboard.doctor.engine_metrics import READ, engine_figures

FIRST = """\
# HELP warmroute:num_blocks Blocks.
# TYPE warmroute:num_blocks gauge
warmroute:num_blocks 100
warmroute:free_blocks 40
warmroute:unreferenced_blocks 30
warmroute:cached_blocks 60
warmroute:kv_events_total 7
warmroute:draining 0
warmroute:evictions_total 1
warmroute:prefix_cache_query_blocks_total 5
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="a \\" {b"} 900
vllm:prefix_cache_queries_total 900
vllm:prefix_cache_hits_total 100
vllm:kv_cache_usage_perc 0.25
vllm:num_preemptions_total 2
vllm:request_success_total{finished_reason="stop"} 3
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="100"} 1
vllm:time_to_first_token_seconds_bucket{le="0.1"} 4
warmroute:requests_refused_total{reason="full"} 1
warmroute:requests_refused_total{reason="draining"} 9
"""
LAST = FIRST.replace(" 900", " 1800").replace(" 100\n", " 500\n").replace("total 1", "total 11")
SGLANG = """\
sglang:prompt_tokens_total 900
sglang:cached_tokens_total 100
sglang:evicted_tokens_total 160
sglang:token_usage 0.5
sglang:num_requests_total 3
sglang:cache_config_info{page_size="16",num_pages="100"} 1
sglang:num_retracted_reqs_total 1
"""


class Recording(Samples):
    """Knows what it was asked for."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.asked: set[str] = set()

    def total(self, *names: str, **labels: str) -> float | None:
        self.asked.update(names)
        return super().total(*names, **labels)

    def most(self, *names: str, **labels: str) -> float | None:
        self.asked.update(names)
        return super().most(*names, **labels)

    def label(self, name: str, label: str) -> str | None:
        self.asked.add(name)
        return super().label(name, label)


@pytest.mark.parametrize(("first", "last"), [(FIRST, LAST), (FIRST, FIRST), (SGLANG, SGLANG), ("", LAST)])
def test_the_lines_that_are_needed_say_all_that_is_read(first: str, last: str) -> None:
    index = (10.0, 2.0)
    whole = engine_figures(Samples(first), Samples(last), index)
    assert whole is not None
    assert engine_figures(Samples(first, READ), Samples(last, READ), index) == whole


@pytest.mark.parametrize("text", [FIRST, SGLANG])
def test_every_name_that_is_read_is_among_those_needed(text: str) -> None:
    samples = Recording(text)
    engine_figures(samples, samples, (10.0, 2.0))
    assert samples.asked <= READ
    assert not [name for name in samples.asked if name.startswith("vllm:time")]


@pytest.mark.parametrize(("pages", "blocks"), [("8192.0", 8192), ("1.6384e+06", 1_638_400), ("+Inf", 0), ("-1", 0)])
def test_the_size_of_sglangs_cache_is_read_from_gauges(pages: str, blocks: int) -> None:
    text = f"sglang:prompt_tokens_total 900\nsglang:page_size 16.0\nsglang:num_pages {pages}\n"
    figures = engine_figures(Samples(text), Samples(text))
    assert figures is not None
    assert (figures.block_tokens, figures.total_blocks) == (16, blocks)


def test_unread_data_is_not_looked_at() -> None:
    torn = Samples(FIRST + "vllm:time_to_first_token_seconds_sum{ 1\n\ufffd nothing\n", READ)
    assert torn.total("vllm:time_to_first_token_seconds_sum") is None and torn.total(*METRICS.prompt_tokens) is not None


def test_what_is_no_engine_has_no_figures() -> None:
    nothing: Any = engine_figures(Samples(""), Samples("other_total 1\n"))
    assert nothing is None


QUEUE = """\
vllm:prompt_tokens_total 9
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_waiting{engine="0"} 4
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 1
"""
OLD_QUEUE = "\n".join(line for line in QUEUE.splitlines() if "reason" not in line)
SGLANG_QUEUE = "sglang:prompt_tokens_total 9\nsglang:num_running_reqs 2\nsglang:num_queue_reqs 4"


@pytest.mark.parametrize(("text", "waiting"), [(QUEUE, 3.0), (OLD_QUEUE, 4.0), (SGLANG_QUEUE, 4.0)])
def test_requests_that_wait_for_room_are_counted_at_both_ends(text: str, waiting: float) -> None:
    there = Samples(f"{text}\n", READ)
    found = engine_figures(there, there)
    assert found is not None and (found.running, found.waiting) == (2.0, waiting)
    emptied = Samples(f"{text}\n".replace(" 4", " 0").replace(" 3", " 0"), READ)
    found = engine_figures(emptied, there)
    assert found is not None and found.waiting == 0.0
