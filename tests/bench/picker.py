"""Measure Envoy with our picker beside our router, and Envoy alone: hits, time to first token, added latency, CPU.

Four simulated replicas. Conversations grow turn by turn, several at a time; each round has new ones. For the latency of
the hop one client asks small questions of one token, one after the other. Envoy has one thread. All share the machine.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from typing import Any, NamedTuple

from tests.bench.measure import heading, row
from tests.chaos.envoy import Change, Config, Gateway, as_documented, cluster, duplex, gateway, manager, port_of_picker
from tests.chaos.replicas import cpu_s
from tests.chaos.routers import Fleet, RouterProcess, fleet, router
from tests.events.processes import DEADLINE_S
from tests.replica.serving import Replica

REPLICAS = 4
RATES = (
    *("--set=simulated_prefill_tokens_per_s=20_000", "--set=simulated_decode_tokens_per_s=200"),
    *(
        "--set=simulated_step_overhead=0",
        "--set=simulated_mean_output_tokens=0",
        "--num-blocks",
        20_000,
        "--max-model-len",
        32_768,
    ),
)
CONVERSATIONS, AT_ONCE, TURNS = 16, 4, 6
TURN_LETTERS = 800
QUESTIONS = 500
ITSELF = "a replica itself"


class Figures(NamedTuple):
    hits: float  # share of prompt tokens
    ttft_ms: float  # median
    ttft_p99_ms: float
    hop_ms: float  # median
    hop_p99_ms: float
    cpu_ms: float  # per request, of all processes between client and replicas
    envoys_cpu_ms: float


class Make(NamedTuple):
    name: str
    front: Replica  # that clients ask
    processes: list[Replica]


def run(rounds: int) -> None:
    with ExitStack() as stack:
        replicas = stack.enter_context(fleet(REPLICAS, *RATES))
        makes = list(started(replicas, stack))
        measured: dict[str, list[Figures]] = {}
        for number in range(rounds):
            for make in makes if number % 2 else reversed(makes):
                measured.setdefault(make.name, []).append(one_round(make, f"{number} {make.name}"))
        show({make.name: measured[make.name] for make in makes})


def show(measured: dict[str, list[Figures]]) -> None:
    heading(f"{CONVERSATIONS} conversations of {TURNS} turns, {AT_ONCE} at a time; {QUESTIONS} small questions")
    for name, figures in measured.items():
        row(f"{name}: a small question, median", [one.hop_ms for one in figures], "ms")
        row(f"{name}: 99th percentile", [one.hop_p99_ms for one in figures], "ms")
        if name == ITSELF:
            continue
        row(f"{name}: prompt tokens that were cached", [100 * one.hits for one in figures], "%")
        row(f"{name}: time to first token, median", [one.ttft_ms for one in figures], "ms")
        row(f"{name}: 99th percentile", [one.ttft_p99_ms for one in figures], "ms")
        row(f"{name}: CPU per small question", [one.cpu_ms for one in figures], "ms")
        row(f"{name}: of that, Envoy's", [one.envoys_cpu_ms for one in figures], "ms")
    print()


# ---- the makes


def started(replicas: Fleet, stack: ExitStack) -> Iterator[Make]:
    def ours(*options: object) -> RouterProcess:
        quiet = ("--log-level", "error", "--workers", 1)
        return stack.enter_context(router(*replicas.as_options, *quiet, *options))

    def picked(change: Change) -> Make:
        picker = ours("--picker-listen", "127.0.0.1:0")
        envoy = stack.enter_context(gateway(port_of_picker(picker), change))
        return Make("", envoy, [envoy, picker])

    yield Make(ITSELF, replicas[0], [])
    envoy = stack.enter_context(gateway(0, taking_turns(replicas)))
    yield Make("Envoy, round robin", envoy, [envoy])
    running = ours()
    yield Make("warmroute router", running, [running])
    yield picked(as_documented)._replace(name="Envoy and picker")
    yield picked(duplex)._replace(name="Envoy and picker, bodies streamed both ways")


def taking_turns(replicas: Fleet) -> Change:
    """Let Envoy choose by itself."""

    def change(config: Config) -> None:
        own = cluster(config, "replicas")
        addresses = [url.removeprefix("http://").split(":") for url in replicas.urls]
        sockets = [{"socket_address": {"address": host, "port_value": int(port)}} for host, port in addresses]
        endpoints = [{"endpoint": {"address": address}} for address in sockets]
        del own["original_dst_lb_config"]
        own |= {
            "type": "STATIC",
            "lb_policy": "ROUND_ROBIN",
            "load_assignment": {"cluster_name": "replicas", "endpoints": [{"lb_endpoints": endpoints}]},
        }
        manager(config)["http_filters"].pop(0)

    return change


# ---- one round


def one_round(make: Make, seed: str) -> Figures:
    asked: list[tuple[float, int, int]] = []
    if make.processes:  # one replica has no choice
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for told in pool.map(lambda number: list(conversation(make, f"{seed} {number}")), range(CONVERSATIONS)):
                asked += told
    ttfts_ms, cached, tokens = zip(*asked, strict=True) if asked else ((0.0, 0.0), (0,), (1,))
    before = [cpu_s(one.process.pid) for one in make.processes]
    hops_ms = list(hops(make))
    cpu_ms = [1000 * (cpu_s(one.process.pid) - was) for one, was in zip(make.processes, before, strict=True)]
    envoys = [spent for one, spent in zip(make.processes, cpu_ms, strict=True) if isinstance(one, Gateway)]
    return Figures(
        sum(cached) / sum(tokens),
        statistics.median(ttfts_ms),
        p99(ttfts_ms),
        statistics.median(hops_ms),
        p99(hops_ms),
        sum(cpu_ms) / QUESTIONS,
        sum(envoys) / QUESTIONS,
    )


def conversation(make: Make, seed: str) -> Iterator[tuple[float, int, int]]:
    """The time to first token of each turn, and its cached and all prompt tokens."""
    lot = random.Random(seed)
    messages: list[dict[str, str]] = []
    with connected(make) as ask:
        for _ in range(TURNS):
            messages.append({"role": "user", "content": words(lot)})
            began_s = time.perf_counter()
            first_s, body = ask({"messages": messages, "max_tokens": 8, "stream": True, "stream_options": USAGE})
            usage = json.loads(body.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
            yield 1000 * (first_s - began_s), usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
            messages.append({"role": "assistant", "content": words(lot)})


USAGE = {"include_usage": True}


def words(lot: random.Random) -> str:
    return "".join(lot.choices("etaoin shrdlu", k=TURN_LETTERS))


def hops(make: Make) -> Iterator[float]:
    with connected(make) as ask:
        for number in range(QUESTIONS):
            began_s = time.perf_counter()
            ask({"messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 1})
            yield 1000 * (time.perf_counter() - began_s)


@contextmanager
def connected(make: Make) -> Iterator[Callable[[dict[str, Any]], tuple[float, bytes]]]:
    """A function that asks, and returns when the first byte came, and the body."""
    connection = HTTPConnection(make.front.host, make.front.port, timeout=DEADLINE_S)

    def ask(fields: dict[str, Any]) -> tuple[float, bytes]:
        body = json.dumps({"model": "demo", **fields})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        first = response.read(1)
        first_s = time.perf_counter()
        content = first + response.read()
        assert response.status == 200, content
        return first_s, content

    try:
        yield ask
    finally:
        connection.close()


def p99(figures: Sequence[float]) -> float:
    return statistics.quantiles(figures, n=100)[98]
