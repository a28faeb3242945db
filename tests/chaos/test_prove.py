"""`warmroute prove` through real routers and through ones that lie, before real simulated replicas."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from lab.shadow.proof import Certificate, Evidence
from tests.chaos.routers import Fleet, fleet, router
from tests.lab.shadow.mirroring import read_request

pytestmark = pytest.mark.chaos

SPEED = ("--set=simulated_prefill_tokens_per_s=40_000", "--set=simulated_decode_tokens_per_s=5000")
SMALL = (*SPEED, "--block-size", 16, "--num-blocks", 240, "--max-model-len", 3600)
BLOCK = 16
CACHED = re.compile(rb'("cached_tokens":) *(\d+)')


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    with fleet(2, *SMALL) as started:
        yield started


async def proved(url: str, *options: object, status: int = 0) -> Certificate:
    command = [sys.executable, "-m", "fleet", "prove", url, "--json", *map(str, options)]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    said, errors = await process.communicate()
    assert process.returncode == status, errors.decode() + said.decode()
    return msgspec.json.decode(said, type=Certificate)


async def test_one_client_finds_to_the_token_what_the_events_say(replicas: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "proof.jsonl"
    with router(*replicas.as_options) as ours:
        found = await proved(ours.url, "--requests", 40, "--concurrency", 1, "-o", path)
    assert (found.verdict, found.requests, found.failed, found.doubts) == ("proved", 40, 0, {})
    assert sum(found.answers.values()) == 40 and found.answers["same"] > 30  # some events are late on a busy machine
    assert found.tokens["told"] == found.counted_hits > 0
    assert found.tokens["tokens"] == found.counted_tokens
    told = found.predictions
    assert told["right"] > 30 and told["wrong"] == 0
    evidence = [msgspec.json.decode(line, type=Evidence) for line in path.read_bytes().splitlines()]
    assert len(evidence) == 40
    assert sum(one.told or 0 for one in evidence) == found.tokens["told"]
    assert all(one.told == one.held for one in evidence if one.finding == "same")
    assert {one.known_by for one in evidence} == {"told"}


async def test_a_router_that_only_takes_turns_loses_what_others_hold(replicas: Fleet) -> None:
    with router(*replicas.as_options, "--policy", "round-robin") as turns:
        found = await proved(turns.url, "--requests", 96, "--concurrency", 6)
    tokens = found.tokens
    assert found.verdict == "proved"
    assert tokens["told"] == found.counted_hits
    assert tokens["held"] < tokens["best"] <= tokens["pooled"]
    assert found.regret_s["elsewhere"] > 0 and found.regret_s["evicted"] > 0
    assert tokens["told"] + tokens["elsewhere"] + tokens["evicted"] <= tokens["tokens"]


async def test_where_requests_went_is_found_behind_routers_that_do_not_say(replicas: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "proof.jsonl"
    with router(*replicas.as_options, "--policy", "round-robin") as ours:
        server = await through(ours.port, change=0)
        found = await proved(address(server), *replicas.as_options, "--requests", 40, "-o", path)
        server.close()
    assert (found.verdict, found.tokens["told"]) == ("proved", found.counted_hits)
    assert found.predictions["all"] == 0
    sources = {msgspec.json.decode(line, type=Evidence).known_by for line in path.read_bytes().splitlines()}
    assert "stored" in sources and "told" not in sources


async def test_a_key_whose_salt_is_known_is_proved_and_another_is_not(replicas: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[keys.one]\nkey = "ours"\n')
    asked = (*replicas.as_options, "--requests", "24", "--api-key", "ours")
    with router(*replicas.as_options, "--api-key", "ours") as plain:
        found = await proved(plain.url, *asked)
    with router(*replicas.as_options, "--api-keys", keys) as filed:
        assert "not provable: the replicas' events tell of other prompts" in await refused(filed.url, *asked)
    assert (found.verdict, found.tokens["told"]) == ("proved", found.counted_hits) and found.counted_hits > 0


@pytest.mark.parametrize("change", [BLOCK, -BLOCK])
async def test_an_answer_that_tells_other_tokens_is_refuted(replicas: Fleet, change: int) -> None:
    with router(*replicas.as_options) as ours:
        server = await through(ours.port, change)
        options = (*replicas.as_options, "--requests", 24, "--concurrency", 1)
        found = await proved(address(server), *options, status=1)
        server.close()
    assert found.verdict == "refuted"
    assert found.answers["different"] > 12 and "contradict the engines' events" in found.says


async def test_without_events_nothing_is_proved(replicas: Fleet) -> None:
    replica = replicas[0]
    found = await proved(replica.url, "--replica", f"url={replica.url},events=off", "--requests", 4, status=3)
    assert found.verdict == "unknown" and found.doubts


async def test_a_router_of_another_make_needs_its_replicas_named(replicas: Fleet) -> None:
    assert "give --replica for each replica behind it" in await refused(replicas[0].url)


async def refused(*words: str) -> str:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "fleet", "prove", *words, stderr=PIPE)
    _, errors = await process.communicate()
    assert process.returncode == 2
    return errors.decode()


# ---- a router that says little, and perhaps lies


async def through(port: int, change: int) -> asyncio.Server:
    """Pass requests on without our headers, and change the cached tokens of answers, if there are any."""

    def lie(told: re.Match[bytes]) -> bytes:
        value = int(told[2])
        return told[1] + (b"%d" % max(0, value + (change if value else 0))).rjust(len(told[2]))[: len(told[2])]

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        answers, asks = await asyncio.open_connection("127.0.0.1", port)
        asks.write(request)
        answer = CACHED.sub(lie, await answers.read())
        writer.write(re.sub(rb"x-warmroute-replica", b"x-somebody-replica0", answer))
        await writer.drain()
        asks.close()
        writer.close()

    return await asyncio.start_server(handle, "127.0.0.1", 0)


def address(server: asyncio.Server) -> str:
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
