"""`warmroute prove` in front of routers of several makes, each before four replicas of its own.

The others are those of `tests.bench.peers`. It takes some minutes, and a row is one run.
"""

import subprocess
import sys

import msgspec

from api.process.lifeline import module
from lab.shadow.proof import Certificate
from tests.bench.peers import BLOCK_TOKENS, PEERS, REPLICAS, beside, ours
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


def run(rounds: int) -> None:
    present = [peer for peer in PEERS if not (why := peer.absent()) or print(f"{peer.name}: {why}")]
    print(
        f"{REQUESTS} requests of {CLIENTS} clients, multi-turn, {REPLICAS} replicas of {640 * BLOCK_TOKENS:,} tokens\n"
    )
    print(f"| router | {' | '.join(COLUMNS)} |\n| --- {'| --- ' * len(COLUMNS)}|")
    for contender in (ours("cost"), ours("round-robin"), *map(beside, present)) * rounds:
        with fleet(REPLICAS, *SPEEDS) as replicas, contender.started(replicas) as running:
            options = ("--requests", REQUESTS, "--concurrency", CLIENTS, "--json")
            command = module("fleet", "prove", running[0].url, *replicas.as_options, *map(str, options))
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
        print(f"| {contender.name} | {' | '.join(cells)} |", flush=True)
