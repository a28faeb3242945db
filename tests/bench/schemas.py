"""Answers to random schemas over HTTP: streams through a router with two replicas of a small model, one of them killed.

The model says anything with about the same likelihood, so its answers show the schemas' forms and nothing else.
"""

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import jsonschema  # type: ignore[import-untyped]

from replica.model.demo import TEXTS
from tests.chaos.replicas import wait_gone
from tests.chaos.routers import Fleet, RouterProcess, events_in, fleet, http_client, router
from tests.replica.test_schemas import MAX_TOKENS, random_root, save_babbler

PATH = "/v1/chat/completions"
MODEL = "babbler"
NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

TOGETHER = 48  # streams; a replica lets 64 constraints wait
SCHEMAS = 1000


class Answered(NamedTuple):
    text: str
    finish_reason: str
    events: int


def model_folder(folder: Path) -> Path:
    made = save_babbler(folder / MODEL)
    for name in NAMES:
        shutil.copy(TEXTS / name, made)
    return made


def options(model: Path) -> tuple[object, ...]:
    return ("--model", model, "--engine", "native", "--served-model-name", MODEL, "--num-blocks", 4096)


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Fleet, RouterProcess, httpx2.AsyncClient]]:
    model = model_folder(folder)
    with (
        fleet(2, *options(model)) as replicas,
        router(*replicas.as_options, "--model-dir", f"{MODEL}={model}", "--log-level", "error") as running,
    ):
        async with http_client(running.url, timeout_s=120.0) as http:
            yield replicas, running, http


def schema_of(seed: int) -> dict[str, Any]:
    """A list of values of a random schema, so long that many answers are under way at once."""
    root = random_root(seed)
    definitions = {"$defs": root.pop("$defs")} if "$defs" in root else {}
    return {"type": "array", "items": root, "minItems": 4, "maxItems": 5, **definitions}


async def answer(http: httpx2.AsyncClient, seed: int, progress: "Progress") -> Answered:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema_of(seed)}},
        "max_tokens": MAX_TOKENS,
        "seed": seed,
        "stream": True,
    }
    heard = bytearray()
    async with http.stream("POST", PATH, json=body) as response:
        async for piece in response.aiter_raw():
            heard += piece
            progress.add(piece.count(b"data: "))
    assert response.status_code == 200, bytes(heard)
    choices = [event["choices"][0] for event in events_in(bytes(heard))]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Answered(text, choices[-1]["finish_reason"], len(choices))


class Progress:
    """The events of a batch of streams so far; `reached` is set at so many."""

    def __init__(self, awaited: int = 0) -> None:
        self._left = awaited
        self.reached = asyncio.Event()

    def add(self, events: int) -> None:
        self._left -= events
        if self._left <= 0:
            self.reached.set()


async def answers(http: httpx2.AsyncClient, seeds: Sequence[int]) -> list[Answered]:
    """The undisturbed answers, each of them valid."""
    progress = Progress()
    found = await asyncio.gather(*(answer(http, seed, progress) for seed in seeds))
    for seed, one in zip(seeds, found, strict=True):
        assert one.finish_reason == "stop", (seed, one)
        jsonschema.Draft202012Validator(schema_of(seed)).validate(json.loads(one.text))
    return found


async def answers_with_a_kill(
    http: httpx2.AsyncClient, seeds: Sequence[int], replicas: Fleet, number: int, events: int
) -> list[Answered]:
    """The answers if one replica begins all of them, and its engine is killed once so many events have come."""
    other = f"/replicas/r{1 - number}"
    assert (await http.post(f"{other}/drain")).status_code == 200
    progress = Progress(events)
    streams = asyncio.gather(*(answer(http, seed, progress) for seed in seeds))
    await progress.reached.wait()
    assert (await http.post(f"{other}/undrain")).status_code == 200
    kill_engine(replicas, number)
    found = await streams
    await asyncio.to_thread(start_again, replicas, number)
    return found


def kill_engine(replicas: Fleet, number: int) -> None:
    os.kill(replicas[number].engine_pid, signal.SIGKILL)


def start_again(replicas: Fleet, number: int) -> None:
    """Put a whole replica in the place of one without an engine."""
    replica = replicas[number]
    replica.process.kill()
    replica.process.wait()
    wait_gone(replica.process.pid)
    replicas.start(number)


def batches(count: int, together: int) -> Iterator[range]:
    for start in range(0, count, together):
        yield range(start, min(start + together, count))


class Report(NamedTuple):
    answers: int
    tokens: int
    kills: int
    resumed: int  # answers that another replica went on with


async def check(folder: Path, count: int, together: int) -> Report:
    """Ask for answers to so many schemas, twice each; raise AssertionError unless they are valid, and equal."""
    tokens = resumed = kills = 0
    async with served(folder) as (replicas, running, http):
        for number, seeds in enumerate(batches(count, together)):
            plain = await answers(http, seeds)
            events = sum(one.events for one in plain)
            killed = await answers_with_a_kill(http, seeds, replicas, number % 2, events // 4)
            assert [one[:2] for one in killed] == [one[:2] for one in plain], seeds
            tokens, kills = tokens + events, kills + 1
            resumed += sum(one["resumes"] > 0 for one in running.decisions(len(seeds)))
    return Report(count, tokens, kills, resumed)


def run(rounds: int) -> None:
    del rounds  # one is long enough
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        found = asyncio.run(check(Path(folder), SCHEMAS, TOGETHER))
    print(f"{found.answers:,} schemas, each answered twice: all valid, and the same with a kill as without")
    print(f"{found.tokens:,} events, {found.kills} kills, {found.resumed} answers went on elsewhere", end="; ")
    print(f"{time.monotonic() - began_s:.0f} s")
