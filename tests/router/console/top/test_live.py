"""`warmroute top` as people have it: a whole router, simulated replicas, traffic, a terminal, and all of it fails."""

import asyncio
import signal
import termios
from collections.abc import Iterator

import pytest

from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.terminals import terminal
from tests.replica.serving import MODEL
from tests.router.console.top.shown import Shown, shown

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]

SYSTEM = "You answer questions about ships, and you are never wrong. " * 30
FAST = ("--num-blocks", 512, "--set=simulated_prefill_tokens_per_s=400_000", "--set=simulated_step_overhead=0")


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    with fleet(2, *FAST) as running:
        yield running


@pytest.fixture(scope="module")
def running(replicas: Fleet) -> Iterator[RouterProcess]:
    with router(*replicas.as_options) as started:
        yield started


def ask(running: RouterProcess, question: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    answer = running.post("/v1/chat/completions", {"model": MODEL, "max_tokens": 4, "messages": messages})
    assert answer.status == 200, answer.body


async def asked(running: RouterProcess, *questions: str) -> None:
    for question in questions:
        await asyncio.to_thread(ask, running, question)


async def states(screen: Shown, *wanted: str) -> None:
    def found() -> list[str]:
        return [" ".join(screen.line_of(f"r{number} ").split()[1:2]) for number in range(len(wanted))]

    await screen.until(lambda: found() == list(wanted), f"their states are {wanted}")


async def test_traffic_is_seen_with_exact_caches_and_true_predictions(running: RouterProcess) -> None:
    async with shown(running.url, size=(110, 40)) as screen:
        await states(screen, "exact", "exact")
        await asked(running, "Why?", "Why is that so?", "Where to?")
        await screen.until_text("cold: lowest cost")
        await screen.until(lambda: screen.poller.seen.decisions[0].reported_cached_tokens, "a hit is reported")
        hit = screen.poller.seen.decisions[0]
        assert (hit.reported_cached_tokens or 0) >= (hit.predicted_cached_tokens or 0) > 0
        row = next(one for one in screen.poller.seen.replicas if one.name == hit.chosen)
        assert row.load.total_blocks == 512 and row.index.blocks["GPU"] > 20
        assert row.heard_age_s is not None and row.heard_age_s < 5
        await screen.until(lambda: "%" in screen.line_of(f"{hit.chosen} "), "its cache is in use")


async def test_a_killed_replica_is_down_and_its_restart_is_news(running: RouterProcess, replicas: Fleet) -> None:
    async with shown(running.url) as screen:
        await states(screen, "exact", "exact")
        await asyncio.to_thread(replicas.kill, 1)
        await states(screen, "exact", "down")
        await screen.until_text("1 exact, 1 down")
        await asyncio.to_thread(replicas.start, 1)
        await states(screen, "exact", "exact")
        streams = {one.name: one.events for one in screen.poller.seen.replicas}
        assert streams["r1"] is not None and streams["r1"].restarts + streams["r1"].reconnects


# ---- a terminal


@pytest.mark.parametrize("way", ["q", "SIGTERM"])
def test_the_terminal_is_left_as_it_was_found(running: RouterProcess, way: str) -> None:
    with terminal("top", running.url, "--interval", "0.2") as screen:
        screen.read_until(b"2 exact")
        screen.read_until(b"? help")
        if way == "q":
            screen.type(b"q")
        else:
            screen.process.send_signal(getattr(signal, way))
        assert screen.end() == 0
        assert screen.written.rindex(b"\x1b[?1049l") > screen.written.rindex(b"\x1b[?1049h")  # the other screen
        assert screen.written.rindex(b"\x1b[?25h") > screen.written.rindex(b"\x1b[?25l")  # the cursor
        assert b"Traceback" not in screen.written
        assert termios.tcgetattr(screen.theirs) == screen.before
