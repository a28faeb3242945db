"""Prompts computed at a replica of their own, simulated with the shipped choice and engine; times of all requests."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from random import Random
from statistics import fmean

from lab.percentiles import percentile
from lab.simulation.fleet import simulated
from lab.simulation.job import Job
from lab.simulation.settings import Settings
from lab.trace.requests import Trace, TraceRequest

SPAN_S = 120.0
BLOCK = 64  # tokens
WHOLE = Settings(replicas=4, model="engine", pull_tokens_per_s=40_000.0)
SPLIT = Settings(replicas=4, model="engine", pull_tokens_per_s=40_000.0, prefill_replicas=1)

Prompts = Callable[[Random], Iterator[tuple[int, tuple[int, ...]]]]  # tokens, and blocks


def run(rounds: int) -> None:
    del rounds  # it is simulated, not measured
    print(
        "| traffic | replicas | computed elsewhere | TTFT p50 | p99 | time per token p50 | p99 | whole answer, mean |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, trace in traffic().items():
        for replicas, settings in (("4 for all", WHOLE), ("1 + 3", SPLIT)):
            print(f"| {name} | {replicas} | {' | '.join(_figures(simulated(trace, settings, 'cost', 0)))} |")


def traffic() -> dict[str, Trace]:
    fresh = count()
    cold, documents = partial(_cold, fresh), [tuple(next(fresh) for _ in range(250)) for _ in range(12)]
    chats = partial(cold, 400)
    return {
        "16,000 tokens, cold, beside chats": _trace((chats, 6.0, 200), (partial(cold, 16_000), 0.3, 50)),
        "chats of 400 tokens": _trace((chats, 8.0, 200)),
        "16,000 tokens, 12 documents, beside chats": _trace(
            (chats, 6.0, 200), (partial(_warm, fresh, documents), 0.3, 50)
        ),
    }


def _cold(fresh: "count[int]", tokens: int, chance: Random) -> Iterator[tuple[int, tuple[int, ...]]]:
    del chance
    while True:
        yield tokens, tuple(next(fresh) for _ in range(-(-tokens // BLOCK)))


def _warm(
    fresh: "count[int]", documents: list[tuple[int, ...]], chance: Random
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """A question of three blocks on one of the documents."""
    while True:
        blocks = (*chance.choice(documents), *(next(fresh) for _ in range(3)))
        yield BLOCK * len(blocks), blocks


def _trace(*kinds: tuple[Prompts, float, int]) -> Trace:
    """Requests of several kinds, each with its rate per second and length of answers, at random times."""
    requests = []
    for number, (prompts, rate, output_tokens) in enumerate(kinds):
        chance, at_s = Random(number), 0.0
        for tokens, blocks in prompts(chance):
            at_s += chance.expovariate(rate)
            if at_s > SPAN_S:
                break
            requests.append(TraceRequest(at_s, tokens, output_tokens, blocks))
    return Trace("mixed", BLOCK, sorted(requests))


def _figures(jobs: list[Job]) -> Iterator[str]:
    ttft_s, token_s = sorted(job.ttft_s for job in jobs), sorted(job.token_s for job in jobs)
    yield f"{sum(job.prefill is not None for job in jobs):,} of {len(jobs):,}"
    yield from (f"{percentile(ttft_s, share):.2f} s" for share in (0.5, 0.99))
    yield from (f"{1000 * percentile(token_s, share):.0f} ms" for share in (0.5, 0.99))
    yield f"{fmean(job.ended_s - job.request.at_s for job in jobs):.2f} s"
