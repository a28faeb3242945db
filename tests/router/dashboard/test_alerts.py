"""The alerts of the dashboard: the findings of `warmroute doctor` from the router's own data."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from lab.doctor.asking import Asking as Doctor
from lab.doctor.comparing import Look, figures_of
from router.dashboard import alerts, dashboard
from router.dashboard.alerts import Alerts
from router.dashboard.doctor.figures import Figures, RoutingFigures
from router.dashboard.doctor.rules import PAGE
from tests.router.dashboard.watching import Page, watched
from tests.router.loopback import until
from tests.router.scripted import CHAT, Script, Scripted, Served, chat, connect, drops, refused_port, says, served

GOOD = b'{"choices":[]}'
LINES = (Path(__file__).parents[3] / PAGE).read_text().splitlines()
HEADINGS = {line.strip("# `") for line in LINES if line.startswith("#")}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "FRAME_S", 0.02)
    monkeypatch.setattr(alerts, "EVERY_S", 0.1)


async def ask(running: Served, count: int, body: object = None) -> None:
    async with connect(running.port) as client:
        for _ in range(count):
            await client.post(CHAT, body or chat("a prompt " * 100))


async def told(page: Page, rule: str) -> dict[str, object]:
    """The first frame's alert of this rule."""
    while True:
        for alert in (await page.next())["alerts"]["alerts"]:
            if alert["rule"] == rule:
                return dict(alert)


async def test_existing_trouble_is_shown_at_once() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        running.member("r1").health.drain()
        async with watched(running) as page:
            fleet = await page.next()
        found = {(one["rule"], one["replica"]): one for one in fleet["alerts"]["alerts"]}
        assert set(found) == {("replica-draining", "r1"), ("no-events", "r0")}
        draining = found["replica-draining", "r1"]
        assert draining["turn"] and draining["figures"] == {"by": "an operator"}
        assert {one["rule"] for one in found.values()} <= HEADINGS
        assert fleet["alerts"]["judged_at"] == pytest.approx(fleet["at"], abs=5)


async def test_trouble_during_a_watch_is_shown_until_it_is_over() -> None:
    replicas = (Scripted("r0", says(GOOD)), Scripted("r1", drops))
    async with served(*replicas, breaker_faults=1) as running, watched(running) as page:
        assert "replica-down" not in rules_of(await page.next())
        await ask(running, 4)
        down = await told(page, "replica-down")
        assert down["replica"] == "r1"
        running.front.upkeep.apply({"r0": running.replicas["r0"].spec})
        while "replica-down" in rules_of(fleet := await page.next()):
            assert [one for one in fleet["alerts"]["ended"] if one["rule"] == "replica-down"] == []
        [ended] = [one for one in fleet["alerts"]["ended"] if one["rule"] == "replica-down"]
        assert (ended["replica"], ended["what"], ended["since"]) == ("r1", down["what"], down["since"])
        assert down["until"] is None and down["since"] < ended["until"] <= fleet["alerts"]["judged_at"]


def rules_of(fleet: dict[str, dict[str, list[dict[str, str]]]]) -> list[str]:
    return [one["rule"] for one in fleet["alerts"]["alerts"]]


async def test_counts_of_before_are_no_alert_and_those_of_now_are() -> None:
    async with served(*Script(says(GOOD)).replicas(1), queue_size=0, replica_limit=1) as running:
        running.router.history.counts.refused["queue_full"] = 1000
        async with watched(running) as page:
            for _ in range(3):
                assert "requests-refused" not in rules_of(await page.next())
            running.router.history.counts.refused["queue_full"] += 1000
            found = await told(page, "requests-refused")
            assert found["replica"] is None
            assert found["figures"] == {"refused": 1000.0, "requests": 0.0, "queue_full": 1000.0}


async def test_a_page_that_reconnects_at_once_finds_the_earlier_alerts() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        async with watched(running) as page:
            await page.next()
            running.router.history.counts.refused["queue_full"] += 1000
            await told(page, "requests-refused")
        async with watched(running, "?sort=name") as page:
            assert "requests-refused" in rules_of(await page.next())


async def test_a_fleet_without_replicas_says_so() -> None:
    async with served() as running, watched(running) as page:
        assert rules_of(await page.next()) == ["no-replicas"]


def alerts_of(running: Served) -> Alerts:
    router = running.router
    return Alerts(router.config.policy, router.members, router.history)


async def test_the_figures_are_those_that_the_doctor_reads_over_http() -> None:
    """Figures of the router itself; queues and times are read at other moments."""
    script = Script(
        says(b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'), drops, says(GOOD, 429), says(GOOD)
    )
    async with served(*script.replicas(3), breaker_faults=1000) as running:
        judging = alerts_of(running)
        await ask(running, 5)
        before = await asyncio.to_thread(looked, running.port)
        fleet = await running.front.dashboard.statuses.fleet()
        first = judging._look(fleet)
        await ask(running, 20)
        await ask(running, 5, chat("salted " * 100, cache_salt="pepper"))
        running.member("r0").health.drain()
        running.router.history.counts.refused["queue_full"] += 7
        after = await asyncio.to_thread(looked, running.port)
        fleet = await running.front.dashboard.statuses.fleet()
        ours = await judging.figures(first, judging._look(fleet))
        theirs = figures_of(before, [], after)
        assert len(ours.replicas) == 3
        assert routed(ours) == routed(theirs)
        assert ours.router is not None and theirs.router is not None
        assert ours.router.requests == theirs.router.requests
        refused = {code: count for code, count in ours.router.refused.items() if count}
        assert refused == theirs.router.refused
        approximate = {reason: count for reason, count in ours.router.approximate.items() if count}
        assert approximate == theirs.router.approximate
        assert sorted(one.replica for one in ours.router.choices or ()) == sorted(
            one.replica for one in theirs.router.choices or ()
        )


def looked(port: int) -> Look:
    with Doctor(f"http://127.0.0.1:{port}", []) as doctor:
        return doctor.look()


def routed(figures: Figures) -> dict[str, dict[str, object]]:
    found = {}
    for one in figures.replicas:
        assert isinstance(one.routed, RoutingFigures)
        found[one.name] = asdict(replace(one.routed, busy=(), queued_tokens=(), lag_batches=0))
    return found


async def test_choices_are_looked_at_no_further_than_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MAX_CONSIDERED", 6)
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        judging = alerts_of(running)
        await ask(running, 10)
        assert len(judging._decided_since(None)) == 3
        monkeypatch.setattr(alerts, "MAX_CONSIDERED", 10**6)
        assert len(judging._decided_since(None)) == 10
        assert len(judging._decided_since(running.router.history.decisions[6])) == 3


async def test_a_replica_that_was_never_reached_is_down() -> None:
    gone = Scripted("gone", says(GOOD))
    gone.port = refused_port()
    async with served(gone, ready=False) as running, watched(running) as page:
        found = await told(page, "replica-down")
        assert found["replica"] == "gone" and "not reached" in str(found)


# ---- what replicas say of themselves

CACHING_OFF = """\
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model_name="m"} 9000
# HELP vllm:cache_config_info The config.
vllm:cache_config_info{block_size="16",enable_prefix_caching="False",num_gpu_blocks="1000"} 1
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} 1
"""


def says_of_itself(metrics: str, status: int = 200) -> Scripted:
    replica = Scripted("r0", says(GOOD))
    replica.control["/metrics"] = (status, metrics.encode())
    return replica


async def test_what_a_replica_says_of_itself_is_judged_too_and_nothing_is_kept_without_a_watcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dashboard, "LINGER_S", 0.5)
    async with served(says_of_itself(CACHING_OFF)) as running:
        judging = running.front.dashboard.alerts
        asking_for: Any = judging._metrics

        def was_judged() -> bool:
            return judging.report.judged_at is not None

        assert not was_judged()
        async with watched(running) as page:
            assert (await told(page, "caching-off"))["replica"] == "r0"
            assert was_judged() and running.replicas["r0"].asked.count("/metrics") > 0
        await until(lambda: not was_judged(), "it is forgotten when nobody watches any more")
        assert not judging._looks and not judging._readings
        await until(lambda: not asking_for._samples, "nothing is kept when nobody watches any more")
        assert asking_for._polling is None


@pytest.mark.parametrize(
    "replica",
    [says_of_itself(CACHING_OFF, 401), says_of_itself("<html>\n"), says_of_itself("vllm:prompt_tokens_total x\n")],
)
async def test_one_that_says_nothing_of_use_is_judged_by_the_router_alone(replica: Scripted) -> None:
    async with served(replica) as running, watched(running) as page:
        for asked in range(3):
            while replica.asked.count("/metrics") <= asked:
                await page.next()
        assert rules_of(await page.next()) == ["no-events"]


async def test_a_large_fleet_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "MAX_REPLICAS", 0)
    replica = says_of_itself(CACHING_OFF)
    async with served(replica) as running, watched(running) as page:
        report = {(await page.next())["alerts"]["judged_at"] for _ in range(20)}
        assert len(report) > 1
        assert "/metrics" not in replica.asked
