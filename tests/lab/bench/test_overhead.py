"""The load generator measures itself, and warns when its figures are its own limit."""

import asyncio
import time

from msgspec.structs import replace

from lab.bench.figures import EndpointResult, figures, warnings
from lab.bench.load import Overhead, OverheadMeter
from lab.bench.probe import Probe
from lab.percentiles import spread

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
    return "; ".join(warnings(EndpointResult("http://h:1", probe, found, [own], 0)))


def test_a_result_is_not_to_be_trusted_blindly() -> None:
    assert warned() == ""
    late = replace(CALM, lag_p99_s=0.006)
    assert "late by 6.0 ms at p99, more than 10% of the p99 of first tokens and of tokens" in warned(late)
    assert "p99 of tokens after the first;" in warned(late, ttft_s=0.4)
    assert warned(late, ttft_s=0.4, itl_s=0.1) == ""
    assert "used 90% of its core" in warned(replace(CALM, cpu_share=0.9))
    assert "a word was taken for a token" in warned(probe=replace(KNOWN, is_measured=False))
    assert "answers may be shorter" in warned(probe=replace(KNOWN, ignores_eos=False))
