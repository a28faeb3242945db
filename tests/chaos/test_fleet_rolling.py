"""A fleet that is restarted and scaled under load: no request fails, and the caches are warm again afterwards."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.rolled import Rolled, talked_to, up
from tests.fleet.test_up import nothing_is_left

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

REPLICAS = 3
CLIENTS = 8
WINDOW = 40  # answers of which a hit rate is taken
# Answers take about 0.7 s, so that there are always some on the way.
SPEED = ("--set=simulated_decode_tokens_per_s=60", "--set=simulated_prefill_tokens_per_s=8000")
GROWS = """
[[models]]
model = "demo"
engine = "simulated"
autoscale = {min = 1, max = 3, ttft_target_s = 0.5, up_after_s = 0.5, down_after_s = 1.5}
options = {simulated-prefill-tokens-per-s = 1500, simulated-decode-tokens-per-s = 200}
"""


async def change(rolled: Rolled, *words: str, keeps: int) -> str:
    """With never fewer ready than `keeps`, answers all the while, and caches as warm as before afterwards."""
    await rolled.until(lambda: len(rolled.talking.heard) >= WINDOW, "answers before it")
    before = rolled.talking.hit_rate(WINDOW)
    rolled.watched.fewest_ready = rolled.watched.now["ready"]
    since = len(rolled.talking.heard)
    said = await rolled.warmroute(*words)
    assert len(rolled.talking.heard) > since, "the change was over before any request saw it"
    assert rolled.watched.fewest_ready >= keeps
    end = len(rolled.talking.heard)
    await rolled.until(
        lambda: len(rolled.talking.heard) >= end + WINDOW and rolled.talking.hit_rate(WINDOW) > 0.9 * before,
        f"a hit rate of {before:.0%} again",
    )
    assert rolled.talking.failed == []
    return said


async def test_restarts_and_scaling_under_load_fail_no_request(tmp_path: Path) -> None:
    with up(tmp_path, "--simulated", "--replicas", str(REPLICAS), "--", *SPEED) as running:
        async with talked_to(running, tmp_path, CLIENTS) as rolled:
            watched = rolled.watched
            first = set(watched.incarnations)
            assert "All replicas of demo are new" in await change(rolled, "restart", "demo", keeps=REPLICAS - 1)
            assert len(first) == len(watched.incarnations) == REPLICAS and not first & watched.incarnations
            assert watched.most == REPLICAS
            await change(rolled, "scale", "demo", "2", keeps=2)
            assert watched.now["ready"] == watched.now["replicas"] == 2
        assert rolled.talking.failed == []
        assert running.end() == 0
        nothing_is_left(running)


async def test_a_burst_scales_it_up_and_quiet_scales_it_down(tmp_path: Path) -> None:
    plan = tmp_path / "fleet.toml"
    plan.write_text(GROWS)
    with up(tmp_path, "--config", str(plan)) as running:
        async with talked_to(running, tmp_path, clients=32) as rolled:
            await rolled.until(lambda: rolled.watched.now["ready"] == 3, "it has grown")
            assert "a new prompt would wait" in rolled.watched.now["autoscale_why"]
            await rolled.answers(WINDOW, "answers of all three")
        async with talked_to(running, tmp_path, clients=1) as quiet:  # they leave while somebody still asks
            await quiet.until(lambda: quiet.watched.now["replicas"] == 1, "it has shrunk")
            assert "with one less" in quiet.watched.now["autoscale_why"]
            await quiet.answers(2, "answers of the last one")
        assert rolled.talking.failed == quiet.talking.failed == []
        assert running.end() == 0
        nothing_is_left(running)


@pytest.mark.grid
async def test_replicas_that_leave_without_a_word_would_be_seen(tmp_path: Path) -> None:
    """The negative control: with a router that never waits, answers are cut before the next replica is there."""
    waits_for_nobody = {"WARMROUTE_QUEUE_TIMEOUT": "0"}
    with up(tmp_path, "--simulated", "--replicas", "1", "--", *SPEED, **waits_for_nobody) as running:
        async with talked_to(running, tmp_path, CLIENTS) as rolled:
            await rolled.answers(CLIENTS, "all have begun")
            os.kill(running.replica("demo-0"), signal.SIGKILL)
            await rolled.until(lambda: rolled.watched.fewest_ready == 0, "it is missed")
            await rolled.until(lambda: rolled.talking.failed, "answers that fail")
