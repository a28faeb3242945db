"""`warmroute prove` in front of routers of several makes, each before four replicas of its own.

The others are those of `tests.bench.peers`. It takes some minutes, and a row is one run.
`python -m qualification.engines.proved` does the same with real vLLM.
"""

import subprocess
import sys

import msgspec

from api.process.lifeline import module
from lab.shadow.proof import Certificate
from tests.bench.peers import BLOCK_TOKENS, PEERS, REPLICAS, Peer, beside, ours
from tests.chaos.routers import fleet

REQUESTS, CLIENTS, BLOCKS = 400, 8, 640
SPEEDS = (
    *("--block-size", BLOCK_TOKENS, "--num-blocks", BLOCKS, "--max-model-len", 8192, "--max-num-batched-tokens", 512),
    *("--set=simulated_prefill_tokens_per_s=8_000", "--set=simulated_decode_tokens_per_s=2000"),
)
COLUMNS = (
    "verdict",
    "answers as the events say, changed on the way, different, unknown",
    "predictions called exact, right, wrong",
    "cached: told",
    "counted",
    "by the events at first",
    "at the best",
    "in one pool",
    "elsewhere",
    "evicted",
)


def present() -> list[Peer]:
    return [peer for peer in PEERS if not (why := peer.absent()) or print(f"{peer.name}: {why}")]


def heading(what: str) -> None:
    print(f"{what}\n\n| router | {' | '.join(COLUMNS)} |\n| --- {'| --- ' * len(COLUMNS)}|")


def row(name: str, url: str, *options: object) -> None:
    command = module("fleet", "prove", url, "--concurrency", str(CLIENTS), "--json", *map(str, options))
    done = subprocess.run(command, capture_output=True, check=False)
    found = msgspec.json.decode(done.stdout or sys.exit(done.stderr.decode()), type=Certificate)
    answers = (found.answers.get(name, 0) for name in ("same", "moved", "different", "unknown"))
    told = (found.predictions[name] for name in ("exact", "right", "wrong"))
    tokens = {**found.tokens, "counted": found.counted_hits}
    cells = [
        found.verdict,
        ", ".join(map(str, answers)),
        ", ".join(map(str, told)) if found.predictions["all"] else "none told",
        *(f"{tokens[name]:,}" for name in ("told", "counted", "held", "best", "pooled")),
        *(f"{found.regret_s[name]:.1f} s" for name in ("elsewhere", "evicted")),
    ]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def run(rounds: int) -> None:
    others = present()
    heading(f"{REQUESTS} requests of {CLIENTS} clients, {REPLICAS} replicas of {BLOCKS * BLOCK_TOKENS:,} tokens")
    for contender in (ours("cost"), ours("round-robin"), *map(beside, others)) * rounds:
        with fleet(REPLICAS, *SPEEDS) as replicas, contender.started(replicas) as running:
            row(contender.name, running[0].url, *replicas.as_options, "--requests", REQUESTS)
