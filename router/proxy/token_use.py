"""The tokens that a request has used so far: of its prompt, computed and cached, and generated."""

from collections.abc import Sequence
from typing import NamedTuple

from router.proxy.attempt import Attempt
from router.proxy.token_report import PromptsTold
from router.tenants.limits import Use


class Generated(NamedTuple):
    tokens: int  # counted by events where no engine says so
    told: int | None  # without those; None: none is known


def generated_by(attempts: Sequence[Attempt]) -> Generated:
    """The tokens that these attempts have generated."""
    tokens, told = 0, None
    for attempt in attempts:
        report, found = attempt.report, attempt.tokens
        tokens += found
        if attempt.framed or (report is not None and report.generated is not None):
            told = found if told is None else told + found
    return Generated(tokens, told)


def prompts_told(attempts: Sequence[Attempt]) -> PromptsTold | None:
    """The figures of the replica that has told most of them: what others computed before it was lost is not charged."""
    most = None
    for attempt in attempts:
        told = attempt.told
        if told is not None and (most is None or told.choices > most.choices):
            most = told
    return most


def prompt_use(tokens: int, cached: int, generated: int = 0) -> Use:
    cached = min(cached, tokens)
    return Use(0, tokens - cached, cached, generated)
