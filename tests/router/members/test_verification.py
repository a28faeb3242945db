"""Shapes are verified beside the traffic, by the engine's own tokens or by the blocks that it stores."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.prompts.prompts import Prompts
from engines.prompts.vllm import Vllm
from events.blocks import block_keys, extend_keys, root_key
from events.cache.groups import FULL, Group, Layout
from router.members import verification
from router.members.broken import Broken
from router.members.fetch import Fetched
from router.members.verification import Verification
from router.placement.placement import Placement
from router.prompts.prompt import Prompt, read_peek
from router.prompts.shapes import DIFFERS, NOT_YET
from router.prompts.tokenizer_probe import probes, token_ids_in
from router.prompts.tokens import Tokens
from tests.router.families import prompts
from tests.router.loopback import until

USER = {"role": "user", "content": "Say something about the weather in Zürich, in two sentences at most."}
TOOL = {"type": "function", "function": {"name": "look"}}
OTHER_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{{ tools | tojson }}"


class Engine:
    """Replicas' answers to the router's own questions, by a template that may be another than the router's."""

    def __init__(self, made_by: Prompts) -> None:
        self.made_by = made_by
        self.tokenizes = True
        self.asked: list[str] = []
        self.wait = asyncio.Event()
        self.wait.set()

    async def answer(self, member: Any, path: str, body: bytes, timeout_s: float) -> Fetched:  # noqa: ARG002
        self.asked.append(path)
        await self.wait.wait()
        if not self.tokenizes:
            return Fetched(404, [], b"{}")
        api = "chat" if b'"messages"' in body else "completions"
        asked = Vllm(self.made_by).read(api, body)
        ids = self.made_by.tokenizer.encode(str(asked.texts[0]), add_special_tokens=asked.special_tokens)
        return Fetched(200, [], json.dumps({"tokens": ids}).encode())


class World:
    def __init__(self, ours: Prompts, theirs: Prompts | None = None, *, shows: bool = True) -> None:
        self.tokens = Tokens("m", ours, strict=False, engine="vllm")
        self.engine = Engine(theirs or ours)
        self.placement = Placement("cost", first_token_timeout_s=300.0)
        self.now_s = 0.0
        self.verification = Verification(self.engine.answer, self.placement, lambda: self.now_s, shows)
        self.member = self.replica("r0")

    def replica(self, name: str) -> Any:
        load = self.placement.add(name)
        slot = load.candidate.slot
        server = SimpleNamespace(name=name, process=f"{name} #1")
        return SimpleNamespace(name=name, server=server, block_size=16, slot=slot)

    def prompt(self, **fields: Any) -> tuple[Prompt, bytes]:
        body = json.dumps({"model": "m"} | fields).encode()
        return self.tokens.draft(
            "chat" if "messages" in fields else "completions", body, read_peek(body)
        ).finish(), body

    def send(self, member: Any = None, **fields: Any) -> Prompt:
        prompt, body = self.prompt(**fields)
        model: Any = SimpleNamespace(tokens=self.tokens)
        api = "chat" if "messages" in fields else "completions"
        self.verification.sent(member or self.member, model, prompt, api, body)
        return prompt

    async def settled(self) -> None:
        await until(lambda: not self.verification._under_way, "nothing is asked")


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(prompts("qwen", tmp_path))
    yield made
    await made.verification.close()


async def test_the_first_request_of_a_shape_is_approximate_and_the_next_is_exact(world: World) -> None:
    first = world.send(messages=[USER], tools=[TOOL])
    assert not first.exact and first.why_not == NOT_YET and first.reason == "shape"
    await world.settled()
    assert world.engine.asked == ["/tokenize"]
    again, _ = world.prompt(messages=[USER | {"content": "x"}], tools=[TOOL])
    assert again.exact and again.doubt is None
    assert not world.prompt(messages=[USER])[0].exact, "another shape is verified by itself"


async def test_a_shape_is_verified_at_each_replica(world: World) -> None:
    world.send(messages=[USER])
    await world.settled()
    other = world.replica("r1")
    shapes = world.tokens.shapes
    assert shapes is not None
    assert not shapes.is_verified_at(world.send(other, messages=[USER]).shape or "", other.server.process)
    await world.settled()
    asked = len(world.engine.asked)
    for member in (world.member, other):
        prompt = world.send(member, messages=[USER])
        assert prompt.exact and shapes.is_verified_at(prompt.shape or "", member.server.process)
    assert len(world.engine.asked) == asked, "each was asked once"


async def test_a_shape_with_other_tokens_stays_approximate_and_shows_both_texts(world: World, tmp_path: Path) -> None:
    world.engine.made_by = Prompts(prompts("qwen", tmp_path).tokenizer, OTHER_TEMPLATE)
    world.send(messages=[USER])
    await world.settled()
    prompt = world.send(messages=[USER])
    assert not prompt.exact and prompt.why_not == DIFFERS
    assert world.tokens.shapes is not None
    [(name, found)] = world.tokens.shapes.differences()
    assert name == prompt.shape and "<|im_start|>" in found.ours and found.theirs.startswith("user: Say")
    asked = len(world.engine.asked)
    world.engine.made_by = prompts("qwen", tmp_path)
    assert world.send(messages=[USER]).why_not == DIFFERS and len(world.engine.asked) == asked
    world.now_s = 61.0
    world.send(messages=[USER])
    await world.settled()
    assert world.send(messages=[USER]).exact, "it was asked again later"


async def test_texts_are_not_kept_where_prompts_are_not_shown(tmp_path: Path) -> None:
    ours = prompts("qwen", tmp_path)
    world = World(ours, Prompts(ours.tokenizer, OTHER_TEMPLATE), shows=False)
    world.send(messages=[USER])
    await world.settled()
    assert world.tokens.shapes is not None
    [(_, found)] = world.tokens.shapes.differences()
    assert (found.ours, found.theirs) == ("", "")


async def test_an_engine_that_does_not_say_its_tokens_is_used_and_not_called_exact(world: World) -> None:
    world.engine.tokenizes = False
    world.send(messages=[USER])
    await world.settled()
    prompt = world.send(messages=[USER])
    assert prompt.exact and prompt.doubt is not None and "/tokenize answers 404" in prompt.doubt
    assert prompt.reason == "unverified"


@pytest.mark.parametrize("lookahead", [0, 1])
async def test_what_the_answer_does_not_cover_is_verified_by_the_stored_blocks(world: World, lookahead: int) -> None:
    if lookahead:
        layout = Layout(16, (Group(0, FULL, 1),), lookahead=lookahead)
        world.placement.index.arrange(world.member.slot, layout)
    fields: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}
    first = world.send(**fields)
    await until(lambda: "/tokenize" in world.engine.asked, "it was asked")
    assert not world.send(**fields).exact
    assert first.unverified is not None
    root = root_key("m", None, None, 16)
    keys = extend_keys(root, first.unverified, 16, lookahead=lookahead)
    assert lookahead or keys == block_keys(first.unverified, 16, root)
    world.placement.index.store(world.member.slot, keys)
    await world.settled()
    assert world.send(**fields).exact


async def test_told_tokens_are_verified_by_the_blocks_that_the_chosen_replica_stores(world: World) -> None:
    prompt, body = world.prompt(messages=[USER])
    assert prompt.unverified is not None and world.tokens.shapes is not None
    prompt.packed, prompt.exact, prompt.asked, prompt.shape = [prompt.unverified], True, True, "told"
    other = world.replica("r1")
    for member in (world.member, other):
        world.verification.sent(member, SimpleNamespace(tokens=world.tokens), prompt, "chat", body)  # type: ignore[arg-type]
    world.placement.index.store(other.slot, block_keys(prompt.unverified, 16, root_key("m", None, None, 16)))
    await until(lambda: world.tokens.is_verified_at(prompt, "r1 #1"), "its blocks are known")
    assert not world.tokens.is_verified_at(prompt, "r0 #1") and world.engine.asked == []
    world.now_s = verification.STORED_WITHIN_S
    await world.settled()
    assert not world.tokens.is_verified_at(prompt, "r0 #1")


async def test_a_told_picture_is_verified_by_a_full_block_with_its_name(world: World) -> None:
    prompt, body = world.prompt(messages=[USER])
    assert prompt.unverified is not None
    prompt.packed, prompt.exact, prompt.asked = [prompt.unverified], True, True
    for number, (start, name) in enumerate(((0, "p"), (0, "another"), (len(prompt.unverified) // 64 * 16, "p"))):
        member = world.replica(f"p{number}")
        prompt.shape, prompt.pictures = f"told {number}", [("p", start, 1)]
        world.verification.sent(member, SimpleNamespace(tokens=world.tokens), prompt, "chat", body)  # type: ignore[arg-type]
        extras = {start // 16: [(name, 0)]}
        keys = block_keys(prompt.unverified, 16, root_key("m", None, None, 16), extras)
        world.placement.index.store(member.slot, keys)
        await asyncio.sleep(0)  # it begins to wait for them
        world.now_s += verification.STORED_WITHIN_S
        await world.settled()
        assert world.tokens.is_verified_at(prompt, f"p{number} #1") is (number == 0)


async def test_blocks_that_were_there_before_prove_nothing(world: World) -> None:
    fields: dict[str, Any] = {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}
    prompt, _ = world.prompt(**fields)
    assert prompt.unverified is not None
    world.placement.index.store(world.member.slot, block_keys(prompt.unverified, 16, root_key("m", None, None, 16)))
    world.send(**fields)
    await world.settled()
    assert not world.send(**fields).exact


async def test_another_length_in_an_answer_ends_it(world: World) -> None:
    world.send(messages=[USER])
    await world.settled()
    prompt = world.send(messages=[USER])
    member: Any = world.member
    world.verification.other_length(member, world.tokens, prompt, prompt.tokens + 5)
    assert world.send(messages=[USER]).why_not == DIFFERS


async def test_few_questions_are_asked_at_once_and_per_second(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "AT_A_STRETCH", 6.0)
    world.verification._allowed = 6.0
    world.engine.wait.clear()
    for number in range(50):
        world.send(messages=[USER | {"role": f"role {number}"}])
    await asyncio.sleep(0)
    assert len(world.engine.asked) == verification.MAX_AT_ONCE
    world.engine.wait.set()
    await world.settled()
    for number in range(50):
        world.send(messages=[USER | {"role": f"another {number}"}])
        await world.settled()
    assert len(world.engine.asked) == 6
    assert world.tokens.shapes is not None and len(world.tokens.shapes.known) == 6
    world.now_s = 0.25
    world.send(messages=[USER])
    await world.settled()
    assert len(world.engine.asked) == 7


async def test_large_bodies_are_not_sent_twice(world: World) -> None:
    world.send(messages=[USER | {"content": "word " * 60_000}])
    assert world.engine.asked == [] and not world.verification._under_way


@pytest.mark.parametrize("broken", [True, False])
async def test_a_failed_question_says_nothing(world: World, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any) -> Fetched:
        if broken:
            raise Broken("it is gone")
        return Fetched(400, [], b"{}")

    monkeypatch.setattr(world.verification, "_ask", failing)
    world.send(messages=[USER])
    await world.settled()
    assert world.tokens.shapes is not None and world.tokens.shapes.known == {}
    assert world.send(messages=[USER]).why_not == NOT_YET


async def test_a_restart_while_it_is_asked_verifies_nothing(world: World) -> None:
    world.engine.wait.clear()
    world.send(messages=[USER])
    await until(lambda: bool(world.engine.asked), "it was asked")
    world.member.server.process = "r0 #2"
    world.engine.wait.set()
    await world.settled()
    assert world.send(messages=[USER]).why_not == NOT_YET


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [{"role": "system", "content": "a"}, USER],
        [USER, {"role": "assistant", "content": "b"}, USER],
        [{"role": "system", "content": "a"}, *[USER, {"role": "assistant", "content": "b"}] * 4, USER],
    ],
)
async def test_usual_chats_are_verified_from_the_start(world: World, messages: list[dict[str, Any]]) -> None:
    assert world.tokens.prompts is not None
    asked = probes("m", world.tokens.prompts, world.tokens.engine)
    answers = [(200, json.dumps({"tokens": probe.expected}).encode()) for probe in asked]
    server: Any = world.member.server
    world.verification.probed(server, world.tokens, asked, answers)
    assert world.send(messages=messages).exact and world.send(prompt="a b").exact
    assert world.engine.asked == []


def test_answers_are_read_with_care() -> None:
    assert token_ids_in(b'{"tokens": [1, 2]}') == [1, 2]
    wrong = (b"[-1]", b"[2147483648]", b'"a"', b"[]")
    for body in (b"[]", b"{}", b"\xff", b"[" * 10_000, *(b'{"tokens": %b}' % tokens for tokens in wrong)):
        assert token_ids_in(body) is None
