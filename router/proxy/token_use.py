"""The tokens that a request has used so far: of its prompt, computed and cached, and generated."""

from collections.abc import Sequence

from router.proxy.attempt import Attempt
from router.tenants.limits import Use


def generated_by(attempts: Sequence[Attempt]) -> int:
    """The tokens that these attempts have generated, counted where no engine says so."""
    generated = 0
    for attempt in attempts:
        if attempt.framed:
            generated += attempt.generated
        elif (report := attempt.report) is not None:
            generated += report.counted if report.generated is None else report.generated
    return generated


def output_tokens(attempts: Sequence[Attempt]) -> int | None:
    """The same as far as it was counted by token ids or reported by an engine; None: not at all."""
    framed = [attempt.generated for attempt in attempts if attempt.framed]
    found = [attempt.report.generated for attempt in attempts if attempt.report is not None]
    told = [generated for generated in found if generated is not None]
    return sum(framed) + sum(told) if framed or told else None


def prompt_use(tokens: int, cached: int, generated: int = 0) -> Use:
    cached = min(cached, tokens)
    return Use(0, tokens - cached, cached, generated)
