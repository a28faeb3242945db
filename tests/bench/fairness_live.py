"""Measure one tenant's flood beside nine others in a whole router, before four simulated replicas.

The nine ask at a steady rate, half of what the replicas can compute. From a sixth of the time on, the tenth sends ten
times its share: as much as all replicas can compute, in cold prompts. A time to first token is that of an answer of one
token. Linux only.
"""

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import httpx2

from lab.percentiles import percentile
from tests.bench.measure import heading
from tests.chaos.routers import RouterProcess, fleet, router
from tests.replica.serving import MODEL

REPLICAS, RATE = 4, 4000
STEP_TOKENS = 512  # 0.13 s: who comes waits for the step that runs
SIMULATED = (
    *("--engine", "simulated", "--served-model-name", MODEL, "--model", "demo", "--set=simulated_step_overhead=0"),
    *(f"--set=simulated_prefill_tokens_per_s={RATE}", "--set=simulated_decode_tokens_per_s=5000"),
    *("--max-num-batched-tokens", STEP_TOKENS),
)
NINE, FLOOD = [f"tenant-{number}" for number in range(9)], "flood"
NINES_TOKENS, FLOODS_TOKENS = 600, 1600  # of a prompt, each a byte, with what the chat template adds
NINES_PER_S = 0.5 * REPLICAS * RATE / NINES_TOKENS
FLOODS_PER_S = REPLICAS * RATE / FLOODS_TOKENS
FOR_S = 30.0
KEYS = "\n".join(f'[keys.{name}]\nkey = "{name}"' for name in (*NINE, FLOOD))
CLASSES = "\n".join(f'[keys.{name}]\nkey = "{name}"\nclass = "interactive"' for name in NINE)


class Way(NamedTuple):
    name: str
    keys: str
    has_flood: bool = True
    one_key: bool = False  # all are one tenant


WAYS = (
    Way("no flood", KEYS, has_flood=False),
    Way("flood, one key for all", KEYS, one_key=True),
    Way("flood, fair shares", KEYS),
    Way("flood, classes", f'{CLASSES}\n[keys.{FLOOD}]\nkey = "{FLOOD}"\nclass = "batch"'),
)


def run(rounds: int) -> None:
    del rounds  # once is long enough
    heading("time to first token of nine tenants, mean and 99th percentile; refused, and the flood's answers")
    with tempfile.TemporaryDirectory() as folder, fleet(REPLICAS, *SIMULATED) as replicas:
        for way in WAYS:
            path = Path(folder) / "keys.toml"
            path.write_text(way.keys)
            with router(*replicas.as_options, "--api-keys", path, "--log-level", "error") as running:
                asyncio.run(measure(way, running))
            for replica in replicas.replicas:
                replica.wait_idle()


async def measure(way: Way, running: RouterProcess) -> None:
    chance = random.Random(way.name)
    nine_keys = [FLOOD] if way.one_key else NINE
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=running.url, timeout=120, limits=limits) as client:
        nine: list[float | None] = []
        flood: list[float | None] = []
        tasks = [asyncio.create_task(sends(client, nine_keys, NINES_PER_S, NINES_TOKENS, 0.0, nine, chance))]
        if way.has_flood:
            late_s = FOR_S / 6
            tasks.append(
                asyncio.create_task(sends(client, [FLOOD], FLOODS_PER_S, FLOODS_TOKENS, late_s, flood, chance))
            )
        await asyncio.gather(*tasks)
    times = sorted(one for one in nine[len(nine) // 6 :] if one is not None)
    answered = sum(one is not None for one in flood)
    print(
        f"| {way.name} | **{1e3 * fmean(times):,.0f}** ms, {1e3 * percentile(times, 0.99):,.0f} ms; "
        f"{nine.count(None)} of {len(nine)} refused; {answered} of {len(flood)} of the flood's answered | |",
        flush=True,
    )


async def sends(
    client: httpx2.AsyncClient,
    tenants: Sequence[str],
    per_s: float,
    tokens: int,
    from_s: float,
    seconds: list[float | None],
    chance: random.Random,
) -> None:
    """Ask at a steady rate, whether earlier requests are answered or not; None: refused."""
    began_s, asked = time.monotonic(), []
    for number in range(int(per_s * (FOR_S - from_s))):
        await asyncio.sleep(max(0.0, began_s + from_s + number / per_s - time.monotonic()))
        text = "".join(chance.choices("abcdefghij ", k=tokens - 40))
        seconds.append(None)
        asked.append(asyncio.create_task(ask(client, tenants[number % len(tenants)], text, seconds, len(seconds) - 1)))
    await asyncio.gather(*asked)


async def ask(client: httpx2.AsyncClient, key: str, text: str, seconds: list[float | None], place: int) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    began_s = time.monotonic()
    answer = await client.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code in (200, 429, 503), answer.text
    if answer.status_code == 200:
        seconds[place] = time.monotonic() - began_s
