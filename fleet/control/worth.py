"""What a replica's cache is worth to those who ask: the one that is worth least should go first."""

import math

from fleet.host.report import Report

SOON_S = 60.0  # what is asked for again within that time is missed


def worth(report: Report | None) -> tuple[float, float]:
    """Prompt tokens that would soon be computed again without it, then those a second that it need not compute.

    What is gone is computed once: a prefix that every request begins with is not worth more than it is long.
    """
    if report is None:
        return (0.0, 0.0)
    saved_tokens_per_s = report.hit_rate * report.prompt_tokens_per_s
    held_tokens = report.load.cached_blocks * report.block_size if report.block_size else math.inf
    return (min(held_tokens, saved_tokens_per_s * SOON_S), saved_tokens_per_s)
