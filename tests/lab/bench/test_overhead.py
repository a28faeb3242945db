"""The load generator measures itself, and warns when its figures are its own limit."""

import asyncio
import os
import signal
import time

from msgspec.structs import replace

from lab.bench.figures import EndpointResult, figures, warnings
from lab.bench.load import Limits, LoadGenerator, Overhead, OverheadMeter
from lab.bench.measure import Plan, measured, summed_up
from lab.bench.probe import Probe, RequestSettings
from lab.bench.workloads import at_once
from lab.percentiles import spread
from router.members.spec import Target, parse_target
from tests.lab.bench.endpoints import Endpoint, endpoint, singles

CALM = Overhead(0.1, 0.05, lag_p99_s=0.001, lag_max_s=0.004)
KNOWN = Probe("m", 1.0, is_measured=True, ignores_eos=True, tells_usage=True)


async def test_an_event_loop_that_is_held_up_is_late_and_one_that_is_not_is_not() -> None:
    held = OverheadMeter()
    for _ in range(10):
        spin_s(0.03)
        await asyncio.sleep(0)
    late = held.stop()
    assert late.lag_p99_s > 0.015 and late.delays(0.05)
    assert late.cpu_s > 0.1


def spin_s(duration_s: float) -> None:
    """CPU time: where others compute too, it takes longer."""
    end_s = time.thread_time() + duration_s
    while time.thread_time() < end_s:
        pass


def warned(own: Overhead = CALM, probe: Probe = KNOWN, ttft_s: float = 0.04, itl_s: float = 0.04) -> str:
    found = replace(figures([]), requests=1, ttft_s=spread([ttft_s]), itl_s=spread([itl_s]))
    return "; ".join(warnings(EndpointResult("http://h:1", probe, found, [], [CALM, own], 0)))


def test_a_result_is_not_to_be_trusted_blindly() -> None:
    assert warned() == ""
    late = replace(CALM, lag_p99_s=0.006)
    assert "late by 6.0 ms at p99, more than 10% of the p99 of first tokens and of tokens" in warned(late)
    assert "p99 of tokens after the first;" in warned(late, ttft_s=0.4)
    assert warned(late, ttft_s=0.4, itl_s=0.1) == ""
    assert "used 90% of its core" in warned(replace(CALM, cpu_share=0.9))
    assert "a word was taken for a token" in warned(probe=replace(KNOWN, is_measured=False))
    assert "answers may be shorter" in warned(probe=replace(KNOWN, ignores_eos=False))


def compared(one: Endpoint, other: Endpoint, interrupted_load: int) -> tuple[list[int], int, bool]:
    """Results of three rounds interrupted in one: runs of each endpoint, ratios, and the warning flag."""
    loads: list[LoadGenerator] = []

    def on_load(load: LoadGenerator, target: Target, number: int) -> None:  # noqa: ARG001
        loads.append(load)
        if len(loads) == interrupted_load:
            os.kill(os.getpid(), signal.SIGINT)

    targets = [parse_target(one.url), parse_target(other.url)]
    plan = Plan(targets, RequestSettings("m", "1"), lambda _: at_once(singles(5)), Limits(clients=1), rounds=3)
    found = measured(plan, on_load)
    result = summed_up(plan, found, {})
    return [len(ran) for ran in found.ran], len(result.comparison), result.interrupted


def test_ctrl_c_in_a_comparison_leaves_the_rounds_that_both_ended() -> None:
    with endpoint() as one, endpoint() as other:
        runs, ratios, interrupted = compared(one, other, 4)
        assert (runs, interrupted) == ([2, 2], True)
        assert ratios > 0
        runs, ratios, interrupted = compared(one, other, 2)
        assert (runs, ratios, interrupted) == ([1, 1], 0, True)
        runs, ratios, interrupted = compared(one, other, 99)
        assert (runs, interrupted) == ([3, 3], False)
