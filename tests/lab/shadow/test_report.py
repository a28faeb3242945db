"""The findings as text."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from lab.shadow.findings import Findings, Measured, Run, Sure, lines
from lab.shadow.placing import AtOnceSums
from lab.shadow.twin import Speeds

SURE = Sure(
    exact_trees=1,
    doubts={"r1": "its events are not followed"},
    exact_prompts=9,
    approximate={"it has no tokenizer here": 1},
    replica_known={"stored": 8, "unknown": 2},
    left_out=0,
    refused=0,
    dropped=3,
    late=0,
    assumed=("8,000 prefill tokens/s in each replica; give --prefill-rate",),
)
FOUND = Findings(
    seconds=60.0,
    policy="cost",
    requests=12,
    skipped={"too large": 2},
    simulated_requests=10,
    prompt_tokens=20_000,
    served=Run(0.25, 1.5, 0.8),
    warmroute=Run(0.5, 1.0, 0.2),
    runs=[Run(0.5, 1.0, 0.15), Run(0.5, 1.0, 0.25)],
    saved_prefill_s=0.5,
    measured=Measured(0.24, 0.81, None, {"r0": 0.3}),
    at_once=AtOnceSums(8, 1000, 250.0, 400.0),
    sure=SURE,
    speeds=Speeds(
        capacity_tokens=1600,
        prefill_tokens_per_s=8000.0,
        pace_tokens_per_s=7000.0,
        decode_tokens_per_s=40.0,
        output_tokens=128,
    ),
)


def test_the_report_says_the_gain_and_how_sure_it_is() -> None:
    text = "\n".join(lines(FOUND))
    for expected in (
        "12 requests in 60.0 s; 2 skipped (2 too large)",
        "as it was served         25.0%    1.5 s     800 ms",
        "warmroute (cost)         50.0%    1.0 s     200 ms",
        "gain              +25.0 points     -33%       -75%",
        "2 runs of warmroute: mean TTFT 150 ms to 250 ms",
        "hits, by the replicas' counters: 24.0%",
        "cached where it went, 8 requests: 25.0%",
        "with the caches as they were: 40.0%",
        "trees: 1 of 2 exact",
        "r1: its events are not followed",
        "where requests went: 8 by the events, 2 unknown",
        "assumed: 8,000 prefill tokens/s in each replica; give --prefill-rate",
        "3 requests the oldest, forgotten for newer ones",
    ):
        assert expected in text


@pytest.mark.parametrize("field", ["served", "warmroute"])
def test_nothing_is_divided_by_zero(field: str) -> None:
    change: dict[str, Any] = {field: Run(0.0, 0.0, 0.0)}
    assert list(lines(replace(FOUND, **change)))


def test_without_a_request_there_is_nothing_to_compare() -> None:
    told = list(lines(replace(FOUND, simulated_requests=0)))
    assert told[-1] == "nothing can be compared: no request could be placed, or nobody knows where they went"


def test_the_findings_are_the_same_after_a_way_through_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(FOUND), type=Findings) == FOUND
