"""The hit rate of a trace's beginning beside that of its second half: what a short log is worth.

WARMROUTE_TRACES names a folder of traces, as for `policies`.
"""

from statistics import median

from msgspec.structs import replace

from lab.trace.enough import FEW_REQUESTS, WIDE, Estimate, estimated, found_tokens
from lab.trace.requests import Trace
from tests.bench.policies import name_of, trace_of, traces

LENGTHS = (100, 200, 500, 1000, 2000, 4000, 8000)


def run(rounds: int) -> None:
    del rounds  # nothing varies
    print(f"\nHits of an unlimited cache; long enough: {FEW_REQUESTS:,} requests, ± {WIDE * 100:g} points:\n")
    print(
        "| trace | its second half | requests | their hits | 95 % interval | off by | long enough |\n|" + " --- |" * 7
    )
    errors: dict[bool, list[float]] = {True: [], False: []}
    for source in traces():
        trace = trace_of(source)
        later = _second_half(trace)
        for length in LENGTHS:
            if 2 * length <= len(trace.requests):
                found = estimated(replace(trace, requests=trace.requests[:length]))
                errors[found.is_enough].append(abs(found.hit_rate - later))
                print(_row(name_of(source), later, found), flush=True)
    for is_enough, found_errors in errors.items():
        if found_errors:
            words = "long enough" if is_enough else "too short"
            print(f"\n{words}: off by {median(found_errors):.1%} (median), {max(found_errors):.1%} (most)")


def _second_half(trace: Trace) -> float:
    half = len(trace.requests) // 2
    return sum(found_tokens(trace)[half:]) / sum(request.input_tokens for request in trace.requests[half:])


def _row(name: str, later: float, found: Estimate) -> str:
    figures = (f"{found.hit_rate:.1%}", f"± {found.half * 100:.1f}", f"{abs(found.hit_rate - later):.1%}")
    verdict = "yes" if found.is_enough else f"no: at least {found.enough_requests:,}"
    return f"| {name} | {later:.1%} | {found.requests:,} | {' | '.join(figures)} | {verdict} |"
