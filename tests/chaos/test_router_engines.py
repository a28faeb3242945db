"""The real bytes that other engines have published, played to a router over sockets by `warmroute events replay`.

The index then holds exactly the keys that the oracle's resolver has, and engines that name the same tokens by other
hashes are matched alike. WARMROUTE_ALL_VECTORS=1 plays every release and every trace at once.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from events.cache.resolver import Resolver
from events.messages import EventBatch, encode_batch
from events.recording import Recorder
from events.source import Record, Source
from events.stream.foreign_stream import ForeignStream
from events.stream.states import StreamConfig
from events.view import CacheView
from router.members.spec import spec_of
from router.process.front import Front
from tests.api.tokenizers import saved
from tests.api.trained import FAMILIES
from tests.chaos.replicas import until
from tests.chaos.routers import front, http_client, port_of, steady_ports
from tests.events.processes import FREE, Tool, tool, wait_until
from tests.oracle.test_hash import MODEL, VLLM, Chain
from tests.oracle.vectors import Record as Line
from tests.oracle.vectors import files, read, records
from tests.router.scripted import Scripted, says

pytestmark = pytest.mark.chaos

TOPIC = b"kv@a@model"
ENGINES = ("vllm", "sglang")
ALL = bool(os.environ.get("WARMROUTE_ALL_VECTORS"))
MOST = 10  # of one kind, if not all
SEEDED = "random_101-plain-16-0"


class Story(NamedTuple):
    """A publisher's payloads from its first batch on."""

    name: str
    engine: str
    payloads: list[bytes]


def view_of(payloads: Iterable[bytes]) -> CacheView:
    """The oracle: the same bytes, in order, without sockets."""
    view = CacheView("oracle", ForeignStream(StreamConfig(can_replay=False)), Resolver(MODEL))
    view.perform(view.stream.connected(0.0))
    for seq, payload in enumerate(payloads):
        view.perform(view.stream.live(seq, payload, 0.0))
    view.resolver.check()
    return view


def keys_of(view: CacheView) -> dict[tuple[str, int], set[int]]:
    return {(medium, group): set(keys) for medium, group, keys in view.resolver.held()}


# ---- recorded payloads


def releases() -> list[Story]:
    """Payloads of each engine release, as one stream."""
    by_release: dict[tuple[str, str], list[bytes]] = {}
    for record in records("wire_vectors*.jsonl"):
        if record["source"] == "real classes" and record["engine"] in ENGINES:
            payload = bytes.fromhex(record["payload_hex"])
            by_release.setdefault((record["engine"], record["version"]), []).append(payload)
    return [Story(f"{engine} {version}", engine, payloads) for (engine, version), payloads in by_release.items()]


def traces() -> list[Story]:
    """Recorded payloads of real block managers, without those that report hits as stores."""
    found = {path: read(path) for path in files("blockpool/*.jsonl")}
    return [
        Story(path.stem, "vllm", payloads_of(lines))
        for path, lines in found.items()
        if not any(line.get("report_mode") == "full" for line in lines)
    ]


def payloads_of(lines: list[Line]) -> list[bytes]:
    return [bytes.fromhex(line["payload_hex"]) for line in lines if "payload_hex" in line]


def some(stories: list[Story]) -> list[Story]:
    """Evenly from the oldest to the newest."""
    return stories if ALL else stories[:: -(-len(stories) // MOST)]


# ---- delivery to a router


def record_story(path: Path, story: Story) -> None:
    source = Source("a", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", model=MODEL)
    with Recorder(path, [source]) as recorder:
        recorder.write(Record(1.0, 0, "connected", []))
        for seq, payload in enumerate(story.payloads):
            recorder.write(Record(2.0 + seq / 1000, 0, "events", [TOPIC, seq.to_bytes(8, "big"), payload]))


@contextmanager
def playing(path: Path, events: str = FREE, replay: str = FREE) -> Iterator[Tool]:
    with tool("replay", path, "--bind", events, "--replay-bind", replay, "--speed", "max", "--stay", "60") as running:
        yield running


def endpoints_of(playing: Tool) -> tuple[str, str]:
    wait_until(lambda: playing.err or playing.process.poll() is not None, "it prints its endpoints")
    events, replay = playing.err[0].removeprefix("publishing at ").strip().split(", ")
    return events, replay


@asynccontextmanager
async def routed(recordings: list[tuple[str, Path]], **config: Any) -> AsyncIterator[Front]:
    """A router in front of servers of OpenAI's API, whose events are played by processes."""
    async with AsyncExitStack() as stack:
        players = [stack.enter_context(playing(path)) for _, path in recordings]
        specs = []
        for number, ((engine, _), player) in enumerate(zip(recordings, players, strict=True)):
            server = Scripted(f"r{number}", says(), models=[MODEL])
            await stack.enter_async_context(server.running())
            events, replay = endpoints_of(player)
            fields = {"name": server.name, "url": server.spec.url, "engine": engine}
            specs.append(spec_of({**fields, "events": events, "replay": replay}))
        yield await stack.enter_async_context(front(specs, **config))


def indexed(running: Front, name: str) -> dict[tuple[str, int], set[int]]:
    """The keys of a replica by medium and group."""
    slot, index = running.router.members.by_name[name].slot, running.router.placement.index
    places = index.pools
    return {place: keys for place, holders in places.items() if (keys := set(holders.of(slot)))}


async def heard(running: Front, name: str, seq: int) -> None:
    def is_there() -> bool:
        state = running.router.members.by_name[name].feed_state
        return state is not None and state.seq >= seq and state.lag_batches == 0 and (state.exact or state.partial)

    await until(is_there, f"{name} has played batch {seq}, and no repair is under way")


# ---- the router's view


@pytest.mark.parametrize("kind", [releases, traces])
async def test_the_index_holds_what_the_real_bytes_of_an_engine_mean(
    tmp_path: Path, kind: Callable[[], list[Story]]
) -> None:
    told = some(kind())
    for number, story in enumerate(told):
        record_story(tmp_path / f"{number}.wre", story)
    recordings = [(story.engine, tmp_path / f"{number}.wre") for number, story in enumerate(told)]
    async with routed(recordings) as running:
        for number, story in enumerate(told):
            await heard(running, f"r{number}", len(story.payloads) - 1)
            oracle, state = view_of(story.payloads), running.router.members.by_name[f"r{number}"].feed_state
            assert indexed(running, f"r{number}") == keys_of(oracle), story.name
            assert state is not None and state.reason == oracle.inexact, story.name
        running.router.placement.index.check()
        print(", ".join(f"{story.name}: {len(story.payloads)} batches" for story in told))
        assert not told or len(running.router.placement.index.pools["GPU", 0]) > 20


async def test_routers_behind_a_mirror_hold_the_same_whether_they_come_early_or_late(tmp_path: Path) -> None:
    # Some streams are several engines', one after the other, with other blocks: they are read anew for ever.
    once = [story for story in some(releases()) if view_of(story.payloads).resolver.outgrown is None]
    told = [*once[::2], *some(traces())[::2]]
    async with AsyncExitStack() as stack:
        specs, ends = [], []
        for number, story in enumerate(told):
            record_story(tmp_path / f"{number}.wre", story)
            ends.append([f"tcp://127.0.0.1:{steady_ports(1)}" for _ in range(2)])
            mirror = stack.enter_context(
                tool("mirror", ends[-1][0], "--replay", ends[-1][1], "--model", MODEL, "--bind", FREE)
            )
            await asyncio.to_thread(mirror.wait_for, bool, "it has bound its sockets")
            server = Scripted(f"r{number}", says(), models=[MODEL])
            await stack.enter_async_context(server.running())
            sockets = {name: end for name, end in mirror.lines()[0].items() if name not in ("kind", "rank")}
            specs.append(spec_of({"name": server.name, "url": server.spec.url, "engine": story.engine, **sockets}))

        async def check(running: Front) -> None:
            for number, story in enumerate(told):
                oracle, feed = view_of(story.payloads), running.router.members.by_name[f"r{number}"].feed
                assert feed is not None
                same = lambda n=number, o=oracle: indexed(running, f"r{n}") == keys_of(o)  # noqa: E731
                await until(lambda f=feed, o=oracle: f.inexact == o.inexact, f"{story.name} is as sure as its engine")  # type: ignore[misc]
                await until(same, f"{story.name} has the same keys")
                assert feed.view.stream.stats.digest_mismatches == 0, story.name
            running.router.placement.index.check()

        early = await stack.enter_async_context(front(specs))
        for number, own in enumerate(ends):
            stack.enter_context(playing(tmp_path / f"{number}.wre", *own))
        await check(early)
        await check(await stack.enter_async_context(front(specs)))


def seeded() -> list[Chain]:
    """The same tokens, as engines with other algorithms and other values of PYTHONHASHSEED name them."""
    return [chain for chain in VLLM if SEEDED in chain.name][: None if ALL else 4]


async def test_engines_with_other_hash_seeds_match_the_same(tmp_path: Path) -> None:
    chains = seeded()
    assert len({tuple(chain.ints) for chain in chains}) == len(chains) > 1, "both engines publish the same hashes"
    for number, chain in enumerate(chains):
        batches = [encode_batch(EventBatch(1.0, [chain.stored(chain.forms[number % 2])]))]
        record_story(tmp_path / f"{number}.wre", Story(chain.name, "vllm", batches))
    folder = saved(FAMILIES["gpt2"](), tmp_path)
    recordings = [("vllm", tmp_path / f"{number}.wre") for number in range(len(chains))]
    async with routed(recordings, model_dirs={MODEL: str(folder)}) as running:
        for number in range(len(chains)):
            await heard(running, f"r{number}", 0)
        prompt = {"model": MODEL, "prompt": chains[0].token_ids}
        async with http_client(f"http://127.0.0.1:{port_of(running)}") as http:
            explained = (await http.post("/explain", json=prompt)).json()
        assert explained["exact"], explained["why_not"]
        blocks = len(chains[0].keys)
        assert [one["sure_tokens"] for one in explained["candidates"]] == [16 * blocks] * len(chains)
        assert explained["hits"] == {f"r{number}": [[0, blocks - 1]] for number in range(len(chains))}
