"""Print what it costs to ask vLLM for the tokens of prompts, in conversations of 20 turns.

Cold: nothing is known of such conversations. Warm: others like them have gone before. Made here: the router has the
model's tokenizer, and asks for nothing. The engine's time is the CPU time of its API server.
"""

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2

from qualification.engines.engine import MODEL, Engine, ready
from qualification.engines.printing import check
from qualification.engines.traffic import words
from tests.chaos.routers import RouterProcess, router

TURNS = 20
FIGURE = re.compile(r'^warmroute_router:(?:token_|asked_)(\w+?)(?:\{(?:outcome|about)="(\w+)"\})? ([\d.e-]+)$', re.M)


def figures(front: RouterProcess) -> dict[str, float]:
    text = front.get("/metrics").body.decode()
    return {f"{name} {what}".strip(): float(value) for name, what, value in FIGURE.findall(text)}


def cpu_s(engine: Engine) -> float:
    fields = Path(f"/proc/{engine.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def talk(url: str, clients: int, seed: int, pause_s: float) -> float:
    """Have conversations, one for each client; return the seconds that a request has taken in the mean."""
    async with httpx2.AsyncClient(base_url=url, timeout=120) as client:

        async def one_client(number: int) -> float:
            rng, took_s = random.Random(seed * 1000 + number), 0.0
            messages: list[dict[str, Any]] = [{"role": "system", "content": words(rng, 150, 150)}]
            for _ in range(TURNS):
                await asyncio.sleep(rng.uniform(0, pause_s))
                messages.append({"role": "user", "content": words(rng, 20, 40)})
                began_s = time.monotonic()
                asked = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
                answer = await client.post("/v1/chat/completions", json=asked)
                took_s += time.monotonic() - began_s
                messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
            return took_s

        return sum(await asyncio.gather(*map(one_client, range(clients)))) / clients / TURNS


def run(engine: Engine, clients: int, pause_s: float, options: tuple[str, ...]) -> None:
    with router("--replica", f"url={engine.url},engine=vllm", *options, within_s=60) as front:
        for seed, state in enumerate(("made here",) if options else ("cold", "warm")):
            before, began_s = figures(front), cpu_s(engine)
            took_s = asyncio.run(talk(front.url, clients, seed + clients, pause_s))
            spent_s = cpu_s(engine) - began_s
            more = {name: value - before.get(name, 0.0) for name, value in figures(front).items()}
            count, asked = clients * TURNS, more.get("answer_seconds_count", 0.0)
            each_ms = 1000 * more.get("answer_seconds_sum", 0.0) / max(asked, 1)
            exact = sum(one["tokens_exact"] for one in front.decisions(count))
            kinds = " | ".join(f"{more.get(f'questions_total {kind}', 0) / count:.2f}" for kind in ("whole", "new"))
            print(
                f"| {clients} | {state} | {more.get('prompts_total told', 0):.0f} of {count} | {exact} | {kinds} | "
                f"{each_ms:.1f} ms | {1000 * took_s:.0f} ms | {1000 * spent_s / count:.1f} ms |",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m qualification.engines.asking", description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32], metavar="N", help="(default: 1 and 32)")
    parser.add_argument("--pause", type=float, default=2.0, metavar="S", help="the longest before a turn (default: 2)")
    args = parser.parse_args()
    check(parser, (), (), "row")
    print("| clients | | told | exact | whole | new | a question | a request | engine's time |\n" + "| --- " * 9 + "|")
    with tempfile.TemporaryDirectory() as folder:
        options = ("--enable-scale-out", "--max-num-batched-tokens", "8192")
        with ready(Engine(Path(folder) / "hits.jsonl", {}, options, blocks=8192)) as engine:
            for clients in args.clients:
                run(engine, clients, args.pause, ())
                run(engine, clients, args.pause, ("--model-dir", f"{MODEL}={engine.folder / 'model'}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
