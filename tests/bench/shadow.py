"""Predictions of `warmroute shadow` beside another router, against the figures once warmroute has taken over.

The other one is sglang-router 0.3.2 in the environment that WARMROUTE_SGLANG_ROUTER names; without it, ours with
`--policy round-robin` stands for it. A mirror in front of it sends shadow a copy of each request: nginx if there is one
(WARMROUTE_NGINX names the program), else a small proxy. Then the same requests go through warmroute to fresh replicas.
`--small` tries it out in half a minute.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from lab.bench.figures import figures
from lab.bench.load import Limits
from lab.bench.measure import Plan, measured
from lab.bench.probe import RequestSettings
from lab.bench.workloads import replayed
from lab.shadow.findings import Findings, lines
from lab.trace.requests import Trace, sped_up
from router.members.spec import parse_target
from tests.bench.peers import PEERS, REPLICAS, SMALL, Contender, Size, beside, ours, shrunk, speeds
from tests.chaos.routers import Fleet, fleet
from tests.lab.shadow.mirroring import NGINX, mirroring, shadow
from tests.lab.traffic import agents, conversations
from tests.replica.serving import MODEL, Replica

USUAL = Size(300, 0, 36.0)
TRIES = 6
MAX_LAG_S = 0.05
TRACES: tuple[Callable[..., Trace], ...] = (conversations, agents)


class Figures(NamedTuple):
    hit_share: float
    ttft_mean_s: float
    lag_s: float  # of the load generator
    found: Findings | None = None


def run(rounds: int, *, small: bool = False) -> None:
    size = SMALL if small else USUAL
    other = next((beside(peer) for peer in PEERS[:1] if not peer.absent()), ours("round-robin"))
    print(f"the other router: {other.name}; the mirror: {'nginx' if NGINX else 'a small proxy'}")
    print("| trace | | as served | warmroute | gain |\n| --- | --- | --- | --- | --- |")
    for make in TRACES:
        for number in range(rounds):
            trace = shrunk(make(size.requests, number))
            paced = sped_up(trace, trace.span_s / size.span_s)
            before = quietly(partial(shadowed, other, paced, number))
            table(trace.name, before, quietly(partial(taken_over, paced, number)))


def quietly(trial: Callable[[], Figures]) -> Figures:
    """Repeat a trial during which something else kept the machine busy, as its times would say nothing."""
    for _ in range(TRIES):
        got = trial()
        if got.lag_s <= MAX_LAG_S:
            return got
        print(f"repeated: the load generator was {ms(got.lag_s)} late, the machine was too busy", file=sys.stderr)
    sys.exit("the machine is too busy to measure anything; try again later")


def shadowed(other: Contender, paced: Trace, number: int) -> Figures:
    """Serve the trace by the other router with shadow beside it."""
    with fleet(REPLICAS, *speeds(paced)) as replicas, other.started(replicas) as (running,):
        options = (*replicas.as_options, "--listen", "127.0.0.1:0", "--interval", 60)
        with ExitStack() as stack:
            watching = stack.enter_context(shadow(*options))
            front = stack.enter_context(mirroring(running.port, watching.port, nginx=NGINX is not None))
            before = asked(front, replicas, paced, number)
            return before._replace(found=watching.findings())


def taken_over(paced: Trace, number: int) -> Figures:
    with fleet(REPLICAS, *speeds(paced)) as replicas, ours("cost").started(replicas) as (running,):
        return asked(running, replicas, paced, number)


def asked(running: Replica, replicas: Fleet, paced: Trace, number: int) -> Figures:
    plan = Plan(
        targets=[parse_target(running.url)],
        wish=RequestSettings(MODEL, f"shadow {number}"),
        arrivals=lambda _: replayed(paced),
        limits=Limits(len(paced.requests)),
    )
    found = measured(plan, lambda *_: None)
    if found.interrupted:
        raise KeyboardInterrupt
    [[ran]] = found.ran
    counted = figures([ran.outcomes])
    if counted.failed or counted.ttft_s.mean is None:
        sys.exit(f"{counted.failed} requests failed: {counted.examples}")
    pools = [replica.load()["pool"] for replica in replicas.replicas]
    hits, queries = (sum(pool[counter] for pool in pools) for counter in ("hit_tokens", "query_tokens"))
    return Figures(hits / queries, counted.ttft_s.mean, ran.own.lag_p99_s)


def table(name: str, before: Figures, after: Figures) -> None:
    found = before.found
    assert found is not None, "shadow stood beside it"
    predicted = found.served, found.warmroute
    for what, (one, other) in (("predicted", predicted), ("measured", (before, after))):
        hits = f"{one.hit_share:.1%} | {other.hit_share:.1%} | {100 * (other.hit_share - one.hit_share):+.1f} points"
        change_s = other.ttft_mean_s - one.ttft_mean_s
        times = f"{ms(one.ttft_mean_s)} | {ms(other.ttft_mean_s)} | {ms(change_s)}, {change_s / one.ttft_mean_s:+.0%}"
        print(f"| {name} | hits, {what} | {hits} |\n| {name} | mean TTFT, {what} | {times} |", flush=True)
    print("\n".join(["", *lines(found), ""]), file=sys.stderr)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
