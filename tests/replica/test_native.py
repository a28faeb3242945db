"""The native engine's cache, and the memory of a native replica after thousands of requests."""

import asyncio
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from events.blocks import pack_tokens
from replica.build import build
from replica.cache.chain import Chain
from replica.config import EngineConfig, LoraModule
from replica.engine.engine import Engine
from replica.messages import Sampling, Submit
from replica.model.config import read_config
from replica.runners.request import Request
from tests.chaos.replicas import resident_bytes
from tests.events.processes import wait_until
from tests.replica.engines import MODEL, SIZE, chain, forged
from tests.replica.lora.adapters import saved_adapter
from tests.replica.models import VOCABULARY, Answer, finish, saved
from tests.replica.models import ask as ask_engine
from tests.replica.models import native as engine_of
from tests.replica.natives import SMALL, Native, ask, completion, failed, native, tokens

real_processes = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
GREEDY = Sampling(max_tokens=12, temperature=0.0, top_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3", tmp_path_factory.mktemp("models"))


def small(folder: Path, **changes: Any) -> Engine:
    return engine_of(folder, **{"model": MODEL, "block_size": SIZE, **changes})


def prompt(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCABULARY) for _ in range(length)]


def serve(engine: Engine, of: Chain) -> Answer:
    """A request with a chain of our own making."""
    engine.scheduler.submit(Request(1, of, len(of), GREEDY, (0.0, 0)))
    return finish(engine)[1]


# ---- what must never hit

VICTIM, OTHER = prompt(42, 1), prompt(42, 2)


def test_another_lora_name_never_hits(folder: Path) -> None:
    files = str(saved_adapter("qwen3", "all", folder.parent))
    engine = small(folder, lora_modules=tuple(LoraModule(name, files) for name in ("a", "b", "A", "a ", "c")))

    def cached(asked: Sequence[int], lora_name: str | None) -> int:
        engine.submit(Submit(1, pack_tokens(asked), GREEDY, lora_name=lora_name))
        return finish(engine)[1].cached_tokens

    names = (None, "a", "b", "A", "a ")
    assert [cached(VICTIM, name) for name in names] == [0] * len(names)
    assert [cached(VICTIM, name) for name in names] == [len(VICTIM) - 1] * len(names)
    fork = [*VICTIM[:30], *OTHER[:6]]
    assert [cached(fork, name) for name in ("c", "a")] == [0, 30]  # whole blocks and a part, or nothing at all


@pytest.mark.parametrize("partial", [False, True], ids=["whole blocks", "partial"])
def test_a_forged_hash_never_hits(folder: Path, partial: bool) -> None:
    expected = serve(small(folder, enable_prefix_caching=False), chain(OTHER))
    engine = small(folder, enable_partial_reuse=partial)
    victim = chain(VICTIM)
    serve(engine, victim)
    for forgery in (forged(OTHER, victim), forged([*VICTIM[:8], *OTHER[8:]], victim)):
        known = 8 if forgery.tokens[:8] == victim.tokens[:8] else 0
        plain = serve(small(folder, enable_prefix_caching=False), chain(forgery.tokens))
        answer = serve(engine, forgery)
        assert (answer.token_ids, answer.logprobs) == (plain.token_ids, plain.logprobs)
        assert answer.cached_tokens == known
    assert engine.pool.collisions_refused
    thief = serve(engine, forged(VICTIM, victim, cache_salt="of a thief"))
    assert thief.cached_tokens == 0
    assert serve(engine, chain(OTHER)).token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"enable_prefix_caching": False, "enable_partial_reuse": False}, (0, 0)),
        ({"enable_partial_reuse": False}, (64, 32)),
        ({}, (74, 37)),
    ],
    ids=["off", "whole blocks", "partial"],
)
def test_as_much_is_cached_as_the_settings_say(folder: Path, settings: dict[str, Any], found: tuple[int, int]) -> None:
    engine, shared = engine_of(folder, **settings), prompt(75, 5)
    ask_engine(engine, [shared])
    again, fork = (ask_engine(engine, [asked])[0].cached_tokens for asked in (shared, [*shared[:37], 5, 6, 7]))
    assert (again, fork) == found


# ---- what a process holds

SHORT, EARLY = 2_500, 700  # requests
GROWTH_BYTES = 3 * 2**20
FULL_EARLY = ("--host-kv-gb", 0.004)  # host memory is taken as blocks come
ROWS, CHOICES = 64, 16  # the most in a step
STREAMS, STORMS = 48, 6
CLIENTS = 32
CHECKED = ("--log-level", "info")


def short(chance: random.Random) -> dict[str, Any]:
    """Each kind of request that has its own memory."""
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1, "seed": chance.randrange(99), "top_p": 0.9},
        {"logprobs": 3, "repetition_penalty": 1.2},
        {"n": 2, "temperature": 1, "stop": ["a"]},
        {"prompt_logprobs": 1},
        {"cache_salt": str(chance.randrange(50))},
    )
    asked = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 40))]
    return completion(asked, max_tokens=chance.randint(1, 4), **chance.choice(kinds))


def held(served: Native) -> list[int]:
    served.wait_idle()
    return [resident_bytes(pid) for pid in (served.process.pid, served.engine_pid)]


def meet_all_numbers_of_rows(served: Native) -> None:
    """oneDNN keeps code for each number of rows that it has met, up to a limit; so many are met only by chance."""
    chance = random.Random(3)
    for rows in range(1, ROWS + 1):
        asked = [chance.randrange(VOCABULARY) for _ in range(rows)]
        tokens(served, asked, max_tokens=1, prompt_logprobs=1)
    for choices in range(1, CHOICES + 1):
        ask(served, [1], max_tokens=3, n=choices)


@pytest.mark.chaos
@pytest.mark.timeout(300)
@real_processes
def test_memory_is_flat_over_thousands_of_requests(folder: Path) -> None:
    chance = random.Random(1)
    with native(folder, *SMALL, *CHECKED, *FULL_EARLY) as served:
        meet_all_numbers_of_rows(served)
        asyncio.run(ask_all(served.port, [short(chance) for _ in range(EARLY)]))
        before = held(served)
        asyncio.run(ask_all(served.port, [short(chance) for _ in range(SHORT - EARLY)]))
        grown = [after - early for after, early in zip(held(served), before, strict=True)]
        served.check()
    assert max(grown) < GROWTH_BYTES, grown


def as_http(asked: dict[str, Any]) -> bytes:
    raw = json.dumps(asked).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: replica\r\nContent-Length: %d\r\n\r\n%b" % (len(raw), raw)


async def ask_all(port: int, bodies: list[dict[str, Any]]) -> None:
    waiting = iter(bodies)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:

        async def ask_in_turn() -> None:
            for asked in waiting:
                assert (await http.post("/v1/completions", json=asked)).status_code == 200

        await asyncio.gather(*(ask_in_turn() for _ in range(CLIENTS)))


async def storm(port: int, chance: random.Random) -> None:
    """Streams that their clients leave: at once, in the middle of the prefill, or of the answer."""

    async def leave_early() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked = [chance.randrange(VOCABULARY) for _ in range(chance.choice([3, 60, 200]))]
        writer.write(as_http(completion(asked, stream=True, max_tokens=300, n=chance.randint(1, 3))))
        if chance.random() < 0.7:
            await reader.read(chance.choice([1, 1000, 5000]))
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(leave_early() for _ in range(STREAMS)))


@pytest.mark.chaos
@real_processes
def test_everything_comes_back_after_storms_of_cancels(folder: Path) -> None:
    chance, asked = random.Random(2), prompt(100, 3)
    with native(folder, *SMALL, *CHECKED) as served:
        expected = tokens(served, asked)
        for _ in range(STORMS):
            asyncio.run(storm(served.port, chance))
            served.check()
        served.wait_idle()
        pool = served.load()["pool"]
        assert (pool["free"], pool["referenced"]) == (pool["total"], 0)
        assert tokens(served, asked) == expected
        wait_until(lambda: served.post("/reset_prefix_cache").status == 200, "nothing is used")
        assert tokens(served, asked) == expected


# ---- where nothing is said


def test_on_a_cpu_the_cache_has_a_gigabyte_if_nothing_is_reported(folder: Path) -> None:
    runner = build(EngineConfig(model="m", model_path=str(folder), num_blocks=0, device="cpu"))
    kv_bytes = runner.num_blocks * 16 * read_config(folder).kv_bytes_per_token("float32")
    assert 0.99e9 < kv_bytes <= 1e9


def test_more_blocks_than_memory_are_refused(folder: Path) -> None:
    with pytest.raises(MemoryError, match="lower --kv-cache-gb or --num-blocks"):
        engine_of(folder, num_blocks=10**9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_reported(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--device cuda: torch .* sees no GPU here; use --device cpu, or fix it"):
        engine_of(folder, device="cuda")
    status, said = failed("--model", folder, "--device", "cuda")
    assert status == 1 and "Error: the engine cannot start: --device cuda: torch" in said
