"""Engines tell the tokens of prompts that the router cannot make: in time or not at all, and to one tenant alone."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.prompts.prompts import Prompts
from engines import profile_of
from engines.prompts import dates
from engines.prompts.vllm import Vllm
from engines.vllm import RENDER
from events.blocks import pack_tokens
from router.members import asking
from router.members.asking import AGREEMENTS, COMPARE_EVERY, MAX_AT_ONCE, Asking
from router.members.broken import Broken
from router.members.fetch import Fetched
from router.prompts.pictures import MAX_BYTES, MEDIA, cut
from router.prompts.prompt import Prompt, read_peek
from router.prompts.shapes import RETRY_S, Difference
from router.prompts.tokens import Tokens
from tests.router.families import prompts
from tests.router.loopback import until

SYSTEM = {"role": "system", "content": "You are terse. " * 20}
USER = {"role": "user", "content": "Say something about the weather in Zürich, in two sentences at most."}
THOUGHT = {"role": "assistant", "content": "Rain.", "reasoning_content": "It is autumn."}
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
LONG = "{% if messages | length > 3 %}Long: {% endif %}"
COUNTS = "{% for m in messages %}<|im_start|>{{ messages | length }} {{ m.content }}<|im_end|>{% endfor %}"
FORGETS = (  # the thoughts of all messages but the last two
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if loop.revindex < 3 %}{{ m.reasoning_content }}{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n"
)


class Engine:
    """vLLM's routes that tell tokens, with a template that the router does not have."""

    def __init__(self, made_by: Prompts) -> None:
        self.made_by = made_by
        self.without: tuple[str, ...] = ()  # routes
        self.asked: list[tuple[str, str, bytes]] = []
        self.wait = asyncio.Event()
        self.wait.set()

    def ids(self, api: str, body: bytes) -> list[list[int]]:
        asked = Vllm(self.made_by).read(api, body)
        encode = self.made_by.tokenizer.encode
        return [encode(str(text), add_special_tokens=asked.special_tokens) for text in asked.texts]

    def shown(self, api: str, body: bytes) -> dict[str, Any]:
        """A prompt with pictures. Each is named by its data, and has as many tokens as these have bytes."""
        asked, names = json.loads(body) | {"mm_processor_kwargs": None}, list[str]()
        for item in asked["input" if api == "responses" else "messages"]:
            for part in item["content"] if isinstance(item["content"], list) else ():
                if part["type"] != "text":
                    url = part.get("image_url") or part["source"]["data"]
                    names.append((url["url"] if isinstance(url, dict) else url).rpartition(",")[2])
                    part.clear()
                    part |= {"type": "text", "text": "\x01"}
        [text], ids, places = Vllm(self.made_by).read(api, json.dumps(asked).encode()).texts, list[int](), []
        for number, piece in enumerate(str(text).split("\x01")):
            if number:
                places.append({"offset": len(ids), "length": len(names[number - 1])})
                ids += [5] * len(names[number - 1])
            ids += self.made_by.tokenizer.encode(piece, add_special_tokens=False)
        pixels = None if asked.get("mm_payload") == "none" else "all of them"
        features = {"mm_hashes": {"image": names}, "mm_placeholders": {"image": places}, "kwargs_data": pixels}
        return {"request_id": "a", "token_ids": ids, "features": features if names else None}

    async def answer(self, server: Any, path: str, body: bytes, timeout_s: float) -> Fetched:  # noqa: ARG002
        self.asked.append((server.name, path, body))
        await self.wait.wait()
        if path in self.without:
            return Fetched(404, [], b'{"error":{"message":"Not Found","code":404}}')
        apis = {path: api for api, path in RENDER.items()}
        api = apis.get(path) or ("chat" if b'"messages"' in body else "completions")
        assert api != "messages" or b'"max_tokens"' in body, "vLLM refuses it"
        if MEDIA.search(body):
            shown = self.shown(api, body)
            assert path not in apis or shown["features"]["kwargs_data"] is None
            tokenized = {"count": 1, "tokens": shown["token_ids"]}
            return Fetched(200, [], json.dumps(shown if path in apis else tokenized).encode())
        told = self.ids(api, body)
        rendered: list[Any] = [{"request_id": "a", "token_ids": one, "features": None} for one in told]
        answer = rendered if api == "completions" else rendered[0]
        return Fetched(200, [], json.dumps(answer if path in apis else {"count": 1, "tokens": told[0]}).encode())


class World:
    def __init__(self, theirs: Prompts) -> None:
        self.tokens = Tokens("m", None, strict=False, engine="vllm")
        self.engine = Engine(theirs)
        self.now_s = 0.0
        self.asking = Asking(self.engine.answer, lambda: self.now_s)
        self.model: Any = SimpleNamespace(tokens=self.tokens, members=[self.replica("r0"), self.replica("r1")])

    def replica(self, name: str) -> Any:
        server = SimpleNamespace(name=name, process=f"{name} #1")
        candidate = SimpleNamespace(unavailable=None, all_in_flight=0)
        return SimpleNamespace(name=name, server=server, candidate=candidate, profile=profile_of("vllm"))

    async def tell(
        self, salt: str | None = None, api: str = "", *, is_equal: bool = True, apart: bool = False, **fields: Any
    ) -> Prompt:
        api = api or ("chat" if "messages" in fields else "completions")
        body = json.dumps({"model": "m", "stream": True} | fields).encode()
        prompt, shown = self.tokens.draft(api, body, read_peek(body), salt=salt).finish(), cut(api, body)
        prompt.read_apart, prompt.cut = apart, shown if apart and shown is not None and shown.pictures else None
        assert self.asking.wants(self.tokens, prompt)
        await self.asking.tell(self.model, prompt, api, body)
        assert not self.asking.wants(self.tokens, prompt) and prompt.exact is ("as told" in str(prompt.shape))
        if prompt.exact and is_equal and MEDIA.search(body):
            told = self.engine.shown(api, body)
            assert prompt.packed == [pack_tokens(told["token_ids"])]
            named, places = told["features"]["mm_hashes"], told["features"]["mm_placeholders"]["image"]
            at = [(one["offset"], one["length"]) for one in places]
            assert prompt.pictures == [(name, *place) for name, place in zip(named["image"], at, strict=True)]
        elif prompt.exact and is_equal:
            assert prompt.packed == [pack_tokens(one) for one in self.engine.ids(api, body)]
        return prompt

    async def talk(self, turns: int, *answers: dict[str, Any], **fields: Any) -> list[Counter[str]]:
        """Tell a conversation turn by turn; return how many questions of what kind each turn has cost."""
        messages, costs = [SYSTEM], []
        for turn in range(turns):
            messages.append(USER | {"content": f"{turn} " * 9})
            before = self.asking.questions.copy()
            assert (await self.tell(messages=messages, **fields)).exact
            await self.settled()
            costs.append(self.asking.questions - before)
            messages.append(answers[turn] if turn < len(answers) else {"role": "assistant", "content": f"{turn}."})
        return costs

    async def settled(self) -> None:
        await until(lambda: not self.asking._under_way, "nothing is asked")


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(asking, "WAIT_S", 5.0)
    made = World(prompts("qwen", tmp_path))
    yield made
    await made.asking.close()


async def test_a_turn_costs_one_small_question_once_its_kind_is_known(world: World) -> None:
    costs = await world.talk(10)
    assert [cost["whole"] for cost in costs] == [1] * (1 + AGREEMENTS) + [0] * (9 - AGREEMENTS)
    assert costs[1] == {"whole": 1, "greeting": 1, "new": 1} and costs[-1] == {"new": 1}
    assert b"terse" not in world.engine.asked[-1][2], "it is about the new messages alone"
    assert await world.talk(10, seed=7) == [{}] * 10, "what was told is remembered"
    assert (await world.talk(10, tools=[{"type": "function", "function": {"name": "look"}}]))[0] == {"whole": 1}


@pytest.mark.parametrize("template", [COUNTS, FORGETS])
async def test_where_new_messages_change_old_ones_all_is_asked_about(world: World, template: str) -> None:
    world.engine.made_by = Prompts(world.engine.made_by.tokenizer, template)
    costs = await world.talk(8, *[THOUGHT] * 8)
    assert all(cost["whole"] == 1 for cost in costs) and costs[-1]["new"] == 0


@pytest.mark.parametrize("thought", [THOUGHT, {"role": "assistant", "content": "<think>It is autumn.</think>Rain."}])
async def test_conversations_with_thoughts_are_a_kind_of_their_own(world: World, thought: dict[str, Any]) -> None:
    world.engine.made_by = Prompts(world.engine.made_by.tokenizer, FORGETS)
    assert (await world.talk(6))[-1]["whole"] == 0
    costs = await world.talk(6, thought)
    assert costs[1]["whole"] == costs[2]["whole"] == 1


async def test_what_has_become_wrong_is_noticed_and_forgotten(world: World) -> None:
    world.engine.made_by = Prompts(world.engine.made_by.tokenizer, PLAIN)
    await world.talk(2 + AGREEMENTS)
    world.engine.made_by = Prompts(
        world.engine.made_by.tokenizer, "{% if messages | length > 3 %}Long: {% endif %}" + PLAIN
    )
    begun = [SYSTEM, USER | {"content": "0 " * 9}]
    equal = []
    for number in range(COMPARE_EVERY):  # short questions do not show the difference
        answered = [*begun, {"role": "assistant", "content": f"another {number}"}, USER]
        equal.append(await world.tell(messages=answered, is_equal=False))
        await world.settled()
    ours, [theirs] = equal[0].packed, world.engine.ids("chat", json.dumps({"messages": answered}).encode())
    assert ours and pack_tokens(theirs)[:20] != ours[0][:20]
    assert (await world.talk(2 + AGREEMENTS))[-1]["whole"] == 1


async def test_equal_questions_are_one_and_salts_have_nothing_in_common(world: World) -> None:
    world.engine.wait.clear()
    asked = [asyncio.create_task(world.tell(salt, messages=[USER])) for salt in ("a", "a", "b", None)]
    await until(lambda: len(world.engine.asked) == 3, "all have asked")
    world.engine.wait.set()
    assert all(prompt.exact for prompt in await asyncio.gather(*asked)) and len(world.engine.asked) == 3
    assert {name for name, _, _ in world.engine.asked} == {"r0", "r1"}, "both have told some"


async def test_a_late_answer_is_not_waited_for_and_of_use_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WAIT_S", 0.01)
    world.engine.wait.clear()
    *late, busy = [await world.tell(messages=[USER | {"content": str(number)}]) for number in range(3)]
    assert str(busy.why_not).endswith(asking.WHY_NOT["busy"])
    assert all(str(prompt.why_not).endswith(asking.WHY_NOT["late"]) for prompt in late)
    assert [name for name, _, _ in world.engine.asked] == ["r0", "r1"], "a busy one is not asked, the other one is"
    world.engine.wait.set()
    await world.settled()
    assert (await world.tell(messages=[USER | {"content": "0"}])).exact and len(world.engine.asked) == 2
    world.model.members.append(world.replica("r2"))
    assert (await world.tell(messages=[USER])).exact and world.engine.asked[-1][0] == "r2"
    assert world.asking.outcomes == {"late": 2, "busy": 1, "told": 2}


async def test_few_questions_are_asked_at_once(world: World) -> None:
    world.engine.wait.clear()
    asked = [asyncio.create_task(world.tell(messages=[USER | {"content": str(n)}])) for n in range(50)]
    await until(lambda: world.asking.outcomes["busy"] == 50 - 2 * MAX_AT_ONCE, "the others are not asked about")
    world.engine.wait.set()
    assert sum(prompt.exact for prompt in await asyncio.gather(*asked)) == 2 * MAX_AT_ONCE


async def test_without_routes_that_render_the_tokenizing_one_is_asked_for_what_it_sees(world: World) -> None:
    world.engine.without = tuple(RENDER.values())
    assert (await world.tell(messages=[SYSTEM, USER])).exact and (await world.tell(prompt="a b")).exact
    for unseen in ({"reasoning_effort": "low", "messages": [USER]}, {"prompt": ["a", "b"]}):
        assert not (await world.tell(**unseen)).exact
    assert not (await world.tell(api="messages", messages=[USER], max_tokens=5)).exact
    rendered = [path for _, path, _ in world.engine.asked if path in RENDER.values()]
    assert len(rendered) <= 2, "each replica was asked once"
    world.engine.without = (*RENDER.values(), "/tokenize")
    assert "does not tell" in str((await world.tell(messages=[USER])).why_not)


async def test_sglang_is_asked_at_tokenize_alone_and_about_no_picture(world: World) -> None:
    for member in world.model.members:
        member.profile = profile_of("sglang")
    assert (await world.tell(messages=[SYSTEM, USER])).exact and (await world.tell(prompt="a b")).exact
    for fields in ({"messages": [seen("A" * 900)]}, {"api": "messages", "messages": [USER]}, {"prompt": ["a", "b"]}):
        assert "does not tell" in str((await world.tell(**fields)).why_not)
    assert [path for _, path, _ in world.engine.asked] == ["/tokenize"] * 2


async def test_other_apis_and_several_prompts_are_told_where_they_are_rendered(world: World) -> None:
    assert (await world.tell(api="messages", system="s", messages=[USER], max_tokens=5)).exact
    assert (await world.tell(api="responses", input=[USER])).exact and (
        await world.tell(api="responses", input="a")
    ).exact
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    shown = {"role": "user", "content": [{"type": "image", "source": source}]}
    assert (await world.tell(api="messages", messages=[shown], max_tokens=5)).pictures == [("AAAA", 30, 4)]
    part = {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AAAA"}
    assert (await world.tell(api="responses", input=[{"role": "user", "content": [part]}])).pictures == [
        ("AAAA", 30, 4)
    ]
    several = await world.tell(prompt=["a b", "c"])
    assert len(several.packed) == 2 and several.all_tokens == sum(map(len, several.packed)) // 4


async def test_of_a_model_with_a_tokenizer_what_differs_or_is_not_followed_is_asked_about(world: World) -> None:
    world.tokens = world.model.tokens = Tokens("m", world.engine.made_by, strict=False, engine="vllm")
    assert world.tokens.shapes is not None
    world.engine.made_by = Prompts(world.engine.made_by.tokenizer, PLAIN)  # not that of the router
    for member in world.model.members:
        found = Difference(member.name, 0, "", "")
        world.tokens.shapes.differed("chat; first>user, user>last", member.server.process, frozenset, found, 0.0)
    assert (await world.tell(messages=[USER])).exact
    world.now_s = RETRY_S
    assert not (await world.tell(messages=[USER])).exact, "it is compared again"
    for fields, is_asked in (
        ({"chat_template": "x"}, True),
        ({"documents": []}, False),
    ):  # the second is verified beside
        body = json.dumps({"model": "m", "messages": [USER]} | fields).encode()
        prompt = world.tokens.draft("chat", body, read_peek(body)).finish()
        assert not prompt.exact and world.asking.wants(world.tokens, prompt) is is_asked


def seen(*pictures: str, text: str = "What is it?", before: str = "data:image/png;base64,") -> dict[str, Any]:
    """A message with pictures before its text."""
    urls = [{"type": "image_url", "image_url": {"url": before + picture}} for picture in pictures]
    return {"role": "user", "content": [*urls, {"type": "text", "text": text}]}


async def test_what_is_large_or_names_its_images_is_not_asked_about(world: World) -> None:
    named, large = seen("a.png", before="https://example.com/"), seen("A" * MAX_BYTES)
    for message, apart in ((USER | {"content": "word " * 60_000}, False), (named, False), (USER, True), (large, True)):
        assert not (await world.tell(messages=[message], apart=apart)).exact
    assert world.engine.asked == [] and world.asking.outcomes == {"large": 3, "media": 1}


async def test_a_picture_is_asked_about_once_and_each_prompt_with_a_small_one(world: World) -> None:
    first = await world.tell(messages=[SYSTEM, seen("A" * 900)])
    assert world.asking.questions == {"picture": 1, "whole": 1}
    other = await world.tell(messages=[SYSTEM, seen("B" * 900)])
    assert world.asking.questions == {"picture": 2, "whole": 1}, "the text is the same"
    assert first.packed == other.packed and first.keys(16) != other.keys(16)
    again = await world.tell(messages=[SYSTEM, seen("A" * 900)], apart=True)
    assert again.keys(16) == first.keys(16) and sum(world.asking.questions.values()) == 3
    moved = await world.tell(messages=[seen("B" * 900, "A" * 900, "B" * 900)])
    assert world.asking.questions == {"picture": 2, "whole": 2} and len(moved.pictures) == 3
    assert moved.shape != first.shape, "it is verified by itself"
    assert max(len(body) for _, path, body in world.engine.asked if b"terse" in body) < 1200


async def test_a_tenants_picture_is_not_known_to_another_one(world: World) -> None:
    for salt, count in (("a", 1), ("a", 1), ("b", 2), (None, 3)):
        assert (await world.tell(salt, messages=[seen("AAAA")])).exact
        assert world.asking.questions["picture"] == count
    assert (await world.tell(messages=[seen("AAAA")], mm_processor_kwargs={"max_pixels": 9})).exact
    assert world.asking.questions["picture"] == 4, "it may have other tokens then"


async def test_new_messages_follow_pictures_as_they_do_texts(world: World) -> None:
    costs = await world.talk(10, seen("AAAA"))
    assert costs[-1] == {"new": 1} and world.asking.questions["picture"] == 1
    costs = await world.talk(10, *[seen(f"AAA{number}", text=str(number)) for number in range(9)])
    assert costs[-1] == {"new": 1, "picture": 1}


async def test_a_picture_that_comes_late_is_known_the_next_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "WAIT_S", 0.01)
    assert (await world.tell(messages=[seen("BBBB")])).exact
    world.engine.wait.clear()
    pictures = [await world.tell(messages=[seen(name * 4)]) for name in "CDEFGHIJ"]
    assert [str(one.why_not).rpartition("; ")[2] for one in pictures] == [asking.WHY_NOT["late"]] * 6 + [
        asking.WHY_NOT["busy"]
    ] * 2
    await world.tell(messages=[seen("CCCC")])
    assert world.asking.questions["picture"] == 7, "one question is asked about it"
    world.engine.wait.set()
    await world.settled()
    assert (await world.tell(messages=[seen("CCCC"), USER])).exact
    assert world.asking.questions["picture"] == 7


async def test_of_many_pictures_as_many_are_asked_about_as_may_be(world: World) -> None:
    many = [SYSTEM, seen(*(str(number) * 9 for number in range(8)))]
    assert not (await world.tell(messages=many)).exact and world.asking.outcomes == {"busy": 1}
    await world.settled()
    assert (await world.tell(messages=many)).exact and world.asking.questions == {"whole": 1, "picture": 8}


async def test_of_a_replica_that_tells_no_picture_none_is_asked_for_a_while(world: World) -> None:
    world.engine.without = (RENDER["chat"],)
    for _ in range(3):
        assert not (await world.tell(messages=[seen("AAAA")])).exact
    assert len(world.engine.asked) <= 2, "each was asked once, and for no tokens alone"
    world.now_s, world.engine.without = asking.AGAIN_S, ()
    assert (await world.tell(messages=[SYSTEM, seen("AAAA")])).exact


async def test_what_replicas_of_ours_would_compute_is_not_asked_for(world: World) -> None:
    world.model.members.append(world.replica("ours"))
    world.model.members[-1].profile = profile_of("warmroute")
    assert "would compute" in str((await world.tell(messages=[USER])).why_not) and world.engine.asked == []


@pytest.mark.parametrize("answer", [Broken("gone"), Fetched(400, [], b"{}"), Fetched(200, [], b"[{}]")])
async def test_an_unusable_answer_leaves_the_text(world: World, answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(*_: Any) -> Fetched:
        if isinstance(answer, Broken):
            raise answer
        return Fetched(*answer)

    monkeypatch.setattr(world.asking, "_ask", failing)
    prompt = await world.tell(messages=[USER])
    assert not prompt.exact and prompt.why_not and prompt.why_not.startswith("it has no tokenizer here; ")


async def test_where_a_date_may_change_nothing_is_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.tell(messages=[USER])
    monkeypatch.setattr(dates, "EDGE_S", dates.QUARTER_S)
    await world.tell(messages=[USER])
    assert len(world.engine.asked) == 2
