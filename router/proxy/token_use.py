"""The tokens that a request has used so far: of its prompt, computed and cached, and generated."""

from collections.abc import Sequence
from typing import NamedTuple

from router.proxy.attempt import Attempt
from router.tenants.limits import Use


class Generated(NamedTuple):
    tokens: int  # counted by events where no engine says so
    told: int | None  # without those; None: none is known


def generated_by(attempts: Sequence[Attempt]) -> Generated:
    """The tokens that these attempts have generated."""
    tokens, told = 0, None
    for attempt in attempts:
        report = attempt.report
        known = attempt.generated if attempt.framed else None if report is None else report.generated
        if known is not None:
            told = known if told is None else told + known
            tokens += known
        elif report is not None:
            tokens += report.counted
    return Generated(tokens, told)


def prompt_use(tokens: int, cached: int, generated: int = 0) -> Use:
    cached = min(cached, tokens)
    return Use(0, tokens - cached, cached, generated)
