"""Polite and rude clients at once. The polite ones' answers are compared with the expected tokens.

The simulated engine's tokens follow from prompt, seed and position alone, so preemption, eviction, neighbours and
rude clients must not change a single one.
"""

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import httpx2

from api.openai.requests import ChatRequest, CompletionRequest, read
from api.prompts.prompts import Prompts
from api.tokens.tokenizer import load_tokenizer
from replica.cache.chain import Chain
from replica.config import SimulatedConfig
from replica.messages import Sampling
from replica.runners.request import Request
from replica.runners.simulated import BYTES, SimulatedRunner
from tests.replica.serving import EOS, MODEL
from tests.replica.tiers.simulated import VirtualClock

PATIENCE_S = 60.0  # for one request; a stream that hangs is a failure
LONGEST_ANSWER = 96
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
SHARED = [f"System prompt {number}: " + "be helpful, and brief. " * (4 + 3 * number) for number in range(8)]


# ---- what is asked, and what must be answered


class Asked(NamedTuple):
    path: str
    body: dict[str, Any]

    @property
    def streamed(self) -> bool:
        return bool(self.body["stream"])

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body

    @property
    def raw(self) -> bytes:
        return json.dumps(self.body).encode()


class Said(NamedTuple):
    """One choice."""

    text: str
    finish_reason: str | None
    tokens: int | None  # None: ended by a stop string; how many tokens that took depends on the clock


def ask_something(chance: random.Random) -> Asked:
    prompt = chance.choice(SHARED) + f"Question {chance.randrange(40)}. " * chance.randrange(4)
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": chance.randint(1, LONGEST_ANSWER),
        "seed": chance.randrange(1000),
        "n": chance.choice([1, 1, 1, 2, 3]),
        "stream": chance.random() < 0.8,
        "ignore_eos": chance.random() < 0.7,
    }
    if chance.random() < 0.3:
        body["stop"] = chance.choice(["ee", [" t"], "never in it!"])
    if chance.random() < 0.3:
        body["cache_salt"] = chance.choice(["alice", "bob"])
    if body["stream"] and chance.random() < 0.7:
        body["stream_options"] = {"include_usage": True}
    if chance.random() < 0.5:
        wanted = {"logprobs": True, "top_logprobs": 2} if chance.random() < 0.2 else {}
        return Asked("/v1/chat/completions", body | wanted | {"messages": [{"role": "user", "content": prompt}]})
    wanted = {"logprobs": 1} if chance.random() < 0.2 else {}
    return Asked("/v1/completions", body | wanted | {"prompt": prompt})


class Oracle:
    """Computes the expected tokens, with the runner alone."""

    def __init__(self) -> None:
        self._prompts = Prompts(load_tokenizer(None), None)
        self._runner = SimulatedRunner(SimulatedConfig(), VirtualClock(), BYTES, EOS)

    def prompt(self, asked: Asked) -> list[int]:
        if asked.is_chat:
            return self._prompts.chat(read(asked.raw, ChatRequest))
        [prompt] = self._prompts.completion(read(asked.raw, CompletionRequest))
        return prompt

    def choices(self, asked: Asked) -> list[Said]:
        prompt = self.prompt(asked)
        return [self._choice(prompt, asked.body, asked.body["seed"] + index) for index in range(asked.body["n"])]

    def _choice(self, prompt: list[int], body: dict[str, Any], seed: int) -> Said:
        sampling = Sampling(max_tokens=body["max_tokens"], seed=seed, ignore_eos=body["ignore_eos"])
        request = Request(0, Chain(prompt, 4096, MODEL), len(prompt), sampling, (0.0, 0))
        while request.generated < sampling.max_tokens:
            request.chain.append(self._runner.sample(request).token)
            if request.chain.tokens[-1] in EOS:
                break
        tokens = request.chain.tokens[len(prompt) :].tolist()
        by_itself = tokens[-1] in EOS
        text = bytes(tokens[:-1] if by_itself else tokens).decode()
        stops = body.get("stop", [])
        for stop in [stops] if isinstance(stops, str) else stops:
            if stop in text:
                return Said(text[: text.index(stop)], "stop", None)
        return Said(text, "stop" if by_itself else "length", len(tokens))


# ---- polite clients


class Refused(Exception):
    """The queue is full: the only refusal that a polite client may get."""


async def ask(http: httpx2.AsyncClient, asked: Asked, oracle: Oracle) -> None:
    """One request, heard to its end and compared."""
    async with http.stream("POST", asked.path, content=asked.raw) as response:
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            raise Refused
        assert response.status_code == 200, (response.status_code, await response.aread())
        if asked.streamed:
            events = [line async for line in response.aiter_lines() if line]
            choices, usage = from_events(events, asked)
        else:
            answer = json.loads(await response.aread())
            choices, usage = from_whole(answer, asked), answer["usage"]
    expected = oracle.choices(asked)
    assert [choice[:2] for choice in choices] == [choice[:2] for choice in expected], (asked, choices, expected)
    if usage is not None:
        assert usage["prompt_tokens"] == len(oracle.prompt(asked))
        if None not in (tokens := [choice.tokens for choice in expected]):
            assert usage["completion_tokens"] == sum(filter(None, tokens)), (asked, usage)


def from_events(lines: list[str], asked: Asked) -> tuple[list[Said], dict[str, Any] | None]:
    """Also checks the stream's form: role first, one finish_reason for each choice, usage if asked for, [DONE]."""
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    check_no_error(events)
    assert lines[-1] == "data: [DONE]" and lines.count("data: [DONE]") == 1, (asked, lines[-3:])
    usage = events.pop()["usage"] if "stream_options" in asked.body else None
    by_choice: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        for choice in event["choices"]:
            by_choice[choice["index"]].append(choice)
    assert sorted(by_choice) == list(range(asked.body["n"])), (asked, sorted(by_choice))
    said = []
    for _, parts in sorted(by_choice.items()):
        if asked.is_chat:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}, (asked, parts[0])
        text = "".join(part["delta"].get("content") or "" if asked.is_chat else part["text"] for part in parts)
        assert all(part["finish_reason"] is None for part in parts[:-1]), (asked, parts)
        said.append(Said(text, parts[-1]["finish_reason"], None))
    return said, usage


def check_no_error(events: list[dict[str, Any]]) -> None:
    for event in events:
        if "error" in event:
            # One of several choices found the queue full after another had begun.
            assert event["error"]["type"] == "rate_limit_error", event
            raise Refused


def from_whole(answer: dict[str, Any], asked: Asked) -> list[Said]:
    return [
        Said(choice["message"]["content"] if asked.is_chat else choice["text"], choice["finish_reason"], None)
        for choice in answer["choices"]
    ]


# ---- rude clients


class Line(NamedTuple):
    """A connection without manners."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    chance: random.Random

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hang_up(self) -> None:
        if self.chance.random() < 0.5:
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


def as_http(asked: Asked, more: str = "") -> bytes:
    head = f"POST {asked.path} HTTP/1.1\r\nHost: replica\r\n{more}Content-Length: {len(asked.raw)}\r\n\r\n"
    return head.encode() + asked.raw


async def leave_at_once(_: Line, __: Asked) -> None:
    """Connects, and that was all."""


async def leave_in_the_head(line: Line, asked: Asked) -> None:
    await line.send(as_http(asked)[: line.chance.randint(1, 60)])


async def leave_in_the_body(line: Line, asked: Asked) -> None:
    await line.send(as_http(asked)[: -line.chance.randint(1, len(asked.raw) - 1)])
    if line.chance.random() < 0.5:  # so that the server has begun to wait for the rest
        await asyncio.sleep(line.chance.random() / 20)


async def leave_before_the_first_token(line: Line, asked: Asked) -> None:
    await line.send(as_http(asked))
    if line.chance.random() < 0.5:
        await asyncio.sleep(line.chance.random() / 20)


async def leave_in_the_middle(line: Line, asked: Asked) -> None:
    await line.send(as_http(asked, "Connection: close\r\n"))  # it may be shorter than what is waited for
    left = line.chance.randint(1, 4000)
    while left > 0 and (piece := await line.reader.read(left)):
        left -= len(piece)


async def leave_after_the_end(line: Line, asked: Asked) -> None:
    asked.body["stream"] = True
    asked.body.pop("stream_options", None)
    await line.send(as_http(asked))
    heard = b""
    while not heard.endswith(b"\r\n0\r\n\r\n") and b" 429 " not in heard[:20]:
        if not (piece := await line.reader.read(2**16)):
            return
        heard += piece


async def close_one_half(line: Line, asked: Asked) -> None:
    """Says that nothing more will come, and listens on."""
    await line.send(as_http(asked))
    line.writer.write_eof()
    await line.reader.read()


async def never_read(line: Line, asked: Asked) -> None:
    await line.send(as_http(asked))
    await asyncio.sleep(line.chance.random())


async def send_the_next_request_early(line: Line, asked: Asked) -> None:
    await line.send(as_http(asked) * 3)
    await line.reader.read(100)


Manner = Callable[[Line, Asked], Awaitable[None]]
RUDE: list[Manner] = [
    leave_at_once,
    leave_in_the_head,
    leave_in_the_body,
    leave_before_the_first_token,
    leave_in_the_middle,
    leave_in_the_middle,
    leave_after_the_end,
    close_one_half,
    never_read,
    send_the_next_request_early,
]


# ---- all of them


class Crowd:
    """So many clients at a time, each doing one thing after another."""

    def __init__(self, port: int, clients: int, seed: int) -> None:
        self.port = port
        self.clients = clients
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self._oracle = Oracle()

    async def run(self, for_s: float) -> None:
        end_s = time.monotonic() + for_s
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self.clients)
        url = f"http://127.0.0.1:{self.port}"
        async with (
            httpx2.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self.clients):
                chance = random.Random(f"{self.seed} {number}")
                group.create_task(self._client(http, chance, end_s))
        self.seed += 1

    async def _client(self, http: httpx2.AsyncClient, chance: random.Random, end_s: float) -> None:
        while time.monotonic() < end_s:
            asked = ask_something(chance)
            async with asyncio.timeout(PATIENCE_S):
                if chance.random() < 0.5:
                    await self._polite(http, asked)
                else:
                    await self._rude(asked, chance)

    async def _polite(self, http: httpx2.AsyncClient, asked: Asked) -> None:
        try:
            await ask(http, asked, self._oracle)
        except Refused:
            self.counts["refused"] += 1
            await asyncio.sleep(0.1)
        else:
            self.counts["whole streams" if asked.streamed else "whole answers"] += 1

    async def _rude(self, asked: Asked, chance: random.Random) -> None:
        manner = chance.choice(RUDE)
        line = Line(*await asyncio.open_connection("127.0.0.1", self.port), chance)
        try:
            with suppress(ConnectionError):
                await manner(line, asked)
        finally:
            await line.hang_up()
        self.counts[manner.__name__] += 1
