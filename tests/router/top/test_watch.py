"""What is asked of a router, what is kept of its answers, and what is said where there are none."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import click
import pytest

from events.publisher import Publisher
from router.metrics import metrics_text
from router.top.answers import totals_of
from router.top.asking import Asking, Away, Refused
from router.top.must import must_look
from router.top.watch import DECISIONS, PREFIXES, REPLICAS, Watch
from tests.router.loopback import Reply, Request, serving
from tests.router.scripted import CHAT, MODEL, Script, chat, connect, named, refused_port, says, served
from tests.router.test_feeds import config
from tests.router.test_status import exact, ours

GOOD = b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'


class FakeRouter:
    def __init__(self, names: int = 1, **answers: tuple[int, Any]) -> None:
        self.asked: Counter[str] = Counter()
        self.targets: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "/replicas": (200, {"replicas": [{"name": f"r{number}", "newer": 1} for number in range(names)]}),
            "/decisions": (200, {"decisions": [{"ts": 1.0, "request_id": "x", "newer": 1}]}),
            "/prefixes": (200, {"prompts": 3, "span_s": 1.0, "texts": True, "prefixes": [], "newer": 1}),
            "/metrics": (200, b"warmroute_router:open_requests 7.0\n"),
        } | {f"/{name}": answer for name, answer in answers.items()}

    async def handle(self, request: Request, reply: Reply) -> None:
        self.asked[request.path] += 1
        self.targets.append(f"{request.path}?{request.query.get('limit', '')}")
        await reply.whole(*self.answers[request.path])


async def looked(router: FakeRouter, times: int = 1, clock: Callable[[], float] = lambda: 0.0) -> Watch:
    async with serving(router.handle) as url, Asking(url, "root") as asking:
        watch = Watch(asking, 1.0, clock)
        for _ in range(times):
            await watch.look()
        return watch


async def test_a_look_asks_for_everything_once() -> None:
    router = FakeRouter()
    watch = await looked(router, times=3)  # no time has passed between them
    assert router.asked == {"/replicas": 1, "/decisions": 1, "/prefixes": 1, "/metrics": 1}
    assert [one.name for one in watch.replicas] == ["r0"] and watch.decisions[0].request_id == "x"
    assert watch.shared is not None and watch.shared.prompts == 3
    assert watch.totals is not None and watch.totals.open_requests == 7
    assert not watch.is_old and watch.age_s() == 0


async def test_prefixes_are_asked_for_less_often() -> None:
    now_s, router = 0.0, FakeRouter()
    async with serving(router.handle) as url, Asking(url, None) as asking:
        watch = Watch(asking, 1.0, lambda: now_s)
        for at_s in (0.0, 1.0, 2.0, 3.0):
            now_s = at_s
            await watch.look()
    assert router.asked == {"/replicas": 4, "/decisions": 4, "/metrics": 4, "/prefixes": 2}


@pytest.mark.parametrize(("replicas", "limit"), [(1, 200), (200, 100), (1000, 20)])
async def test_fewer_decisions_are_asked_for_where_each_has_many_candidates(replicas: int, limit: int) -> None:
    router = FakeRouter(replicas)
    await looked(router)
    assert f"/decisions?{limit}" in router.targets


async def test_what_is_refused_is_said_and_the_rest_is_shown() -> None:
    refusal = (403, {"error": {"message": "not yours"}})
    watch = await looked(FakeRouter(decisions=refusal, prefixes=refusal))
    hint = "the router says: not yours; see --admin-key or WARMROUTE_ADMIN_KEY"
    assert watch.refused == {DECISIONS: hint, PREFIXES: hint}
    assert watch.replicas and watch.totals and not watch.is_old


async def test_a_refusal_cannot_take_hold_of_the_terminal() -> None:
    router = FakeRouter()
    router.answers["/replicas"] = (403, {"error": {"message": "\x1b[2Jnot\nyours"}})
    async with serving(router.handle) as url, Asking(url, None) as asking:
        with pytest.raises(click.ClickException) as refused:
            await must_look(Watch(asking, 1.0))
    assert refused.value.message.startswith("the router says: \\x1b[2Jnot\\nyours; see --admin-key")


async def test_what_is_refused_is_not_asked_for_at_every_look() -> None:
    now_s = 0.0
    router = FakeRouter(decisions=(403, {"error": {"message": "not yours"}}))
    async with serving(router.handle) as url, Asking(url, None) as asking:
        watch = Watch(asking, 1.0, lambda: now_s)
        for at_s in range(15):
            now_s = float(at_s)
            await watch.look()
            assert DECISIONS in watch.refused
    assert (router.asked["/replicas"], router.asked["/decisions"]) == (15, 2)


async def test_who_may_not_see_the_replicas_is_asked_nothing_more() -> None:
    router = FakeRouter()
    router.answers["/replicas"] = (401, {"error": {"message": "no key"}})
    watch = await looked(router, times=5)
    assert watch.is_old and "no key" in watch.refused[REPLICAS] and router.asked == {"/replicas": 1}


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("replicas", (200, b"<html>"), "what answers is no router: /replicas: JSON is malformed"),
        ("replicas", (200, {"replicas": [{"name": 5}]}), "what answers is no router: /replicas: Expected `str`"),
        ("metrics", (200, b"vllm:num_requests_running 5\n"), "has no warmroute_router:open_requests"),
        ("metrics", (200, b"warmroute_router:open_requests many\n"), "/metrics: could not convert string to float"),
        ("prefixes", (200, b'{"prefixes":[' + b'{"below":[' * 100_000), "limit=200: maximum recursion depth exceeded"),
        ("replicas", (502, b""), "status 502 for /replicas"),
    ],
)
async def test_an_answer_that_is_none_counts_as_absence(path: str, answer: tuple[int, Any], why: str) -> None:
    router = FakeRouter()
    router.answers[f"/{path}"] = answer
    watch = await looked(router)
    assert watch.is_old and why in (watch.absence or "")


async def test_what_was_known_stays_while_nobody_answers() -> None:
    now_s = 0.0
    router = FakeRouter()

    async def seen(watch: Watch) -> tuple[bool, int, float | None]:
        await watch.look()
        return watch.is_old, len(watch.replicas), watch.age_s()

    async with serving(router.handle) as url:
        asking = Asking(url, None)
        watch = Watch(asking, 1.0, lambda: now_s)
        assert await seen(watch) == (False, 1, 0.0)
    now_s = 5.0
    assert await seen(watch) == (True, 1, 5.0)
    async with serving(router.handle, int(url.rpartition(":")[2])):
        now_s = 7.0
        assert await seen(watch) == (False, 1, 0.0)
    await asking.close()


async def test_who_does_not_answer_is_away() -> None:
    async with Asking(f"http://127.0.0.1:{refused_port()}", None) as asking:
        with pytest.raises(Away):
            await asking.text("/metrics")


async def test_names_of_replicas_are_written_into_paths_as_they_are() -> None:
    asked: list[str] = []

    async def handle(request: Request, reply: Reply) -> None:
        asked.append(f"{request.method} {request.path}")
        await reply.whole(404, {"error": {"message": "there is no such replica"}})

    async with serving(handle) as url, Asking(url, None) as asking:
        for undo in (False, True):
            with pytest.raises(Refused, match="there is no such replica"):
                await asking.drain("a b/../c?", undo=undo)
    assert asked == ["POST /replicas/a%20b%2F..%2Fc%3F/drain", "POST /replicas/a%20b%2F..%2Fc%3F/undrain"]


async def test_totals_are_sums_of_what_a_real_router_counts() -> None:
    script = Script(says(GOOD), says(GOOD), says(b"{}", 400))
    async with served(*script.replicas(2)) as running, connect(running.port) as client:
        for _ in range(4):
            await client.post(CHAT, chat())
        await client.post(CHAT, {"model": "unknown", "messages": []})
        found = totals_of((await metrics_text(running.router)).decode())
        assert found is not None
        assert found.retries_total == 0
        assert [count for count, _ in found.first_tokens.values()] == [1, 1]  # of each replica
        assert found.approximate_prompts_total == 4 and found.index_bytes > 0
        assert 0 < sum(seconds for _, seconds in found.first_tokens.values()) < 10
    assert totals_of("vllm:num_requests_running 5\n") is None


async def test_a_heartbeat_has_an_age() -> None:
    with Publisher(config()) as publisher:
        async with served(ours(publisher), named("other")) as running:
            await exact(running, publisher)
            async with Asking(f"http://127.0.0.1:{running.port}", None) as asking:
                watch = Watch(asking, 1.0)
                await watch.look()
    heard = {one.name: one.heard_age_s for one in watch.replicas}
    assert heard["ours"] is not None and 0 <= heard["ours"] < 10
    assert heard["other"] is None


async def test_a_real_router_is_understood_in_all_of_its_answers() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running, connect(running.port) as client:
        for _ in range(2):
            await client.post(CHAT, chat("Why? " * 300))
        async with Asking(f"http://127.0.0.1:{running.port}", None) as asking:
            watch = Watch(asking, 1.0)
            await watch.look()
        assert watch.away is None and not watch.refused
        assert sum(one.served.requests for one in watch.replicas) == 2
        assert sum(one.served.prompt_tokens for one in watch.replicas) > 600
        assert {one.chosen for one in watch.decisions} == {"r0", "r1"} and watch.decisions[0].model == MODEL
        assert watch.shared is not None and watch.shared.prefixes[0].prompts == 2
