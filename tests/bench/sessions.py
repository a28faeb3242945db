"""Whole sessions of agents, more than the caches hold, that begin at once or wait: live, and the same simulated.

The sessions are those of the first trace in the folder WARMROUTE_TRACES that names some, or made by chance; prompts,
answers and caches are SCALE times smaller, and time is SPEED times faster, so that a run takes some minutes.
"""

import os
from pathlib import Path

from msgspec.structs import replace

from lab.bench.figures import Figures, figures
from lab.bench.load import Limits
from lab.bench.measure import Plan, measured
from lab.bench.probe import RequestSettings
from lab.bench.workloads import replayed
from lab.simulation.comparison import outcome_of
from lab.simulation.fleet import simulated
from lab.simulation.settings import DEFAULT_CAPACITY_TOKENS, Settings
from lab.trace.formats import read_trace
from lab.trace.requests import Trace, TraceRequest, rest_of_gap_s
from router.members.spec import parse_target
from tests.bench.peers import BLOCK_TOKENS, REPLICAS, following, shrunk
from tests.chaos.routers import fleet
from tests.lab.traffic import agents, named

SCALE, SPEED, SMALL_SPEED = 64, 60.0, 600.0
STEP_TOKENS = 512  # of prompts
DECODE_TOKENS_PER_S = 1000.0  # so a step of the engine takes little time beside its prompts, as on a GPU
WHOLE = Settings(closed_loop=True)  # before it is scaled


def run(rounds: int, *, small: bool = False) -> None:
    folder, speed = os.environ.get("WARMROUTE_TRACES"), SMALL_SPEED if small else SPEED
    wholes = map(read_trace, sorted(Path(folder).glob("*.jsonl*"))) if folder else [named(agents(2000))]
    whole = next(one for one in wholes if any(request.session for request in one.requests))
    trace = sped_up_sessions(shrunk(whole, SCALE), speed)
    settings = replace(
        WHOLE,
        replicas=REPLICAS,
        capacity_tokens=DEFAULT_CAPACITY_TOKENS // SCALE,
        prefill_tokens_per_s=WHOLE.prefill_tokens_per_s * speed / SCALE,
        decode_tokens_per_s=DECODE_TOKENS_PER_S,
    )
    print(f"{trace.name}: {len(trace.requests):,} requests, {trace.input_tokens:,} tokens\n")
    print("| | hits | TTFT mean | session mean | session p99 | sent away | began when told |\n" + "| --- " * 7 + "|")
    for holds in (False, True):
        jobs = simulated(trace, replace(settings, working_set=holds), "cost", 0)
        one = outcome_of(jobs, REPLICAS, settings.prefill_tokens_per_s)
        row("simulated", holds, one.hit_rate, one.ttft_mean_s, one.session_mean_s, one.session_p99_s)
    for number in range(rounds):
        for holds in (False, True) if number % 2 == 0 else (True, False):
            found = live(trace, settings, holds, number)
            times = found.hit_rate, found.ttft_s.mean, found.session_mean_s, found.session_p99_s
            row("live", holds, *times, found.sent_away, found.began_when_told)


def row(what: str, holds: bool, hits: float | None, *cells: float | None) -> None:
    shown = [f"{cell:.3g} s" if isinstance(cell, float) else cell for cell in cells]
    print(f"| {what}, {'waiting' if holds else 'at once'} | {hits:.1%} | {' | '.join(map(str, shown))} |", flush=True)


def live(trace: Trace, settings: Settings, holds: bool, number: int) -> Figures:
    speeds = (
        *("--block-size", BLOCK_TOKENS, "--num-blocks", settings.capacity_tokens // BLOCK_TOKENS),
        *("--max-model-len", settings.capacity_tokens, "--max-num-batched-tokens", STEP_TOKENS),
        f"--set=simulated_prefill_tokens_per_s={settings.prefill_tokens_per_s}",
        f"--set=simulated_decode_tokens_per_s={settings.decode_tokens_per_s}",
    )
    with fleet(REPLICAS, *speeds) as replicas, following(replicas, f"--set=hold_sessions={holds}") as running:
        plan = Plan(
            target=parse_target(running.url),
            wish=RequestSettings(None, f"sessions {number}", is_chat=False),
            arrivals=lambda _: replayed(trace, by_session=True),
            limits=Limits(len(trace.requests), comes_again=True),
        )
        found = measured(plan)
    if found.ran.was_interrupted:
        raise KeyboardInterrupt
    return figures(found.ran.outcomes)


def sped_up_sessions(trace: Trace, speed: float) -> Trace:
    """Everything faster, gaps of sessions too: the longest that a closed loop takes is scaled with them."""
    last: dict[str | None, tuple[float, TraceRequest]] = {}  # its time so far, and as it was
    requests = []
    for one in trace.requests:
        at_s = one.at_s
        if one.session in last:
            before_s, before = last[one.session]
            answer_s = before.output_tokens * SCALE / WHOLE.decode_tokens_per_s
            at_s = before_s + answer_s + rest_of_gap_s(one.at_s - before.at_s, answer_s)
        last[one.session] = at_s, one
        requests.append(one._replace(at_s=at_s / speed))
    return replace(trace, requests=sorted(requests, key=lambda one: one.at_s))
