"""The router's checks of its replicas: their kind, their models and their health."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines import NATIVE, PROFILES
from events.native import Load, Status
from router.members.spec import BadSpec, ReplicaSpec
from router.monitor import suspects, upkeep
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    DONE,
    DRAINING,
    MODEL,
    Call,
    Client,
    Script,
    Scripted,
    Served,
    chat,
    connect,
    event,
    named,
    says,
    served,
    silent,
)

pytestmark = pytest.mark.virtual

GOOD = b'{"choices":[]}'
OFTEN: dict[str, Any] = {"health_interval_s": 0.05}


def status(incarnation: int = 1, **load: Any) -> Status:
    return Status(incarnation, -1, 0.0, 0, 0, Load(**load))


# ---- what it is


async def test_an_engine_is_asked_what_it_is_and_what_it_serves() -> None:
    listed = [{"id": "m", "owned_by": "vllm", "max_model_len": 512}, {"id": "lora", "parent": "m", "owned_by": "vllm"}]
    engine = Scripted("engine", says(GOOD), models=listed)
    async with engine.running():
        spec = ReplicaSpec(name="engine", url=f"http://127.0.0.1:{engine.port}")
        async with served(engine, replicas=(spec,)) as running, connect(running.port) as client:
            member = running.member("engine")
            assert (member.spec.engine, member.profile, member.candidate.max_model_len) == (
                "vllm",
                PROFILES["vllm"],
                512,
            )
            assert set(running.router.members.models) == {"m", "lora"}
            assert (await client.post(CHAT, chat() | {"model": "lora"})).status == 200
        assert engine.asked[:3] == ["/load", "/v1/models", "/health"]


async def test_a_replica_of_ours_is_known_by_its_load() -> None:
    ours = Scripted("ours", says(GOOD), native=True)
    async with ours.running():
        spec = ReplicaSpec(name="ours", url=f"http://127.0.0.1:{ours.port}")
        async with served(ours, replicas=(spec,)) as running:
            member = running.member("ours")
            assert (member.spec.engine, member.profile, member.spec.block_size) == ("warmroute", NATIVE, 16)
            assert ours.asked[:2] == ["/load", "/ready"]


@pytest.mark.parametrize(
    ("path", "answer", "why"),
    [
        ("/v1/models", (500, {}), "answers /v1/models with status 500"),
        ("/v1/models", (200, {"data": []}), "/v1/models names no model"),
        ("/v1/models", (200, b"<html>"), "does not answer as OpenAI's does"),
        ("/v1/models", (200, bytes(5_000_000)), "its answer is longer than 4,194,304 bytes"),
        ("/health", (500, {}), "health check with status 500"),
    ],
)
async def test_a_replica_that_does_not_answer_as_one_takes_no_requests_until_it_does(
    path: str, answer: tuple[int, object], why: str
) -> None:
    odd = named("odd")
    good = odd.control[path]
    odd.control[path] = answer
    async with served(odd, ready=False, **OFTEN) as running, connect(running.port) as client:
        await until(lambda: why in (running.member("odd").candidate.unavailable or ""), "the fault is found")
        odd.control[path] = good
        await until(lambda: running.member("odd").candidate.unavailable is None, "the replica is available")
        assert (await client.post(CHAT, chat())).json == "odd"


async def test_its_key_is_sent_with_what_the_router_itself_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLICA_KEY", "its-own")
    seen: list[str | None] = []

    class Asked(Scripted):
        async def _serve(self, call: Call) -> None:
            seen.append(call.header("authorization"))
            await super()._serve(call)

    guarded = Asked("guarded", says(GOOD))
    async with guarded.running():
        url = f"http://127.0.0.1:{guarded.port}"
        spec = ReplicaSpec(name="guarded", url=url, engine="openai", api_key_env="REPLICA_KEY")
        async with served(guarded, replicas=(spec,)) as running, connect(running.port) as client:
            await client.post(CHAT, chat())
    assert len(seen) >= 3 and set(seen) == {"Bearer its-own"}


# ---- which there are


async def test_a_replica_whose_key_is_missing_is_left_out_and_the_others_are_not(tmp_path: Path) -> None:
    good, more = named("good"), named("more")
    file = tmp_path / "replicas.toml"
    async with good.running(), more.running():
        bad = "[[replicas]]\nurl = 'http://127.0.0.1:1'\nname = 'bad'\napi_key_env = 'NOT_SET_ANYWHERE'\n"
        of = "[[replicas]]\nurl = 'http://127.0.0.1:{}'\nname = '{}'\nengine = 'openai'\n".format
        file.write_text(bad + of(good.port, "good"))
        async with served(ready=False, replicas_file=str(file)) as running, connect(running.port) as client:
            await until(lambda: "good" in running.router.members.by_name, "the good one is there")
            await until(lambda: running.member("good").candidate.unavailable is None, "the replica takes requests")
            assert set(running.router.members.by_name) == {"good"}
            file.write_text(bad + of(good.port, "good") + of(more.port, "more"))
            await until(lambda: "more" in running.router.members.by_name, "the file still counts")
            running.front.check()
            assert (await client.post(CHAT, chat())).status == 200


async def test_a_replica_that_cannot_be_added_leaves_nothing_behind() -> None:
    async with served(named("a")) as running:
        spec = ReplicaSpec(name="b", url="http://127.0.0.1:1", api_key_env="NOT_SET_ANYWHERE")
        with pytest.raises(BadSpec, match="NOT_SET_ANYWHERE"):
            running.front.upkeep.add(spec)
        with pytest.raises(BadSpec, match="'a' is there already"):
            running.front.upkeep.add(ReplicaSpec(name="a", url="http://127.0.0.1:1"))
        assert not running.front.upkeep.added
        with pytest.raises(BadSpec, match="discovery"):
            running.front.upkeep.remove("a")
        running.front.upkeep.add(ReplicaSpec(name="b", url="http://127.0.0.1:1"))
        running.front.upkeep.remove("b")


@asynccontextmanager
async def removed(leaving: Scripted, taken: list[Call], **config: Any) -> AsyncIterator[Client]:
    """A client whose request was taken by a replica that is removed then; in the end nothing is connected to it."""
    async with leaving.running():
        async with served(**config) as running, connect(running.port) as client:
            running.front.upkeep.add(leaving.spec)
            await until(lambda: MODEL in running.router.members.models, "the model is known")
            await until(lambda: running.member("leaving").candidate.unavailable is None, "the replica takes requests")
            client.send("POST", CHAT, chat())
            await until(lambda: taken, "the replica is asked")
            running.front.upkeep.remove("leaving")
            assert not running.router.members.by_name
            await asyncio.sleep(0)  # the router waits for what the replica is answering
            yield client
        await until(lambda: not leaving.connections, "its connections are closed")


async def test_what_a_removed_replica_is_answering_comes_to_its_end() -> None:
    taken: list[Call] = []
    async with removed(Scripted("leaving", taken.append), taken) as client:
        taken[0].answer(GOOD)
        assert (await client.answer()).body == GOOD


async def test_what_a_removed_replica_does_not_answer_in_time_is_broken_off() -> None:
    taken: list[Call] = []
    leaving = Scripted("leaving", taken.append)
    async with removed(leaving, taken, drain_timeout_s=0.05, queue_timeout_s=0.1) as client:
        assert (await client.answer()).status in (404, 503)


async def test_a_removed_replica_that_freezes_is_left_at_once() -> None:
    taken: list[Call] = []
    leaving = HangsUp("leaving", taken.append, native=True)
    async with removed(leaving, taken, queue_timeout_s=0.1) as client:
        leaving.ill = True
        assert (await client.answer()).status in (404, 503)  # long before the 60 s of its drain


async def test_a_stream_whose_connection_died_as_its_replica_was_removed_continues_elsewhere() -> None:
    def begins(call: Call) -> None:
        call.begin_frames()
        call.frame(event("one "), 5)

    def ends(call: Call) -> None:
        call.begin_frames()
        call.frame(DONE)
        call.end()

    leaving, other = Scripted("leaving", begins, native=True), Scripted("other", ends, native=True)
    async with leaving.running(), other.running(), served(leaving) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        await client.head()
        assert await client.chunk() == event("one ")
        upkeep, began_s = running.front.upkeep, running.router.now_s()
        upkeep.suspects.suspect(running.member("leaving").server, "all are silent", began_s)
        upkeep.apply({"other": other.spec})
        assert DONE in b"".join([part async for part in client.chunks()])
        assert running.router.now_s() - began_s < 10  # its drain has 60 s


async def test_a_removed_replica_that_is_only_slow_may_continue() -> None:
    taken: list[Call] = []
    leaving = Scripted("leaving", taken.append, native=True)
    async with removed(leaving, taken) as client:
        asked = leaving.asked.count("/ready")
        await until(lambda: leaving.asked.count("/ready") > asked, "it is asked whether it lives")
        taken[0].begin_frames("application/json")
        taken[0].frame(GOOD, 100)
        taken[0].end()
        assert (await client.answer()).status == 200


async def test_a_replica_that_was_added_makes_way_for_one_that_discovery_names() -> None:
    listed, added = named("same"), named("same")
    async with listed.running(), added.running(), served() as running, connect(running.port) as client:
        upkeep = running.front.upkeep
        taken = {"name": "same", "url": added.spec.url}
        assert (await client.post("/replicas", taken, host="localhost")).status == 201
        upkeep.apply({"same": listed.spec})
        assert running.member("same").spec.url == listed.spec.url
        assert (await client.ask("DELETE", "/replicas/same", host="localhost")).status == 409
        upkeep.apply({})
        assert not running.router.members.by_name


async def test_a_replica_that_drains_by_word_of_discovery_stays_the_same() -> None:
    one = named("one")
    async with one.running(), served() as running:
        upkeep = running.front.upkeep
        upkeep.apply({"one": one.spec})
        member = running.member("one")
        upkeep.apply({"one": msgspec.structs.replace(one.spec, draining=True)})
        assert member.candidate.unavailable == "draining"
        upkeep.apply({"one": one.spec})
        assert member.candidate.unavailable != "draining"
        assert running.member("one") is member
        upkeep.apply({"one": msgspec.structs.replace(one.spec, draining=True, incarnation=2)})
        assert running.member("one") is not member


async def test_the_default_key_is_not_sent_where_a_request_says() -> None:
    seen: list[tuple[str, str | None]] = []

    class Asked(Scripted):
        async def _serve(self, call: Call) -> None:
            seen.append((self.name, call.header("authorization")))
            await super()._serve(call)

    listed, added = (Asked(name, says(GOOD)) for name in ("listed", "added"))
    async with added.running(), served(listed, replica_api_key="SECRET") as running:
        running.front.upkeep.add(added.spec)
        async with connect(running.port) as client:
            await until(lambda: running.member("added").candidate.unavailable is None, "it is used")
            for _ in range(3):
                await client.post(CHAT, chat())
    assert set(seen) == {("listed", "Bearer SECRET"), ("added", None)}


async def test_one_replica_that_cannot_be_added_or_removed_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good, more = named("good"), named("more")
    async with good.running(), more.running(), served() as running:
        upkeep, placement = running.front.upkeep, running.router.placement
        bad = ReplicaSpec(name="bad", url="http://127.0.0.1:1", engine="openai")
        broken = msgspec.structs.replace(bad, name="broken")
        remove = placement.remove

        def stumble(load: Any) -> None:
            if load.candidate.name == "bad":
                raise RuntimeError("leaving went wrong")
            remove(load)

        monkeypatch.setattr(placement, "remove", stumble)
        upkeep.apply({spec.name: spec for spec in (bad, broken, good.spec)})
        await until(lambda: MODEL in running.router.members.models, "the good one is known")
        upkeep.apply({"more": more.spec})
        assert set(running.router.members.by_name) == {"more"} and not running.router.members.models
        assert "leaving went wrong" in caplog.text
        await until(lambda: running.member("more").candidate.unavailable is None, "the new one is used")
        running.front.check()


# ---- whether it is well


class HangsUp(Scripted):
    """Stops answering once it is ill: it ends connections, or hangs and keeps them."""

    ill = False

    def __init__(self, *arguments: Any, hangs: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.hangs = hangs

    async def _serve(self, call: Call) -> None:
        if self.ill and self.hangs:
            await self._until_left(call.connection)
        elif self.ill:
            call.drop()
        else:
            await super()._serve(call)


@pytest.mark.parametrize("alone", [False, True], ids=["beside another one", "alone"])
async def test_another_engine_that_does_not_answer_at_all_is_left_where_there_is_a_better_one(
    alone: bool,
) -> None:
    taken: list[Call] = []
    frozen = HangsUp("frozen", taken.append, hangs=True)
    others = [] if alone else [named("other")]
    async with served(frozen, *others, policy="least-loaded", **OFTEN) as running, connect(running.port) as client:
        for other in others:
            running.member(other.name).health.drain()
        client.send("POST", CHAT, chat())
        await until(lambda: taken, "the replica is asked")
        for other in others:
            running.member(other.name).health.undrain()
        frozen.ill = True
        await until(lambda: running.member("frozen").server.suspicion, "the replica is suspect")
        assert running.member("frozen").server.faults >= upkeep.UNANSWERED
        if alone:
            frozen.ill = False
            taken[0].answer(b'"frozen"')
        assert (await client.answer()).json == ("frozen" if alone else "other")


async def test_another_engine_with_a_bad_health_may_end_what_it_does() -> None:
    taken: list[Call] = []
    ill = Scripted("ill", taken.append)
    async with served(ill, **OFTEN) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat())
        await until(lambda: taken, "the replica is asked")
        ill.control["/health"] = (500, {})
        await until(lambda: running.member("ill").server.faults > upkeep.UNANSWERED, "the fault is found")
        taken[0].answer(GOOD)
        assert (await client.answer()).body == GOOD


async def test_a_check_that_goes_wrong_here_is_a_failed_one_and_the_next_one_comes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def mistaken(*_: object) -> None:
        raise ZeroDivisionError

    odd = named("odd")
    monkeypatch.setattr("router.monitor.learning.foreign_facts", mistaken)
    async with served(odd, ready=False, **OFTEN) as running, connect(running.port) as client:
        await until(lambda: running.member("odd").server.faults > 2, "it is asked again and again")
        assert "ZeroDivisionError" in (running.member("odd").candidate.unavailable or "")
        assert caplog.text.count("Traceback") == 1
        monkeypatch.undo()
        await until(lambda: running.member("odd").candidate.unavailable is None, "the replica is available")
        assert (await client.post(CHAT, chat())).json == "odd"


async def test_a_stream_that_cannot_be_followed_is_tried_again() -> None:
    odd = named("odd")
    async with odd.running():
        spec = msgspec.structs.replace(odd.spec, events="tcp://not a host:1")
        async with served(odd, ready=False, replicas=(spec,), **OFTEN) as running:
            await until(lambda: running.member("odd").server.faults >= 3, "it fails again and again")
            assert running.member("odd").candidate.unavailable
            assert running.member("odd").source is running.member("odd").feed is None


async def test_time_passes_for_the_others_when_one_goes_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(named("a"), named("b")) as running:
        ticks: list[float] = []

        def stumble(_: float) -> None:
            raise RuntimeError("ticking went wrong")

        monkeypatch.setattr(running.member("a").load, "tick", stumble)
        monkeypatch.setattr(running.member("b").load, "tick", ticks.append)
        await until(lambda: len(ticks) > 3, "time passes")
        running.front.check()
        # It is told once, and again after a health check that found nothing, which may come in between.
        assert 1 <= caplog.text.count("Traceback") <= 2


# ---- whether it drains


async def test_a_replica_that_drains_rests_until_it_is_ready_again() -> None:
    one, other = named("one"), named("other")
    async with served(one, other, **OFTEN) as running, connect(running.port) as client:
        one.control["/health"] = (503, json.loads(DRAINING))
        await until(lambda: running.member("one").candidate.unavailable == "it drains", "the replica drains")
        assert {(await client.post(CHAT, chat())).json for _ in range(3)} == {"other"}
        assert running.member("one").server.faults == 0
        one.control["/health"] = (200, {})
        await until(lambda: running.member("one").candidate.unavailable is None, "it is ready again")
        assert {(await client.post(CHAT, chat())).json for _ in range(4)} == {"one", "other"}


@pytest.mark.parametrize("drains", [False, True], ids=["at work", "draining"])
async def test_a_frozen_replica_is_left_and_what_it_was_answering_continues_elsewhere(drains: bool) -> None:
    async def freezes(call: Call) -> None:
        call.begin_frames()
        call.frame(event("one "), 100)
        await call.left()

    def goes_on(call: Call) -> None:
        call.begin_frames()
        call.frame(event("two "), 101)
        call.frame(DONE)
        call.end()

    script = Script(freezes, goes_on)
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        _, headers = await client.head()
        frozen = headers["x-warmroute-replica"]
        running.front.upkeep.heard(frozen, status())  # and never again
        if drains:
            running.member(frozen).health.drain()
        body = b"".join([part async for part in client.chunks()])
        assert body == event("one ") + event("two ") + DONE
        assert "silent" in (running.member(frozen).candidate.unavailable or "") or drains
        assert running.router.history.counts.resumes == 1


async def begins(call: Call) -> None:
    call.begin_frames()
    call.frame(event("one "), 100)


async def stream_through_silence(running: Served, script: Script) -> bytes:
    """A stream on one of two replicas, both of which are heard once and then never again; the other end of it."""
    async with connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        await client.head()
        for name in running.replicas:
            running.front.upkeep.heard(name, status())
        members = running.router.members
        await until(
            lambda: all(one.server.suspicion or not one.candidate.in_flight for one in members),
            "the replica is suspect",
        )
        await asyncio.sleep(0.5)  # the clock looks a few times
        script.calls[0].frame(event("two "), 101)
        script.calls[0].frame(DONE)
        script.calls[0].end()
        return b"".join([part async for part in client.chunks()])


async def test_where_all_are_silent_a_stream_waits_for_its_replica() -> None:
    script = Script(begins)
    async with served(*script.replicas(2, native=True)) as running:
        assert await stream_through_silence(running, script) == event("one ") + event("two ") + DONE
        assert len(script.calls) == 1 and running.router.history.counts.resumes == 0


async def test_without_a_look_at_the_siblings_it_would_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    monkeypatch.setattr(suspects, "LIVELY_S", math.inf)
    monkeypatch.setattr(suspects, "GIVEN_UP_S", 0.3)  # before the other one counts as silent
    script = Script(begins, silent)
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        _, headers = await client.head()
        running.front.upkeep.heard(headers["x-warmroute-replica"], status())
        await until(lambda: len(script.calls) == 2, "it left")
        client.leave()


async def test_a_stream_that_continues_stays_though_heartbeats_are_lost() -> None:
    async def speaks(call: Call) -> None:
        call.begin_frames()
        for n in range(30):
            call.frame(event(str(n)), n)
            await asyncio.sleep(0.1)
        call.frame(DONE)
        call.end()

    script = Script(speaks)
    async with served(*script.replicas(2, native=True)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat(stream=True))
        _, headers = await client.head()
        running.front.upkeep.heard(headers["x-warmroute-replica"], status())
        body = b"".join([part async for part in client.chunks()])
        assert body.endswith(DONE) and len(script.calls) == 1


async def test_another_incarnation_is_another_process() -> None:
    async with served(*Script(says(GOOD)).replicas(1, native=True)) as running:
        member = running.member("r0")
        running.front.upkeep.heard("r0", status(1, running=3))
        assert member.candidate.running == 3 and member.server.learned
        running.front.upkeep.heard("r0", status(2))
        assert member.candidate.running == 0 and not member.server.learned
        running.front.upkeep.heard("nobody", status(2))


@pytest.mark.parametrize("is_planned", [True, False])
async def test_only_an_end_that_was_not_planned_is_warned_of(
    is_planned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replica = named("r0")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(replica.running())
        async with served(replica, **OFTEN) as running:
            member = running.member("r0")
            if is_planned:
                member.health.drain()
            await stack.aclose()
            await until(lambda: "no connection" in member.server.trouble, "its end is noticed")
    told = [one for one in caplog.records if "no connection" in one.message and one.levelno >= logging.WARNING]
    assert bool(told) is not is_planned
