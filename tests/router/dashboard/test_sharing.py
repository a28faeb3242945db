"""GET /prefixes: shared prefixes, their holders, and no text unless permitted."""

from typing import Any

import pytest

from events.cache.changes import Grouped
from events.cache.groups import Group, Layout
from router.prompts.prefixes.recent import RecentPrompt
from router.tenants.keys import keys_from_options
from tests.router.http.test_app import LOCAL
from tests.router.scripted import CHAT, COMPLETIONS, MODEL, Script, Scripted, Served, chat, connect, says, served

GOOD = b'{"choices":[]}'
SYSTEM = "You are a helpful assistant that answers shortly. " * 20


def asked(system: str, question: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]}


async def told(running: Served, query: str = "", **headers: str) -> Any:
    async with connect(running.port) as client:
        answer = await client.get(f"/prefixes{query}", **(LOCAL | headers))
        assert answer.status == 200, answer.body
        return answer.json


async def routed(running: Served, *bodies: dict[str, Any], path: str = CHAT, **headers: str) -> None:
    async with connect(running.port) as client:
        for body in bodies:
            assert (await client.post(path, body, **headers)).status == 200


async def test_shared_prefixes_have_their_text_and_their_holders() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        assert await told(running) == {"prompts": 0, "span_s": 0.0, "texts": True, "prefixes": []}
        await routed(running, asked(SYSTEM, "Why? " * 200), asked(SYSTEM, "Why? " * 200 + "Because. " * 99))
        found = await told(running)
        assert (found["prompts"], found["texts"]) == (2, True)
        [whole] = found["prefixes"]
        assert (whole["model"], whole["exact"], whole["begin"], whole["prompts"]) == (MODEL, False, 0, 2)
        assert whole["held_by"] == 2 and whole["replicas"] == ["r0", "r1"]  # by turns
        assert whole["text"].startswith("system: You are a helpful") and len(whole["text"]) == 200
        before = whole["tokens"]
        await routed(running, asked(SYSTEM, "Where? " * 200))
        [system] = (await told(running))["prefixes"]
        assert (system["prompts"], system["tokens"] < before) == (3, True)
        [question] = system["below"]
        assert (question["prompts"], question["begin"]) == (2, system["tokens"])
        assert question["tokens"] + system["tokens"] == before
        assert question["text"].startswith("Why? Why?")
        assert (await told(running, "?limit=1"))["prefixes"][0]["below"] == []


async def test_a_replica_that_holds_a_part_in_slower_memory_is_named_with_it() -> None:
    async with served(*Script(says(GOOD)).replicas(3)) as running:
        router, keys = running.router, list(range(1, 21))
        for number, member in enumerate(router.members):
            member.block_size = 16
            router.placement.index.store(member.slot, keys[: 20 - number])
        router.members.arrange()
        router.placement.index.store(running.member("r1").slot, keys[19:], "CPU")
        router.placement.index.store(running.member("r2").slot, keys[18:19], "CPU")
        router.placement.index.store(running.member("r2").slot, keys[19:], "DISK")
        for _ in range(2):
            router.history.recent.add(RecentPrompt(MODEL, 16, keys, 0.0, b"Hi"))
        [found] = (await told(running))["prefixes"]
        assert (found["replicas"], found["sources"]) == (["r0", "r1", "r2"], {"r1": "CPU", "r2": "STORAGE"})


async def test_a_replica_with_part_of_a_prefix_is_not_named() -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        await routed(running, *[asked(SYSTEM, "Why? " * 200)] * 2)
        router = running.router
        router.placement.guesses.clear(running.member("r1").slot)
        [found] = (await told(running))["prefixes"]
        assert (found["held_by"], found["replicas"]) == (1, ["r0"])
        for member in list(router.members):
            running.front.upkeep._remove(member.name)
        router.members.arrange()
        [found] = (await told(running))["prefixes"]
        assert (found["held_by"], found["replicas"], found["prompts"]) == (0, [], 2)


@pytest.mark.parametrize(
    ("more", "shown"),
    [({}, False), ({"show_prompts": True}, True), ({"show_prompts": False}, False)],
)
async def test_where_clients_have_keys_words_are_shown_only_if_that_was_wished(
    more: dict[str, Any], shown: bool
) -> None:
    keys = tuple(keys_from_options(["key"], "admin"))
    config = {"keys": keys, "demand_key": True, **more}
    async with served(*Script(says(GOOD)).replicas(1), **config) as running:
        await routed(running, *[asked(SYSTEM, "Why? " * 200)] * 2, authorization="Bearer key")
        found = await told(running, authorization="Bearer admin")
        [prefix] = found["prefixes"]
        assert found["texts"] is shown
        assert (prefix["text"] is not None) is shown
        assert any(one.text for one in running.router.history.recent.all()) is shown
        async with connect(running.port) as client:
            assert (await client.get("/prefixes", authorization="Bearer key")).status == 403


async def test_prompts_of_different_salts_share_nothing() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        await routed(running, *[asked(SYSTEM, "Why?" * 200) | {"cache_salt": salt} for salt in "ab"])
        assert (await told(running))["prefixes"] == []


async def test_token_ids_are_no_text() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        await routed(running, *[{"model": MODEL, "prompt": [1] * 500}] * 2, path=COMPLETIONS)
        await routed(running, *[{"model": MODEL, "prompt": [[2] * 500]}] * 2, path=COMPLETIONS)
        assert [one["text"] for one in (await told(running))["prefixes"]] == [None, None]


async def test_texts_may_be_cut_within_a_letter_and_are_kept_in_part() -> None:
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        await routed(running, *[{"model": MODEL, "prompt": "\u00fc" * 9000 + last} for last in "ab"], path=COMPLETIONS)
        [found] = (await told(running))["prefixes"]
        assert found["text"] == "\u00fc" * 200
        assert all(len(one.text or b"") == 4096 for one in running.router.history.recent.all())


async def test_words_of_parts_and_odd_roles_are_text() -> None:
    parts = [
        {"type": "text", "text": "Look: " * 100},
        {"type": "image_url"},
        7,
        {"text": None},
        {"text": "Well? " * 100},
    ]
    async with served(*Script(says(GOOD)).replicas(1)) as running:
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
        await routed(running, *[body] * 2)
        assert [one.text for one in running.router.history.recent.all()] == [
            b"\0user\0" + b"Look: " * 100 + b"Well? " * 100
        ] * 2


async def test_what_no_replica_took_is_not_kept() -> None:
    script = Script(says(b"{}", 400), says(GOOD))
    async with served(*script.replicas(1), queue_timeout_s=0.1) as running, connect(running.port) as client:
        for status in (400, 200):
            assert (await client.post(CHAT, asked(SYSTEM, "Why? " * 200))).status == status
        assert len(running.router.history.recent) == 1
        for member in running.router.members:
            member.health.drain()
        assert (await client.post(CHAT, asked(SYSTEM, "Why? " * 200))).status == 503
        assert len(running.router.history.recent) == 1


async def test_nothing_is_kept_where_nothing_shall_be() -> None:
    async with served(*Script(says(GOOD)).replicas(1), recent_prompts=0) as running:
        await routed(running, *[chat("a long prompt " * 200)] * 2)
        assert (await told(running))["prompts"] == 0


SHARED = [1, 2, 3, 4, 5]


def holding(
    running: Served, name: str, layout: Layout | None, lookahead: int, held: list[int], prefix: list[int] = SHARED
) -> None:
    """Let a replica hold blocks by its events, and remember two prompts with its kind of keys that share a prefix."""
    member, router = running.member(name), running.router
    member.block_size = 16
    router.members.arrange()
    router.placement.index.apply(member.slot, Grouped(layout))
    router.placement.index.store(member.slot, held)
    for question in (6, 7):
        router.history.recent.add(RecentPrompt(MODEL, 16, [*prefix, question], 0.0, None, lookahead))


@pytest.mark.parametrize(
    ("layout", "lookahead", "held", "names"),
    [
        (None, 0, SHARED, ["r0"]),
        (Layout(16, (Group(0, "full", 1),), lookahead=1), 1, SHARED, ["r0"]),
        (Layout(16, (Group(0, "full", 1),), lookahead=1), 1, SHARED[:4], []),
        (Layout(16, (Group(0, "full", 1),), lookahead=1), 0, SHARED, []),  # keys of another kind mean other blocks
        (Layout(16, (Group(0, "full", 2),)), 0, SHARED, ["r0"]),  # no prompt could use the fifth
        (Layout(16, (Group(0, "full", 2),)), 0, SHARED[:2], []),
        (Layout(16, (Group(0, "full", 1), Group(1, "window", 1, 2))), 0, SHARED, []),  # it has lost the window
    ],
)
async def test_a_prefix_is_held_where_a_longer_prompt_could_use_it(
    layout: Layout | None, lookahead: int, held: list[int], names: list[str]
) -> None:
    async with served(*Script(says(GOOD)).replicas(2)) as running:
        holding(running, "r0", layout, lookahead, held)
        [found] = (await told(running))["prefixes"]
        assert (found["replicas"], found["tokens"], found["prompts"]) == (names, 5 * 16, 2)


async def test_an_answer_is_bounded_however_large_the_fleet() -> None:
    names = [f"r{number}" for number in range(60)]
    async with served(*[Scripted(name, says(GOOD)) for name in names]) as running:
        router = running.router
        for number in range(500):
            keys = [1, 2, *(1000 + number // 2 * 10 + place for place in range(3))]
            router.history.recent.add(RecentPrompt(MODEL, 0, keys, 0.0, None))
        for member in router.members:
            router.placement.approximate.routed(member.slot, [1, 2])
        found = await told(running, "?limit=100000")
        [top] = found["prefixes"]
        assert (top["held_by"], top["replicas"]) == (60, sorted(names)[:20])
        assert len(top["below"]) == 199
