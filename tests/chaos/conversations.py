"""Many concurrent conversations that grow turn by turn; every answer is compared with the engine's oracle.

The questions depend on the conversation's number alone; their times depend on the answers before.
"""

import asyncio
import json
import random
import time
from typing import Any, NamedTuple

import httpx2

from tests.chaos.crowd import PATIENCE_S, Asked, Oracle, Refused, Said, from_events, from_whole
from tests.replica.serving import MODEL

SYSTEM_PROMPTS = 3
SYSTEM_CHARACTERS = 1000
LONGEST_CHARACTERS = 3500  # then another conversation begins
ANSWER_TOKENS = 40
WORDS = ("where", "which", "warm", "cold", "cache", "prompt", "begin", "again", "another", "replica", "small", "never")


class Heard(NamedTuple):
    """A good answer."""

    ended_s: float  # of the monotonic clock
    ttft_s: float | None  # None: not streamed
    prompt_tokens: int
    cached_tokens: int


class Conversation:
    """A conversation that shares a system prompt, and nothing else, with others."""

    def __init__(self, name: str, system: int) -> None:
        self._chance = random.Random(name)
        self._messages = [{"role": "system", "content": text(random.Random(f"system {system}"), SYSTEM_CHARACTERS)}]

    @property
    def is_over(self) -> bool:
        return sum(len(message["content"]) for message in self._messages) > LONGEST_CHARACTERS

    def ask(self) -> Asked:
        self._messages.append({"role": "user", "content": text(self._chance, self._chance.randint(80, 240))})
        streamed = self._chance.random() < 0.8
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": list(self._messages),
            "max_tokens": ANSWER_TOKENS,
            "seed": self._chance.randrange(1000),
            "n": 1,
            "stream": streamed,
            "ignore_eos": True,
        }
        return Asked("/v1/chat/completions", body | ({"stream_options": {"include_usage": True}} if streamed else {}))

    def hear(self, answer: str) -> None:
        self._messages.append({"role": "assistant", "content": answer})


class Conversations:
    """`count` conversations while the context lasts: each asks, reads the answer, pauses and asks again."""

    def __init__(self, url: str, count: int, thinks_s: float = 0.0) -> None:
        self.heard: list[Heard] = []
        self.failed: list[tuple[float, str]] = []  # time and error
        self._url = url
        self._count = count
        self._thinks_s = thinks_s
        self._oracle = Oracle()
        self._over = False
        self._running: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Conversations":
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._count)
        self._http = httpx2.AsyncClient(base_url=self._url, timeout=PATIENCE_S, limits=limits, trust_env=False)
        self._running = [asyncio.create_task(self._go_on(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Every answer that has begun is heard to its end."""
        self._over = True
        await asyncio.gather(*self._running)
        await self._http.aclose()

    def hit_rate(self, last: int) -> float:
        """Hit rate of the last `last` answers."""
        heard = self.heard[-last:]
        return sum(each.cached_tokens for each in heard) / sum(each.prompt_tokens for each in heard)

    async def _go_on(self, number: int) -> None:
        thinking = random.Random(f"thinking {number}")
        begun = 0
        conversation = Conversation(f"{number}.{begun}", number % SYSTEM_PROMPTS)
        while not self._over:
            failed = False
            try:
                conversation.hear(await self._ask(conversation.ask()))
            except (httpx2.HTTPError, Refused, AssertionError, LookupError, ValueError) as error:
                failed = True
                self.failed.append((time.monotonic(), f"{type(error).__name__}: {error}"))
            if failed or conversation.is_over:
                begun += 1
                conversation = Conversation(f"{number}.{begun}", number % SYSTEM_PROMPTS)
            await asyncio.sleep(thinking.uniform(0, 2 * self._thinks_s))

    async def _ask(self, asked: Asked) -> str:
        """The text of a good answer."""
        began_s = time.monotonic()
        ttft_s = None
        async with self._http.stream("POST", asked.path, content=asked.raw) as response:
            assert response.status_code == 200, (response.status_code, await response.aread())
            if asked.streamed:
                lines = []
                async for line in response.aiter_lines():
                    if line:
                        lines.append(line)
                    if ttft_s is None and len(lines) == 2:  # the first one has only the role
                        ttft_s = time.monotonic() - began_s
                [said], usage = from_events(lines, asked)
            else:
                answer = json.loads(await response.aread())
                [said], usage = from_whole(answer, asked), answer["usage"]
        assert usage is not None, "the stream has no usage"
        self._check(asked, said, usage)
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        self.heard.append(Heard(time.monotonic(), ttft_s, usage["prompt_tokens"], cached_tokens))
        return said.text

    def _check(self, asked: Asked, said: Said, usage: dict[str, Any]) -> None:
        [expected] = self._oracle.choices(asked)
        assert said[:2] == expected[:2], (said, expected)
        assert usage["prompt_tokens"] == len(self._oracle.prompt(asked))
        assert usage["completion_tokens"] == ANSWER_TOKENS, usage


def text(chance: random.Random, characters: int) -> str:
    made = ""
    while len(made) < characters:
        made += chance.choice(WORDS) + " "
    return made
