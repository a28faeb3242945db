"""Polls of a router, the answers kept, and the messages where there are none."""

from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import click
import pytest

from events.publisher import Publisher
from router.console.asking import Refused, Unreachable
from router.console.top.poller import DECISIONS, PREFIXES, REPLICAS, Poller, PollInterval, RouterClient
from tests.router.dashboard.test_status import exact, ours
from tests.router.loopback import Reply, Request, serving
from tests.router.members.test_feeds import config
from tests.router.scripted import CHAT, MODEL, Script, chat, connect, named, refused_port, says, served

GOOD = b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'


class FakeRouter:
    def __init__(self, names: int = 1, **answers: tuple[int, Any]) -> None:
        self.asked: Counter[str] = Counter()
        self.targets: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "/replicas": (200, {"replicas": [{"name": f"r{number}", "newer": 1} for number in range(names)]}),
            "/decisions": (200, {"decisions": [{"ts": 1.0, "request_id": "x", "newer": 1}]}),
            "/prefixes": (200, {"prompts": 3, "span_s": 1.0, "texts": True, "prefixes": [], "newer": 1}),
        } | {f"/{name}": answer for name, answer in answers.items()}

    async def handle(self, request: Request, reply: Reply) -> None:
        self.asked[request.path] += 1
        self.targets.append(f"{request.path}?{request.query.get('limit', '')}")
        await reply.whole(*self.answers[request.path])


async def looked(router: FakeRouter, times: int = 1, clock: Callable[[], float] = lambda: 0.0) -> Poller:
    async with serving(router.handle) as url, aclosing(RouterClient(url, "root")) as client:
        poller = Poller(client, 1.0, clock)
        for _ in range(times):
            await poller.poll()
        return poller


async def test_a_look_asks_for_everything_once() -> None:
    router = FakeRouter()
    poller = await looked(router, times=3)  # no time has passed between them
    assert router.asked == {"/replicas": 1, "/decisions": 1, "/prefixes": 1}
    assert [one.name for one in poller.replicas] == ["r0"] and poller.decisions[0].request_id == "x"
    assert poller.shared is not None and poller.shared.prompts == 3
    assert not poller.is_stale and poller.age_s() == 0


async def test_prefixes_are_asked_for_less_often() -> None:
    now_s, router = 0.0, FakeRouter()
    async with serving(router.handle) as url, aclosing(RouterClient(url, None)) as client:
        poller = Poller(client, 1.0, lambda: now_s)
        for at_s in (0.0, 1.0, 2.0, 3.0):
            now_s = at_s
            await poller.poll()
    assert router.asked == {"/replicas": 4, "/decisions": 4, "/prefixes": 2}


@pytest.mark.parametrize(("replicas", "limit"), [(1, 200), (200, 100), (1000, 20)])
async def test_fewer_decisions_are_asked_for_where_each_has_many_candidates(replicas: int, limit: int) -> None:
    router = FakeRouter(replicas)
    await looked(router)
    assert f"/decisions?{limit}" in router.targets


async def test_refusals_are_reported_and_the_rest_is_shown() -> None:
    refusal = (403, {"error": {"message": "not yours"}})
    poller = await looked(FakeRouter(decisions=refusal, prefixes=refusal))
    hint = "the router says: not yours; see --admin-key or WARMROUTE_ADMIN_KEY"
    assert poller.refused == {DECISIONS: hint, PREFIXES: hint}
    assert poller.replicas and not poller.is_stale


async def test_a_refusal_cannot_take_hold_of_the_terminal() -> None:
    router = FakeRouter()
    router.answers["/replicas"] = (403, {"error": {"message": "\x1b[2Jnot\nyours"}})
    async with serving(router.handle) as url, aclosing(RouterClient(url, None)) as client:
        with pytest.raises(click.ClickException) as refused:
            await Poller(client, 1.0).require()
    assert refused.value.message.startswith("the router says: \\x1b[2Jnot\\nyours; see --admin-key")


async def test_what_is_refused_is_not_asked_for_at_every_look() -> None:
    now_s = 0.0
    router = FakeRouter(decisions=(403, {"error": {"message": "not yours"}}))
    async with serving(router.handle) as url, aclosing(RouterClient(url, None)) as client:
        poller = Poller(client, 1.0, lambda: now_s)
        for at_s in range(15):
            now_s = float(at_s)
            await poller.poll()
            assert DECISIONS in poller.refused
    assert (router.asked["/replicas"], router.asked["/decisions"]) == (15, 2)


async def test_a_key_without_access_to_replicas_ends_the_polling() -> None:
    router = FakeRouter()
    router.answers["/replicas"] = (401, {"error": {"message": "no key"}})
    poller = await looked(router, times=5)
    assert poller.is_stale and "no key" in poller.refused[REPLICAS] and router.asked == {"/replicas": 1}


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("replicas", (200, b"<html>"), "no answer from a router: /replicas: JSON is malformed"),
        ("replicas", (200, {"replicas": [{"name": 5}]}), "no answer from a router: /replicas: Expected `str`"),
        ("prefixes", (200, b'{"prefixes":[' + b'{"below":[' * 100_000), "limit=200: maximum recursion depth exceeded"),
        ("replicas", (502, b""), "status 502 for /replicas"),
    ],
)
async def test_an_invalid_answer_counts_as_absence(path: str, answer: tuple[int, Any], why: str) -> None:
    router = FakeRouter()
    router.answers[f"/{path}"] = answer
    poller = await looked(router)
    assert poller.is_stale and why in (poller.silence or "")


async def test_the_last_figures_stay_while_the_router_is_silent() -> None:
    now_s = 0.0
    router = FakeRouter()

    async def seen(poller: Poller) -> tuple[bool, int, float | None]:
        await poller.poll()
        return poller.is_stale, len(poller.replicas), poller.age_s()

    async with serving(router.handle) as url:
        client = RouterClient(url, None)
        poller = Poller(client, 1.0, lambda: now_s)
        assert await seen(poller) == (False, 1, 0.0)
    now_s = 5.0
    assert await seen(poller) == (True, 1, 5.0)
    async with serving(router.handle, int(url.rpartition(":")[2])):
        now_s = 7.0
        assert await seen(poller) == (False, 1, 0.0)
    await client.aclose()


async def test_a_silent_server_is_away() -> None:
    async with aclosing(RouterClient(f"http://127.0.0.1:{refused_port()}", None)) as client:
        with pytest.raises(Unreachable):
            await client.ask("GET", "/replicas")


async def test_names_of_replicas_are_written_into_paths_as_they_are() -> None:
    asked: list[str] = []

    async def handle(request: Request, reply: Reply) -> None:
        asked.append(f"{request.method} {request.path}")
        await reply.whole(404, {"error": {"message": "there is no such replica"}})

    async with serving(handle) as url, aclosing(RouterClient(url, None)) as client:
        for undo in (False, True):
            with pytest.raises(Refused, match="there is no such replica"):
                await client.drain("a b/../c?", undo=undo)
    assert asked == ["POST /replicas/a%20b%2F..%2Fc%3F/drain", "POST /replicas/a%20b%2F..%2Fc%3F/undrain"]


async def test_a_heartbeat_has_an_age() -> None:
    with Publisher(config()) as publisher:
        async with served(ours(publisher), named("other")) as running:
            await exact(running, publisher)
            async with aclosing(RouterClient(f"http://127.0.0.1:{running.port}", None)) as client:
                poller = Poller(client, 1.0)
                await poller.poll()
    heard = {one.name: one.heard_age_s for one in poller.replicas}
    assert heard["ours"] is not None and 0 <= heard["ours"] < 10
    assert heard["other"] is None


async def test_a_real_router_is_understood_in_all_of_its_answers() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        async with connect(running.port) as connection:
            for _ in range(2):
                await connection.post(CHAT, chat("Why? " * 300))
        async with aclosing(RouterClient(f"http://127.0.0.1:{running.port}", None)) as client:
            poller = Poller(client, 1.0)
            await poller.poll()
        assert poller.unreachable is None and not poller.refused
        assert sum(one.served.requests for one in poller.replicas) == 2
        assert sum(one.served.prompt_tokens for one in poller.replicas) > 600
        assert {one.chosen for one in poller.decisions} == {"r0", "r1"} and poller.decisions[0].model == MODEL
        assert poller.shared is not None and poller.shared.prefixes[0].prompts == 2


# ---- how often


def test_what_is_answered_quickly_is_asked_at_every_interval() -> None:
    interval = PollInterval(1.0)
    assert interval.is_due(0.0)
    interval.answered(0.0, took_s=0.004)
    assert not interval.is_due(0.5)
    assert interval.is_due(0.95)  # a timer may be a little early


def test_what_costs_the_router_a_second_is_soon_asked_every_hundred() -> None:
    interval = PollInterval(1.0)
    for began_s, pause_s in ((0.0, 11.0), (11.0, 11.0), (22.0, 110.0), (132.0, 110.0)):
        interval.answered(began_s, took_s=1.1)
        assert not interval.is_due(began_s + pause_s - 1.0)
        assert interval.is_due(began_s + pause_s)


def test_one_answer_that_took_long_changes_little() -> None:
    interval = PollInterval(1.0)
    for began_s in range(9):
        interval.answered(float(began_s), took_s=2.0 if began_s == 8 else 0.004)
    assert interval.is_due(9.0)


def test_it_is_never_given_up() -> None:
    interval = PollInterval(1.0)
    for _ in range(5):
        interval.answered(0.0, took_s=10.0)
    assert interval.is_due(300.0)


def test_a_long_way_is_no_work_of_the_router() -> None:
    interval = PollInterval(1.0)
    interval.answered(0.0, took_s=0.3, round_trip_s=0.3)
    assert interval.is_due(1.0)


def test_it_can_be_asked_at_once() -> None:
    interval = PollInterval(60.0)
    interval.answered(0.0, took_s=0.0)
    interval.make_due()
    assert interval.is_due(0.1)
