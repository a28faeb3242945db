"""Metrics for Prometheus: the names in docs/metrics.md, and values that add up."""

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.http import metrics
from router.http.app import printed_by
from router.http.metrics import metrics_text
from router.members.members import ServedModel, approximate_prompts
from router.prompts.tokens import Tokens
from router.tenants.keys import keys_from_options
from tests.replica.http.test_metrics import families
from tests.router.loopback import until
from tests.router.scripted import CHAT, MODEL, Call, Client, Script, Scripted, chat, connect, drops, named, says, served

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(warmroute_router:\S+)` \| (\w+) \| (.+) \|$", re.MULTILINE)
GOOD = b'{"usage":{"prompt_tokens_details":{"cached_tokens":16}}}'

Samples = dict[tuple[str, str], float]


async def samples(client: Client) -> Samples:
    """Values of /metrics by name, without the prefix, and by label values."""
    text = (await client.get("/metrics")).body.decode()
    return {
        (sample.name.removeprefix("warmroute_router:"), " ".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_page_lists_exactly_what_is_exposed() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        answer = await client.get("/metrics", host="localhost")  # as an administrator
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        exposed = families(answer.body.decode())
        assert {name: (kind, meaning) for name, kind, meaning in ROW.findall(PAGE.read_text())} == exposed


async def test_a_router_without_replicas_exposes_the_same_names() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        some = families((await client.get("/metrics")).body.decode())
    async with served() as running, connect(running.port) as client:
        assert families((await client.get("/metrics")).body.decode()) == some


async def test_requests_are_counted_by_model_replica_and_status() -> None:
    script = Script(says(GOOD), says(GOOD), says(b"{}", 400), drops)
    async with served(*script.replicas(1), queue_size=0) as running, connect(running.port) as client:
        for _ in range(4):
            await client.post(CHAT, chat())
        found = await samples(client)
        assert found["requests_total", f"{MODEL} r0 200"] == 2
        assert found["requests_total", f"{MODEL} r0 400"] == 1
        assert found["requests_total", f"{MODEL} r0 503"] == 1
        assert found["faults_total", "r0"] == 1
        assert found["request_seconds_count", f"{MODEL} r0"] == 4
        assert found["time_to_first_token_seconds_count", f"{MODEL} r0"] == 2
        assert found["prompt_tokens_total", f"{MODEL} r0"] > 0
        assert found["decision_seconds_count", ""] >= 4
        assert found["open_requests", ""] == found["replica_in_flight", "r0"] == 0
        assert found["replica_up", "r0"] == 1


async def test_what_goes_wrong_is_counted_once() -> None:
    script = Script(drops, says(GOOD))
    keys = tuple(keys_from_options(["key"], None))
    async with served(*script.replicas(2), keys=keys, demand_key=True) as running, connect(running.port) as client:
        await client.post(CHAT, chat(), authorization="Bearer key")
        assert (await client.get("/version")).status == 401
        await client.post(CHAT, b"{", authorization="Bearer key")
        async with connect(running.port) as other:
            assert (await other.post(CHAT, chat())).status == 401
        found = await samples(client)
        assert found["retries_total", ""] == 1 and found["resumes_total", ""] == 0
        assert found["refused_total", "invalid_api_key"] == 2
        assert sum(value for (name, _), value in found.items() if name == "refused_total") == 3
        assert sum(value for (name, _), value in found.items() if name == "faults_total") == 1


async def test_what_runs_waits_and_leaves_is_seen() -> None:
    taken: list[Call] = []
    async with (
        served(Scripted("r0", taken.append), replica_limit=1) as running,
        connect(running.port) as client,
        connect(running.port) as first,
        connect(running.port) as second,
    ):
        first.send("POST", CHAT, chat())
        await until(lambda: taken, "the replica is asked")
        second.send("POST", CHAT, chat())
        await until(lambda: len(running.router.waiting) == 1, "one request waits")
        found = await samples(client)
        assert (found["open_requests", ""], found["queue_length", ""], found["replica_in_flight", "r0"]) == (2, 1, 1)
        second.leave()
        await until(lambda: not running.router.waiting, "it has left")
        taken[0].answer(GOOD)
        await first.answer()
        await asyncio.sleep(0)
        found = await samples(client)
        assert (found["open_requests", ""], found["queue_length", ""], found["replica_in_flight", "r0"]) == (0, 0, 0)
        assert found["client_disconnects_total", ""] == 1


async def test_a_replica_that_is_down_is_seen_to_be() -> None:
    async with served(named("a")) as running, connect(running.port) as client:
        running.member("a").health.drain()
        assert (await samples(client))["replica_up", "a"] == 0


async def test_names_of_models_and_replicas_cannot_break_the_text() -> None:
    odd = 'a"b\\c{d}'
    async with served(Scripted("r0", says(GOOD), models=[odd])) as running, connect(running.port) as client:
        await client.post(CHAT, chat() | {"model": odd})
        assert (await samples(client))["requests_total", f"{odd} r0 200"] == 1


async def test_two_routers_share_nothing() -> None:
    async with (
        served(named("a")) as one,
        served(named("a")) as other,
        connect(one.port) as client,
        connect(other.port) as second,
    ):
        await client.post(CHAT, chat())
        assert (await samples(client))["requests_total", f"{MODEL} a 200"] == 1
        assert ("requests_total", f"{MODEL} a 200") not in await samples(second)


async def test_others_have_their_turn_while_it_is_written_and_may_take_replicas_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "SLICE_S", -1.0)  # a turn after every part
    async with served(*Script(says(GOOD)).replicas(3)) as running:
        writing = asyncio.create_task(metrics_text(printed_by(running.router)))
        turns = 0
        while not writing.done():
            await asyncio.sleep(0)
            turns += 1
            if turns == 20:
                left = {each.name: each.server.spec for each in running.router.members if each.name != "r1"}
                running.front.upkeep.apply(left)
        assert turns > 50
        found = families((await writing).decode())
        assert found == families((await metrics_text(printed_by(running.router))).decode())


async def test_names_of_any_kind_are_labels() -> None:
    odd = 'a "quoted" \\ model\nof two lines'
    async with served(named("a")) as running:
        running.router.history.counts.refused[odd] = 7
        text = (await metrics_text(printed_by(running.router))).decode()
        [refused] = [one for one in text_string_to_metric_families(text) if one.name == "warmroute_router:refused"]
        assert [(sample.labels, sample.value) for sample in refused.samples] == [({"code": odd}, 7.0)]


def test_prompts_matched_by_bytes_are_counted_once_for_a_model_and_its_adapters() -> None:
    tokens = Tokens("m")
    tokens.approximated["model"] = 3
    other = ServedModel("n", None, Tokens("n"))
    models = [ServedModel("m", None, tokens), ServedModel("a1", "a1", tokens), other]
    assert approximate_prompts(models) == {("m", "model"): 3}
