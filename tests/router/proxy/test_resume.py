"""Streams of foreign engines that break in the middle, as the client sees them."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from api.generation_apis import PATHS
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import ByteTokenizer
from engines import NATIVE, OPENAI, PROFILES
from events.blocks import pack_tokens
from replica.model.demo import CACHE_VARIABLE
from router.members.spec import ReplicaSpec
from router.prompts.prompt import Peek, Prompt
from router.prompts.tokens import Tokens
from router.proxy.flow import RequestType
from router.proxy.progress import Progress
from router.proxy.streams.continuation import Continuation
from router.proxy.streams.events import EventReader, payload_of
from router.proxy.streams.fields import why_alone, with_ids
from tests.replica.natives import native
from tests.replica.serving import MODEL, Replica
from tests.router.loopback import until
from tests.router.scripted import Served, connect, served

VLLM, LONGEST = PROFILES["vllm"], 100
PROMPT = [104, 105]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


# ---- events


def test_events_are_cut_wherever_reads_end() -> None:
    stream = b'data: {"a": 1}\n\n: ping\n\ndata: x\r\n\r\ndata: [DONE]\n\n'
    whole = EventReader().feed(stream)
    assert whole == [b'data: {"a": 1}\n\n', b": ping\n\n", b"data: x\r\n\r\n", b"data: [DONE]\n\n"]
    for cut in range(len(stream)):
        reader = EventReader()
        events = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        assert [payload_of(event) for event in events] == [payload_of(event) for event in whole]
        assert b"".join(events) == stream and not reader.rest


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_lines_end_in_any_way_that_the_standard_allows(ends: str) -> None:
    lines = 'data: {"a": 1}', "", ": ping", "", "data: [DONE]", ""
    stream = "".join(line + ends for line in lines).encode()
    for cut in range(len(stream)):
        reader = EventReader()
        events = reader.feed(stream[:cut]) + reader.feed(stream[cut:])
        assert [payload_of(event) for event in events] == [b'{"a": 1}', None, b"[DONE]"], cut
        assert b"".join(events) + reader.rest == stream and not reader.rest.strip()


def test_lines_may_end_each_in_another_way() -> None:
    assert EventReader().feed(b"data: 1\r\n\ndata: 2\n\r\ndata: 3\r\rdata: 4\n\r") == [
        b"data: 1\r\n\n",
        b"data: 2\n\r\n",
        b"data: 3\r\r",
        b"data: 4\n\r",
    ]
    assert EventReader().feed(b"event: x\r\ndata: 1\r\n") == []


def test_only_an_event_of_one_line_has_a_payload() -> None:
    assert payload_of(b"data: {}\n\n") == b"{}"
    assert payload_of(b": ping\n\n") is None
    assert payload_of(b"event: a\ndata: {}\n\n") is None


# ---- one stream, as vLLM writes it


def stream_of(body: dict[str, Any] | None = None, *, chat: bool = True) -> Continuation:
    asked = {"model": "m", "max_tokens": 10, **(body or {})}
    peek = Peek("m")
    prompt = Prompt("m", 2, [pack_tokens(PROMPT)], True, None, 1, None, None, peek)
    return Continuation(chat, prompt, json.dumps(asked).encode(), ByteTokenizer())


def sent(**fields: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()


HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "m"}
OTHER = {"id": "cmpl-2", "object": "text_completion", "created": 6, "model": "m"}


def opening() -> bytes:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return sent(**HEAD, choices=[choice], prompt_token_ids=PROMPT)


def said(text: str, ids: list[int], finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text, **delta}, "logprobs": None, "finish_reason": finish}
    return sent(**HEAD, choices=[{**choice, "token_ids": ids}])


def gone_on(text: str, ids: list[int], finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return sent(**OTHER, choices=[{**choice, "prompt_token_ids": None, "token_ids": ids}])


def payloads(stream: bytes) -> list[Any]:
    return [json.loads(part[6:]) for part in stream.split(b"\n\n") if part and part != b"data: [DONE]"]


def test_what_the_router_added_is_taken_out_and_nothing_else() -> None:
    stream = stream_of()
    stream.relay()
    text = 'a "token_ids":[1] \\ b'
    plain = said(text, [65], matched_stop=None).replace(b',"token_ids":[65]', b"")
    shown = stream.read(opening() + said(text, [65], matched_stop=None) + b": ping\n\ndata: [DONE]\n\n", False)[0]
    assert shown == opening().replace(b',"prompt_token_ids":[104,105]', b"") + plain + b": ping\n\ndata: [DONE]\n\n"


def test_a_client_that_asked_for_token_ids_keeps_them() -> None:
    stream = stream_of({"return_token_ids": True})
    stream.relay()
    whole = opening() + said("", [195]) + said("é", [169])
    assert stream.read(whole, False)[0] == whole


def test_a_lost_stream_continues_as_a_completion() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 10, "temperature": 0}
    asked = json.dumps({"model": "m", "stream": True, "tool_choice": "none", **body}).encode()
    stream = stream_of(body)
    stream.relay()
    stream.read(opening() + said("ab", [97, 98]) + said("", [195])[:-4], False)
    stream.settle()
    assert stream.why_not is None and stream.fits(VLLM, LONGEST)
    resumed = json.loads(stream.resume(asked, None))
    assert resumed == {
        "model": "m",
        "stream": True,
        "temperature": 0,
        "prompt": [104, 105, 97, 98],
        "max_tokens": 8,
        "return_token_ids": True,
    }
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    shown = stream.read(
        gone_on("é", [195, 169]) + gone_on("", [257], "stop") + sent(**OTHER, choices=[], usage=usage), False
    )[0]
    first, last, used = payloads(shown)
    assert {name: first[name] for name in HEAD} == HEAD
    assert first["choices"][0]["delta"] == {"content": "é"} and "token_ids" not in first["choices"][0]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert used["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}


@pytest.mark.parametrize(("asked", "room"), [({}, 16), ({"max_tokens": None}, 98), ({"max_tokens": 7}, 7)])
def test_a_completion_without_a_limit_has_openais_and_null_is_none_at_all(asked: dict[str, Any], room: int) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", **asked}).encode()
    prompt = Prompt("m", 2, [pack_tokens(PROMPT)], True, None, 1, None, None, Peek("m"))
    stream = Continuation(False, prompt, body, ByteTokenizer())
    stream.relay()
    stream.read(gone_on("ab", [97, 98]), False)
    stream.settle()
    assert stream.fits(VLLM, LONGEST) and not stream.is_complete(100)
    assert stream.fits(NATIVE, LONGEST) is (room != 98), "ours take null for 16"
    assert json.loads(stream.resume(body, 100))["max_tokens"] == room - 2


def test_half_a_character_whose_ids_were_shown_continues_only_with_ours() -> None:
    stream = stream_of({"return_token_ids": True})
    stream.relay()
    stream.read(opening() + said("a", [97]) + said("", [195]), False)
    stream.settle()
    assert not stream.fits(VLLM, LONGEST)
    assert stream.fits(NATIVE, LONGEST)


@pytest.mark.parametrize(
    ("text", "chat", "continued"), [("<think>so", True, False), ("so", True, True), ("<think>", False, True)]
)
def test_reasoning_that_our_parser_has_shown_continues_only_with_ours(text: str, chat: bool, continued: bool) -> None:
    stream = stream_of({"max_tokens": 50}, chat=chat)
    stream.begun_by_ours(("chatcmpl-1", 5, "m"))
    stream.settle([*text.encode()])
    assert stream.fits(VLLM, LONGEST) == continued
    assert stream.fits(NATIVE, LONGEST)


def test_an_engine_that_takes_no_token_ids_cannot_continue() -> None:
    stream = stream_of({"max_tokens": None})
    stream.relay()
    stream.read(opening() + said("ab", [97, 98]), False)
    stream.settle()
    assert not stream.fits(OPENAI, LONGEST)
    assert not stream.fits(VLLM, None)  # how much is left, nobody knows
    assert stream.fits(VLLM, LONGEST)
    assert json.loads(stream.resume(b"{}", LONGEST))["max_tokens"] == 96


@pytest.mark.parametrize(
    "event",
    [
        said("a", []),  # an engine that knows no return_token_ids
        said("", [97], reasoning_content="hm"),
        said("b", [97]),
        opening().replace(b"104", b"105"),
        b"data: {what\n\n",
    ],
    ids=["no ids", "reasoning", "other text", "other prompt", "no JSON"],
)
def test_answers_that_cannot_continue_are_known(event: bytes) -> None:
    stream = stream_of()
    stream.relay()
    stream.read(opening() + event, False)
    stream.settle()
    assert stream.why_not is not None


def test_an_error_within_the_stream_is_a_loss_and_not_shown() -> None:
    stream = stream_of()
    stream.relay()
    assert stream.read(sent(error={"message": "EngineCore died", "code": 500}) + b"data: [DONE]\n\n", False)[0] == b""
    assert stream.broken is not None


def test_an_answer_that_was_given_up_is_a_loss_and_goes_on() -> None:
    stream = stream_of()
    stream.relay()
    shown = stream.read(opening() + said("ab", [97, 98]) + said("c", [], "abort") + b"data: [DONE]\n\n", False)[0]
    assert b"abort" not in shown and b'"c"' not in shown and b"[DONE]" not in shown
    assert stream.broken is not None and not stream.done
    stream.settle()
    assert stream.ids == [97, 98] and stream.why_not is None and not stream.is_complete(None)


def test_requests_that_cannot_continue_are_distinguished() -> None:
    exact = Prompt("m", 2, [pack_tokens(PROMPT)], True, None, 1, None, None, Peek("m"))
    guessed = Prompt("m", 2, [], False, "it has no tokenizer here", 1, None, None, Peek("m"))
    assert why_alone(exact, b'{"model": "m"}') is None
    assert "approximately" in (why_alone(guessed, b'{"model": "m"}') or "")
    assert "stop" in (why_alone(exact, b'{"model": "m", "stop": ["x"]}') or "")
    assert "truncate" in (why_alone(exact, b'{"model": "m", "truncate_prompt_tokens": 5}') or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [("stop", ["x"]), ("tools", [{"type": "function", "function": {"name": "f"}}]), ("response_format", {"type": "x"})],
)
def test_a_stream_that_cannot_continue_names_the_field(field: str, value: object) -> None:
    body = json.dumps({"model": "m", "stream": True, field: value}).encode()
    prompt = Prompt("m", 2, [pack_tokens(PROMPT)], True, None, 1, None, None, Peek("m", stream=True))
    exchange: Any = SimpleNamespace(response_started=False, sent_bytes=0)
    kind, model = (
        RequestType("chat", generation=PATHS[CHAT]),
        SimpleNamespace(tokens=Tokens("m", Prompts(ByteTokenizer()))),
    )
    facts: Any = SimpleNamespace(exchange=exchange, type=kind, prompt=prompt, model=model, body=body, streams=True)
    facts.may_resume = True
    progress = Progress(facts)
    member: Any = SimpleNamespace(spec=SimpleNamespace(resume=True, max_model_len=None), profile=VLLM)
    assert progress.goes_to(member)
    exchange.sent_bytes = 1
    lost: Any = SimpleNamespace(framed=False, status=200, token_ids={}, member=member)
    assert progress.settle(lost) == f"{field} looks at the whole of it"


def test_the_last_word_on_token_ids_is_the_routers() -> None:
    assert json.loads(with_ids(b'{"return_token_ids": false, "model": "m"} \n')) == {
        "model": "m",
        "return_token_ids": True,
    }


# ---- a router between a client and replicas that break


class Cuts:
    """A way to a replica, for `served`; it can cut each generation request after some events."""

    def __init__(self, name: str, engine: str, there: int, after: list[int], *, resume: bool = True) -> None:
        self.after = after  # of all ways together: for each request to come
        self.asked: list[str] = []
        self.name, self.port = name, 0
        self._engine, self._there, self._resume = engine, there, resume
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def spec(self) -> ReplicaSpec:
        url = f"http://127.0.0.1:{self.port}"
        return ReplicaSpec(name=self.name, url=url, engine=self._engine, events="off", resume=self._resume)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._there)
        limit: list[int] = []
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, there_writer, lambda sent: self._note(sent, limit)))
                both.create_task(self._carry(there_reader, writer, lambda sent: self._spend(sent, limit)))
        except* (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            there_writer.transport.abort()
            self._tasks.discard(task)

    def _note(self, request: bytes, limit: list[int]) -> bytes:
        found = re.match(rb"POST (/v1/\w+(?:/completions)?) ", request)
        if found:
            self.asked.append(found[1].decode())
            limit[:] = [self.after.pop(0)] if self.after else []
        return request

    @staticmethod
    def _spend(answer: bytes, limit: list[int]) -> bytes:
        """All that may pass, and half an event more."""
        if limit:
            events = [found.start() for found in re.finditer(rb"data: ", answer)]
            if len(events) > limit[0]:
                return answer[: events[limit[0]] + 20] + b"CUT"
            limit[0] -= len(events)
        return answer

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, look: Callable[[bytes], bytes]
    ) -> None:
        while sent := await reader.read(65536):
            passed = look(sent)
            writer.write(passed.removesuffix(b"CUT"))
            await writer.drain()
            if passed.endswith(b"CUT"):
                break
        raise ConnectionResetError


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    return {"model": MODEL, "temperature": 0, "max_tokens": 24, "ignore_eos": True, **asked, **fields}


class World:
    def __init__(self, running: Served, cuts: list[int], ways: list[Cuts]) -> None:
        self._running, self.cuts, self.ways = running, cuts, ways

    async def ask(self, path: str, **fields: Any) -> bytes:
        async with connect(self._running.port) as client:
            answer = await client.post(path, body_of(path, fields))
            assert answer.status == 200, answer.body
            return answer.body

    @property
    def asked(self) -> list[str]:
        return [path for way in self.ways for path in way.asked]


@pytest.fixture(scope="module")
def computing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Replica, str]]:
    cache = tmp_path_factory.mktemp("cache")
    with native(MODEL, "--kv-cache-gb", 0.1, **{CACHE_VARIABLE: str(cache)}) as running:
        [folder] = cache.iterdir()
        yield running, str(folder)


@asynccontextmanager
async def world(
    computing: tuple[Replica, str], engines: tuple[str, ...] = ("vllm", "vllm", "vllm"), **options: Any
) -> AsyncIterator[World]:
    """Several ways to one replica, which a router takes for as many replicas."""
    replica, folder = computing
    cuts: list[int] = []
    resume = options.pop("spec_resume", True)
    ways: Any = [Cuts(f"r{i}", engine, replica.port, cuts, resume=resume) for i, engine in enumerate(engines)]
    async with AsyncExitStack() as stack:
        for way in ways:
            await stack.enter_async_context(way.running())
        config = {"model_dirs": {MODEL: folder}, "breaker_faults": 1000, **options}
        running = await stack.enter_async_context(served(*ways, **config))
        await until(lambda: all(one.server.verified for one in running.router.members), "their tokenizers are known")
        yield World(running, cuts, ways)


def even(stream: bytes) -> bytes:
    """Without the fields that differ for each answer."""
    stream = re.sub(rb'"(id|created)":("[^"]*"|\d+)', rb'"\1":0', stream)
    return re.sub(rb',"prompt_tokens_details":\{[^}]*\}', b"", stream)


@pytest.mark.chaos
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_cut_stream_is_read_as_a_whole_one(computing: tuple[Replica, str], path: str) -> None:
    fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    async with world(computing) as there:
        plain = computing[0].post(path, body_of(path, fields)).body
        whole = await there.ask(path, **fields)
        assert even(whole) == even(plain)
        for cuts in ([2], [25], [5, 0]):
            there.cuts[:] = cuts
            there.ways[0].asked.clear()
            assert even(await there.ask(path, **fields)) == even(whole), cuts
            assert not there.cuts
        assert set(there.asked) == {path, COMPLETIONS}


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("engines", "path"), [(("vllm", "warmroute"), CHAT), (("warmroute", "vllm"), COMPLETIONS)], ids=[CHAT, COMPLETIONS]
)
async def test_foreign_and_native_replicas_take_over_from_each_other(
    computing: tuple[Replica, str], engines: tuple[str, ...], path: str
) -> None:
    async with world(computing, engines) as there:
        whole = await there.ask(path, stream=True)
        for cuts in ([2], [2], [0], [0]):  # each for both of them to begin with
            there.cuts[:] = cuts
            assert even(await there.ask(path, stream=True)) == even(whole), cuts
            assert not there.cuts


@pytest.mark.chaos
@pytest.mark.parametrize("options", [{"resume": False}, {"spec_resume": False}])
async def test_without_resume_the_client_is_told(computing: tuple[Replica, str], options: dict[str, Any]) -> None:
    async with world(computing, **options) as there:
        there.cuts[:] = [5]
        stream = await there.ask(CHAT, stream=True)
        assert b'"code":"broken_stream"' in stream and len(there.asked) == 1
