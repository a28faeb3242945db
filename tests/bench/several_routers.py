"""Several routers before the same replicas, alone and as peers: what is left of one router's hits and times.

In virtual time, on the traces of `tests.bench.policies`.
"""

from concurrent.futures import ProcessPoolExecutor
from typing import Any

from lab.simulation.comparison import Outcome
from lab.simulation.report import duration
from lab.simulation.settings import Settings
from tests.bench.policies import Case, load_of, name_of, outcome, traces

REPLICAS, ROUTERS = 8, 8
REQUESTS = 3000  # the first of each trace; every router follows all events, so this takes some minutes
TOLD: dict[str, dict[str, Any]] = {
    "one": {},
    f"{ROUTERS}, alone": {"routers": ROUTERS},
    f"{ROUTERS} peers, 5 ms": {"routers": ROUTERS, "peer_delay_s": 0.005},
    f"**{ROUTERS} peers, 50 ms, 1 % lost**": {"routers": ROUTERS, "peer_delay_s": 0.05, "peer_loss": 0.01},
}


def run(rounds: int) -> None:
    del rounds  # nothing varies
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
