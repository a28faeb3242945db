"""Mixed load for a soak: the good and bad requests of a busy day. A seed decides every request.

Requests start at a fixed rate, however long the answers take; beyond IN_FLIGHT at once they are left out. At first,
FILLING adds requests, so that all bounded caches soon are full: later growth is a leak.
"""

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import httpx2

NATIVE, SIMULATED, PLAIN = "demo", "simulated", "plain"
KEYS = {"free": "free-key", "shared": "shared-key", "slow": "slow-key"}
ADMIN_KEY = "admin-key"
KEYS_FILE = "".join(f'[keys.{name}]\nkey = "{key}"\n' for name, key in KEYS.items() if name != "slow") + (
    f'[keys.slow]\nkey = "{KEYS["slow"]}"\nrequests_per_minute = 60\n[keys.admin]\nkey = "{ADMIN_KEY}"\nadmin = true\n'
)
IN_FLIGHT = 48
TALKS = 48
LONGEST_TALK = 12
FILL_PER_S = 26.0
FILL_MESSAGES = 13
PATIENCE_S = 120.0
LETTERS = "".join(map(chr, (*range(97, 123), *range(0x430, 0x450), *range(0x4E00, 0x4E20))))  # of 1 to 3 bytes
PAGES = (
    "/metrics",
    "/replicas",
    "/decisions?limit=50",
    "/prefixes",
    "/v1/models",
    "/ready",
    "/dashboard",
    "/debug/index",
)


class Talk:
    """A conversation that continues until it is long."""

    def __init__(self, model: str, system: str) -> None:
        self.model = model
        self.messages = [{"role": "system", "content": system}]


class Traffic:
    def __init__(self, http: httpx2.AsyncClient, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._http = http
        self._seed = seed
        self._systems = [words(random.Random(f"{seed} system {number}"), 120) for number in range(6)]
        self._talks: defaultdict[str | None, list[Talk]] = defaultdict(list)  # by requested model

    async def run(self, per_s: float, span_s: float, fill_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._begin(KINDS, per_s, span_s))
            group.create_task(self._begin(FILLING, FILL_PER_S, fill_s))

    async def _begin(self, kinds: "Kinds", per_s: float, span_s: float) -> None:
        """Start requests one after another for `span_s` seconds."""
        clock = asyncio.get_running_loop().time
        running: set[asyncio.Task[None]] = set()
        number, due_s = 0, clock()
        end_s = due_s + span_s
        while due_s < end_s:
            await asyncio.sleep(max(0.0, due_s - clock()))
            chance = random.Random(f"{self._seed} {[*kinds]} {number}")
            if len(running) < IN_FLIGHT:
                task = asyncio.create_task(self._one(kinds, chance))
                running.add(task)
                task.add_done_callback(running.discard)
            else:
                self.counts["left out"] += 1
            number += 1
            due_s += chance.expovariate(per_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _one(self, kinds: "Kinds", chance: random.Random) -> None:
        [kind] = chance.choices([*kinds], [weight for weight, _ in kinds.values()])
        try:
            async with asyncio.timeout(PATIENCE_S):
                await kinds[kind][1](self, chance)
        except TimeoutError:
            self.counts["given up"] += 1
        except httpx2.TransportError:  # a client that left, an answer that was cut
            self.counts["cut"] += 1
        self.counts[kind] += 1

    # ---- requests that fill caches

    async def messages(self, chance: random.Random) -> None:
        """Text for the router to tokenize, and nothing else."""
        messages = [{"role": "user", "content": words(chance, chance.randint(5, 60))} for _ in range(FILL_MESSAGES)]
        await self._administer("/explain", {"model": NATIVE, "messages": messages})

    async def pretended(self, chance: random.Random) -> None:
        """A usual request, for an engine that only pretends to compute."""
        [ask] = chance.choices((self.turn, self.long_prompt, self.completion), (30, 8, 15))
        await ask(chance, chance.choice((SIMULATED, PLAIN)))

    # ---- requests that are answered

    async def turn(self, chance: random.Random, model: str | None = None) -> None:
        """The next turn of one of many conversations, or the first of a new one."""
        talks = self._talks[model]
        if len(talks) < TALKS:
            talk = Talk(model or model_of(chance), chance.choice(self._systems))
        else:
            talk = talks.pop(chance.randrange(len(talks)))
        talk.messages.append({"role": "user", "content": words(chance, chance.randint(5, 60))})
        answer = await self._generate(chance, {"model": talk.model, "messages": talk.messages})
        if answer and len(talk.messages) < LONGEST_TALK:
            talk.messages.append({"role": "assistant", "content": answer})
            talks.append(talk)

    async def long_prompt(self, chance: random.Random, model: str | None = None) -> None:
        """Send a new document; mostly to engines that only simulate reading it."""
        if model is None:
            model = NATIVE if chance.random() < 0.1 else chance.choice((SIMULATED, PLAIN))
        messages = [{"role": "user", "content": words(chance, 300 if model == NATIVE else chance.randint(250, 600))}]
        await self._generate(chance, {"model": model, "messages": messages})

    async def completion(self, chance: random.Random, model: str | None = None) -> None:
        prompt: Any = words(chance, chance.randint(3, 80))
        if chance.random() < 0.4:
            prompt = [chance.randrange(3, 250) for _ in range(chance.randint(5, 400))]
        await self._generate(chance, {"model": model or model_of(chance), "prompt": prompt})

    async def leave(self, chance: random.Random) -> None:
        """Leave in the middle of a stream, or before it begins."""
        body = {"model": model_of(chance), "prompt": words(chance, 20), "max_tokens": 200, "stream": True}
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.uniform(0.01, 1.0)):
                await self._post(chance, "/v1/completions", body)

    async def _generate(self, chance: random.Random, asked: dict[str, Any]) -> str:
        """Ask for a generation; return text for the next turn, or "" if there was no answer to continue."""
        body = asked | {"max_tokens": chance.randint(1, 24), "stream": chance.random() < 0.7} | options(chance)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        answer = await self._post(chance, path, body)
        return "" if answer is None else words(chance, 20)

    # ---- requests that are refused

    async def malformed(self, chance: random.Random) -> None:
        """Status 400, each for another reason and with other text in it."""
        junk = words(chance, chance.randint(1, 200))
        body = chance.choice(
            (
                junk.encode(),
                json.dumps({"model": NATIVE, "messages": junk}).encode(),
                json.dumps({"model": NATIVE, "messages": [{"role": junk, "content": junk}]}).encode(),
                json.dumps({"model": NATIVE, "prompt": junk, "max_tokens": junk}).encode(),
                json.dumps({"model": NATIVE, "prompt": junk, junk: junk, "max_tokens": 10**7}).encode(),
                json.dumps({"model": NATIVE, "prompt": junk, "tools": [{junk: junk}]}).encode(),
                b'{"a":' * chance.randint(1, 3000),
                chance.randbytes(chance.randint(1, 4000)),
            )
        )
        await self._post(chance, chance.choice(("/v1/chat/completions", "/v1/completions")), body)

    async def unknown_model(self, chance: random.Random) -> None:
        """Ask for an unknown model or adapter."""
        name = chance.choice(("", f"{NATIVE}:", "adapter-")) + words(chance, 1)
        await self._post(chance, "/v1/completions", {"model": name, "prompt": "x"})

    async def forwarded(self, chance: random.Random) -> None:
        """Send a request that no replica here can answer: embeddings, rerank or an unknown path."""
        path = chance.choice(("/v1/embeddings", "/v1/rerank", f"/v1/{words(chance, 1)}", f"/v1/{words(chance, 1)}"))
        await self._post(chance, path, {"model": model_of(chance), "input": words(chance, 30)})

    async def stranger(self, chance: random.Random) -> None:
        """Send a request without a key, or with an unknown one."""
        headers = {"authorization": f"Bearer {chance.randbytes(16).hex()}"} if chance.random() < 0.7 else {}
        await self._http.post("/v1/completions", json={"model": NATIVE, "prompt": "x"}, headers=headers)

    async def nowhere(self, chance: random.Random) -> None:
        method = chance.choice(("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"))
        path = f"/{words(chance, 1)}/{words(chance, 1)}?{words(chance, 1)}={words(chance, 1)}"
        await self._http.request(method, path, headers=headers_of(chance))

    # ---- readers

    async def page(self, chance: random.Random) -> None:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        await self._http.get(chance.choice(PAGES), headers=headers)
        await self._http.get(f"/decisions/{words(chance, 1)}", headers=headers)

    async def explain(self, chance: random.Random) -> None:
        await self._administer("/explain", {"model": model_of(chance), "prompt": words(chance, 50)})

    async def watch(self, chance: random.Random) -> None:
        """Keep a dashboard open for some seconds."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(chance.uniform(0.1, 20)),
                self._http.stream("GET", "/dashboard/feed", headers=headers) as feed,
            ):
                async for _ in feed.aiter_raw():
                    pass

    async def _administer(self, path: str, body: dict[str, Any]) -> None:
        answer = await self._http.post(path, json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"})
        self.counts[f"status {answer.status_code}"] += 1

    async def _post(self, chance: random.Random, path: str, body: dict[str, Any] | bytes) -> bytes | None:
        """The body of a good answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self._http.post(path, content=content, headers=headers_of(chance))
        self.counts[f"status {answer.status_code}"] += 1
        return answer.content if answer.status_code == 200 else None


Kinds: TypeAlias = dict[str, tuple[float, Callable[[Traffic, random.Random], Awaitable[None]]]]  # weight and request
FILLING: Kinds = {"messages": (6, Traffic.messages), "pretended": (20, Traffic.pretended)}
KINDS: Kinds = {
    "turn": (30, Traffic.turn),
    "long prompt": (8, Traffic.long_prompt),
    "completion": (15, Traffic.completion),
    "leave": (8, Traffic.leave),
    "malformed": (10, Traffic.malformed),
    "unknown model": (5, Traffic.unknown_model),
    "forwarded": (5, Traffic.forwarded),
    "stranger": (5, Traffic.stranger),
    "nowhere": (5, Traffic.nowhere),
    "page": (6, Traffic.page),
    "explain": (2, Traffic.explain),
    "watch": (1, Traffic.watch),
}


def words(chance: random.Random, count: int) -> str:
    """Most of them made up, so that no cache knows them."""
    return " ".join("".join(chance.choices(LETTERS, k=chance.randint(2, 9))) for _ in range(count))


def model_of(chance: random.Random) -> str:
    return chance.choices((NATIVE, SIMULATED, PLAIN), (2, 5, 3))[0]


def headers_of(chance: random.Random) -> dict[str, str]:
    headers = {"authorization": f"Bearer {chance.choices([*KEYS.values()], (10, 10, 1))[0]}"}
    if chance.random() < 0.5:
        headers["x-request-id"] = chance.randbytes(16).hex()
    if chance.random() < 0.3:
        headers["x-session-id"] = chance.randbytes(8).hex()
    if chance.random() < 0.3:
        headers["traceparent"] = f"00-{chance.randbytes(16).hex()}-{chance.randbytes(8).hex()}-01"
    if chance.random() < 0.1:
        headers[f"x-{chance.randbytes(8).hex()}"] = chance.randbytes(200).hex()
    return headers


def options(chance: random.Random) -> dict[str, Any]:
    """Draw optional fields of a generation request."""
    each: tuple[dict[str, Any], ...] = (
        {"cache_salt": chance.randbytes(8).hex()},
        {"user": chance.randbytes(8).hex()},
        {"stop": [words(chance, 1)]},
        {"n": 2},
        {"seed": chance.randrange(10**6)},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"logit_bias": {str(chance.randrange(200)): 2.0}},
        {"temperature": 0},
    )
    return {name: value for option in chance.sample(each, chance.randint(0, 3)) for name, value in option.items()}
