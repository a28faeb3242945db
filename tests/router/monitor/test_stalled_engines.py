"""Engines that compute nothing though their servers answer health checks: asleep, paused, or stopped."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle

import msgspec
import pytest

from router.members.spec import ReplicaSpec
from router.monitor.suspects import STALLED_S
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    Call,
    Client,
    Scripted,
    Served,
    chat,
    connect,
    served,
)

pytestmark = pytest.mark.virtual

ASKED = "/v1/completions"  # for a token, by the router itself


class Engine(Scripted):
    """A vLLM whose engine stops where the test says so; its server goes on."""

    def __init__(self, name: str) -> None:
        super().__init__(name, self._take, models=[{"id": "m"}])
        self.works = True
        self.control |= {"/kv_event_sources": (404, {}), "/is_sleeping": (404, {})}
        self.tell(0)

    @property
    def spec(self) -> ReplicaSpec:
        return msgspec.structs.replace(super().spec, engine="vllm", events="off")

    def tell(self, steps: int, *, awake: bool = True) -> None:
        lines = f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {float(awake)}\nhttp_requests_total 1.0\n'
        self.control["/metrics"] = (200, f'{lines}vllm:prompt_tokens_total{{engine="0"}} {steps}.0\n'.encode())

    async def _take(self, call: Call) -> None:
        if self.works:
            call.answer(json.dumps(self.name).encode())
        else:
            if call.json.get("stream"):
                call.begin()  # as vLLM does before its engine has seen the request
            await call.left()

    def stop(self) -> None:
        self.works, self.control[ASKED] = False, (503, {})

    def go_on(self) -> None:
        self.works, self.control[ASKED] = True, (200, {})


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[tuple[list[Engine], Served]]:
    made = [Engine(f"e{number}") for number in range(count)]
    async with served(*made, health_interval_s=0.2) as running:
        steps = cycle((1, 0))  # the router may look for the first time after the first step

        def have_moved() -> bool:
            step = next(steps)
            for number, engine in enumerate(made):
                engine.tell(number + step)
            return all(one.server.tells_steps for one in running.router.members)

        await until(have_moved, "their metrics have moved")
        for number, engine in enumerate(made):
            engine.tell(number + 1)
        yield made, running


async def asked_of(engine: Engine, running: Served, client: Client, path: str, asked: object) -> None:
    """Send a request that goes to this engine, though others may take over later."""
    others = [member for member in running.router.members if member.name != engine.name]
    for member in others:
        member.health.drain()
    client.send("POST", path, asked)
    await until(lambda: engine.calls, "it is asked")
    for member in others:
        member.health.undrain()


async def settled(running: Served, name: str, *, takes: bool) -> str:
    candidate = running.member(name).candidate
    await until(lambda: (candidate.unavailable is None) is takes, f"it takes requests: {takes}")
    return candidate.unavailable or ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_requests_leave_an_engine_that_has_stopped(stream: bool) -> None:
    async with engines(2) as ([one, _], running), connect(running.port) as client:
        one.stop()
        asked = chat(stream=stream)
        await asked_of(one, running, client, CHAT, asked)
        assert (await client.answer()).body == b'"e1"'
        why = await settled(running, "e0", takes=False)
        assert why.startswith("its engine computes nothing: ") and "with 1 answers due" in why
        assert (await client.post(CHAT, asked)).body == b'"e1"' and len(one.calls) == 1


async def test_short_prompts_do_not_make_an_engine_seem_slow() -> None:
    async with engines(2) as ([one, _], running), connect(running.port) as client:
        member = running.member("e0")
        one.stop()
        await asked_of(one, running, client, CHAT, chat())
        began_s = running.router.now_s()
        while not member.server.suspicion:
            member.candidate.prefill_tokens_per_s = 1.0  # as after a short prompt that took a while
            await asyncio.sleep(0.005)
        assert running.router.now_s() - began_s < 2 * STALLED_S
        assert (await client.answer()).json == "e1"


async def test_an_engine_that_goes_on_is_found_by_asking_it_for_a_token() -> None:
    async with engines(2) as ([one, _], running), connect(running.port) as client:
        one.stop()
        await asked_of(one, running, client, CHAT, chat())
        await client.answer()
        await settled(running, "e0", takes=False)
        asked = one.asked.count(ASKED)
        await until(lambda: one.asked.count(ASKED) > asked + 2, "it is asked again and again")
        await settled(running, "e0", takes=False)
        one.go_on()
        await settled(running, "e0", takes=True)
        assert {(await client.post(CHAT, chat())).json for _ in range(2)} == {"e0", "e1"}
        assert running.member("e0").server.suspicion == ""


async def test_an_engine_whose_counts_move_has_not_stopped() -> None:
    async with engines(2) as ([one, _], running), connect(running.port) as client:
        one.works = False  # in the sense that it has no token yet: a long prompt
        await asked_of(one, running, client, CHAT, chat())
        server, steps = running.member("e0").server, 10
        began_s = running.router.now_s()
        while running.router.now_s() < began_s + 3 * STALLED_S:
            steps += 1
            one.tell(steps)
            await asyncio.sleep(0.05)  # a step
        assert running.member("e0").candidate.unavailable is None and not server.suspicion
        one.go_on()
        one.calls[0].answer(b'"late"')
        assert (await client.answer()).json == "late"


async def test_an_engine_that_is_alone_is_waited_for() -> None:
    async with engines(1) as ([one], running), connect(running.port) as client:
        one.stop()
        await asked_of(one, running, client, CHAT, chat())
        server = running.member("e0").server
        await until(lambda: running.router.now_s() - server.worked_s > 2 * STALLED_S, "it has been quiet for long")
        assert running.member("e0").candidate.unavailable is None
        one.calls[0].answer(b'"late"')
        assert (await client.answer()).json == "late"


async def test_an_engine_that_sleeps_is_left_at_once_until_it_is_awake() -> None:
    async with engines(2) as ([one, _], running), connect(running.port) as client:
        one.works = False
        await asked_of(one, running, client, CHAT, chat())
        one.tell(1, awake=False)
        assert (await client.answer()).json == "e1"
        assert await settled(running, "e0", takes=False) == "its engine sleeps"
        assert {(await client.post(CHAT, chat())).json for _ in range(3)} == {"e1"}
        server = running.member("e0").server
        await until(lambda: running.router.now_s() - server.worked_s > 2 * STALLED_S, "it has slept for a while")
        one.works = True
        one.tell(1)
        await settled(running, "e0", takes=True)
        assert running.router.now_s() - server.worked_s < STALLED_S / 2, "else its sleep would be taken for a long step"
        assert {(await client.post(CHAT, chat())).json for _ in range(2)} == {"e0", "e1"}
