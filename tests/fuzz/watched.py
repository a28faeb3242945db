"""Watches a fuzzer at work: shows its progress, and ends it when it is stuck."""

import signal
from collections.abc import Iterator
from typing import Protocol, TypeVar

STUCK_S = 30.0  # of the processor: the machine may be busy
SHOWN_S = 10.0


class Reports(Protocol):
    seconds: float


Report = TypeVar("Report", bound=Reports)


def watched(reports: Iterator[Report], stuck_s: float = STUCK_S) -> Iterator[Report]:
    """Yield the reports; raise TimeoutError if one does not come."""

    def stuck(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"no end after {stuck_s:g} s of the processor")

    before = signal.signal(signal.SIGPROF, stuck)
    shown_s = 0.0
    try:
        signal.setitimer(signal.ITIMER_PROF, stuck_s)
        for report in reports:
            signal.setitimer(signal.ITIMER_PROF, stuck_s)
            if report.seconds - shown_s > SHOWN_S:
                shown_s = report.seconds
                print(report, flush=True)
            yield report
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
