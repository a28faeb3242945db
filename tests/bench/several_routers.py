"""Several routers before the same replicas, alone and as peers: what is left of one router's hits and times.

In virtual time on the traces of `tests.bench.policies`, and live: whole routers in processes of their own, which share
simulated replicas and get the turns of conversations one after the other.
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

from lab.simulation.comparison import Outcome
from lab.simulation.report import duration
from lab.simulation.settings import Settings
from replica.model.demo import TEXTS
from tests.bench.policies import Case, load_of, name_of, outcome, traces
from tests.chaos.replicas import cpu_s, free_ports
from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.processes import wait_until
from tests.replica.serving import MODEL

REPLICAS, ROUTERS = 8, 8
REQUESTS = 3000  # the first of each trace; every router follows all events, so this takes some minutes
TOLD: dict[str, dict[str, Any]] = {
    "one": {},
    f"{ROUTERS}, alone": {"routers": ROUTERS},
    f"{ROUTERS} peers, 5 ms": {"routers": ROUTERS, "peer_delay_s": 0.005},
    f"**{ROUTERS} peers, 50 ms, 1 % lost**": {"routers": ROUTERS, "peer_delay_s": 0.05, "peer_loss": 0.01},
}

LIVE_REPLICAS = 4
FLEET = (
    *("--tokenizer", TEXTS, "--max-model-len", 16_384, "--num-blocks", 4096, "--max-num-seqs", 16),
    *("--set=simulated_prefill_tokens_per_s=20_000", "--set=simulated_decode_tokens_per_s=200"),
)
SYSTEMS, SYSTEM_WORDS = 6, 1500
WORDS = "where is my parcel why does this loop never end which book has a lighthouse in it tell me more"
CONVERSATIONS, AT_ONCE, TURNS, TURN_WORDS, ANSWER_TOKENS = 96, 32, 6, 120, 24


class Turn(NamedTuple):
    prompt_tokens: int
    cached_tokens: int
    first_s: float


def run(rounds: int) -> None:
    _simulated()
    print(f"\nLive: {LIVE_REPLICAS} replicas, {CONVERSATIONS} conversations of {TURNS} turns, {AT_ONCE} at once:\n")
    print("| routers | hits | of one router's | mean TTFT | CPU of all routers, per request |\n| --- |" + " --- |" * 4)
    kinds = {"one": (1, False), f"{ROUTERS}, alone": (ROUTERS, False), f"**{ROUTERS} peers**": (ROUTERS, True)}
    found: dict[str, list[Live]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name, (routers, as_peers) in kinds.items():
            found[name].append(_live(routers, as_peers, seed=number))
    for name, figures in found.items():
        hits, ttft_s, cpu_ms = (statistics.median(each) for each in zip(*figures, strict=True))
        kept = statistics.median(own.hits / one.hits for own, one in zip(figures, found["one"], strict=True))
        print(f"| {name} | {hits:.1%} | {kept:.3f} | {duration(ttft_s)} | {cpu_ms:.2f} ms |", flush=True)


def _simulated() -> None:
    print(f"\n{REPLICAS} replicas of {Settings().capacity_tokens:,} tokens, the first {REQUESTS:,} requests:\n")
    print("| trace | routers | hits | mean TTFT | of one router's | p50 | p90 | p99 |\n| --- |" + " --- |" * 7)
    cases = [
        (
            source,
            name,
            Case(
                source,
                "cost",
                Settings(replicas=REPLICAS, **more),
                load_of(source),
                runs=1,
                jitter_s=0.0,
                requests=REQUESTS,
            ),
        )
        for source in traces()
        for name, more in TOLD.items()
    ]
    one: dict[str, Outcome] = {}
    with ProcessPoolExecutor() as processes:
        outcomes = processes.map(outcome, (case for *_, case in cases))
        for (source, name, _), each in zip(cases, outcomes, strict=True):
            alone = one.setdefault(source, each)
            times = (each.ttft_p50_s, each.ttft_p90_s, each.ttft_p99_s)
            cells = (
                f"{each.hit_rate:.1%}",
                duration(each.ttft_mean_s),
                f"{each.ttft_mean_s / alone.ttft_mean_s:.3f}",
                *map(duration, times),
            )
            print(f"| {name_of(source)} | {name} | {' | '.join(cells)} |", flush=True)


# ---- live


class Live(NamedTuple):
    hits: float
    ttft_s: float  # mean
    cpu_ms: float  # of all routers, per request


def _live(count: int, as_peers: bool, seed: int) -> Live:
    with fleet(LIVE_REPLICAS, *FLEET) as replicas, _routers(replicas, count, as_peers) as routers:
        chance = Random(seed)
        systems = [_words(chance, SYSTEM_WORDS) for _ in range(SYSTEMS)]
        seeds = [chance.randrange(2**32) for _ in range(CONVERSATIONS)]
        before_s = sum(cpu_s(one.process.pid) for one in routers)
        with ThreadPoolExecutor(AT_ONCE) as clients:
            turns = [
                turn
                for found in clients.map(lambda one: _converse(routers, systems, Random(one)), seeds)
                for turn in found
            ]
        used_s = sum(cpu_s(one.process.pid) for one in routers) - before_s
    hit_rate = sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)
    return Live(hit_rate, statistics.mean(turn.first_s for turn in turns), 1000 * used_s / len(turns))


@contextmanager
def _routers(replicas: Fleet, count: int, as_peers: bool) -> Iterator[Sequence[RouterProcess]]:
    first = free_ports(count)
    at = [f"tcp://127.0.0.1:{first + number}" for number in range(count)]
    usual = (*replicas.as_options, "--model-dir", f"{MODEL}={TEXTS}", "--log-level", "error")
    with ExitStack() as stack:
        routers = []
        for own in at:
            peers = [text for each in at if each != own for text in ("--peer", each)]
            told = ("--peer-listen", own, *peers) if as_peers else ()
            routers.append(stack.enter_context(router(*usual, *told)))
        for one in routers if as_peers else ():
            wait_until(partial(_hears, one, count - 1), "all peers are heard")
        yield routers


def _hears(one: RouterProcess, peers: int) -> bool:
    return f"warmroute_router:peers {peers}.0" in one.get("/metrics").body.decode()


def _converse(routers: Sequence[RouterProcess], systems: Sequence[str], chance: Random) -> list[Turn]:
    """A conversation, each turn of which goes to a router by chance."""
    messages = [{"role": "system", "content": chance.choice(systems)}]
    turns = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": _words(chance, TURN_WORDS)})
        said, turn = _ask(chance.choice(routers), messages)
        messages.append({"role": "assistant", "content": said})
        turns.append(turn)
    return turns


def _ask(one: RouterProcess, messages: list[dict[str, str]]) -> tuple[str, Turn]:
    fields = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "seed": 1}
    began_s = perf_counter()
    connection, answer = one.open(
        "POST", "/v1/chat/completions", fields | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert answer.status == 200, answer.read()
    first_s, said, usage = 0.0, "", dict[str, Any]()
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        first_s = first_s or perf_counter() - began_s
        event = json.loads(line[6:])
        said += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        usage = event.get("usage") or usage
    connection.close()
    return said, Turn(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], first_s)


def _words(chance: Random, count: int) -> str:
    return " ".join(chance.choices(WORDS.split(), k=count))
