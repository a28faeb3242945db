"""Memory under hours of mixed load: a router and its replicas as users run them, sampled from outside.

    python -m tests.bench soak --minutes 60 --out docs

draws soak.svg and prints a table of growth; build/soak/soak.csv has the samples. About half a core is used. Linux only:
reads /proc.
"""

import asyncio
import time
from contextlib import ExitStack
from pathlib import Path

import httpx2

from replica.model.demo import demo_folder
from tests.bench.soak import memory
from tests.bench.soak.traffic import KEYS_FILE, NATIVE, PLAIN, SIMULATED, Traffic
from tests.chaos.replicas import Command, command, cpu_s
from tests.chaos.routers import router
from tests.events.processes import wait_until

SEED = 20
REQUESTS_PER_S = 10.0
FILL_S = 400.0
SAMPLES_PER_RUN = 720
OUT = Path("build/soak")
# 1,024 blocks of 16 tokens are too few for all conversations: some are evicted all the time. What is kept for replays
# is full within minutes, instead of hours.
POOL = ("--num-blocks", 1024, "--set=events_replay_mib=1")
SPEED = ("--set=simulated_prefill_tokens_per_s=50_000", "--set=simulated_decode_tokens_per_s=100")
QUIET = ("--log-level", "error")


def run(rounds: int, *, minutes: float = 60.0, out: Path = OUT) -> None:
    del rounds  # one is long enough
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "soak.csv").open("w", newline="") as file, ExitStack() as stack:
        samples = memory.Samples(file)
        processes, url = begin(stack)
        began_s, before_s = time.monotonic(), {name: cpu_s(pid) for name, pid in processes.items()}
        traffic = asyncio.run(soak(url, processes, minutes * 60, samples))
        spent = {name: cpu_s(pid) - before_s[name] for name, pid in processes.items()}
    memory.draw(out / "soak.svg", samples, f"Memory over {minutes:g} minutes of mixed load")
    print(memory.table(memory.growth(samples)))
    took_s = time.monotonic() - began_s
    print("\nCPU, % of a core: " + ", ".join(f"{name} {100 * used / took_s:.1f}" for name, used in spent.items()))
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(traffic.counts.items())))
    print(f"\n{OUT / 'soak.csv'} and {out / 'soak.svg'} are written")


def begin(stack: ExitStack) -> tuple[dict[str, int], str]:
    """The process ids by name, and the router's URL."""
    keys = OUT / "keys.toml"
    keys.write_text(KEYS_FILE)
    native = stack.enter_context(command("--engine", "native", *POOL, *QUIET, ready=False))
    simulated = stack.enter_context(command("--served-model-name", SIMULATED, *POOL, *SPEED, *QUIET, ready=False))
    plain = stack.enter_context(command("--served-model-name", PLAIN, *POOL, *SPEED, *QUIET, ready=False))
    replicas = {"native": native, "simulated": simulated, "plain": plain}
    for one in replicas.values():
        one.wait_ready()
    told = ("--model-dir", f"{NATIVE}={demo_folder()}", "--api-keys", keys, "--show-prompts")
    front = stack.enter_context(router(*options_of(replicas), *told, *QUIET, ready=False))
    wait_until(lambda: front.get("/ready").status == 200, "the router is ready")
    processes = {"router": front.process.pid}
    for name, one in replicas.items():
        processes |= {f"{name}, HTTP": one.process.pid, f"{name}, engine": one.engine_pid}
    return processes, front.url


def options_of(replicas: dict[str, Command]) -> list[str]:
    """The plain replica is an engine with only OpenAI's API."""
    specs = {name: f"url={one.url},name={name}" for name, one in replicas.items()}
    specs["plain"] += f",engine=openai,model={PLAIN}"
    return [text for spec in specs.values() for text in ("--replica", spec)]


async def soak(url: str, processes: dict[str, int], span_s: float, samples: memory.Samples) -> Traffic:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=16)
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        traffic, clock = Traffic(http, SEED), asyncio.get_running_loop().time
        began_s = clock()
        load = asyncio.create_task(traffic.run(REQUESTS_PER_S, span_s, min(FILL_S, span_s / 2)))
        while not load.done():
            samples.take(clock() - began_s, processes)
            await asyncio.wait([load], timeout=max(1.0, span_s / SAMPLES_PER_RUN))
        load.result()
    return traffic
