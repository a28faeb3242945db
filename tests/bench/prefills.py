"""Prompts that the shipped choice lets another replica compute, and what that saves by its estimates."""

from router.placement.cost import ASSUMED_TOKENS_PER_S, Candidate, Question
from router.placement.elsewhere import Transfers, split
from router.placement.policy import choose
from router.placement.tie_break import TieBreak

PROMPTS = (500, 2000, 8000, 32_000)  # tokens, none of them cached
ANSWERS = (0, 1, 2, 4, 16, 64)  # that are being generated
TRANSFERS = (40_000, 4000)  # tokens per second


def run(rounds: int) -> None:
    del rounds  # it is computed, not measured
    for speed in TRANSFERS:
        print(f"Prefill {ASSUMED_TOKENS_PER_S:,.0f} tokens/s, transfers {speed:,} tokens/s\n")
        heads = (f"{answers} answer{'s' * (answers != 1)}" for answers in ANSWERS)
        print(f"| tokens to compute | {' | '.join(heads)} |")
        print(f"| --- |{' --- |' * len(ANSWERS)}")
        for tokens in PROMPTS:
            print(f"| {tokens:,} | {' | '.join(_saved(tokens, answers, speed) for answers in ANSWERS)} |")
        print()


def _saved(tokens: int, answers: int, speed: int) -> str:
    """Seconds of waiting that are saved, added up over the request and the answers beside it; here: it stays."""
    candidates = (
        Candidate("decode", 0, prefill_tokens_per_s=ASSUMED_TOKENS_PER_S, running=answers, role="decode"),
        Candidate("prefill", 1, prefill_tokens_per_s=ASSUMED_TOKENS_PER_S, role="prefill"),
    )
    transfers = Transfers()
    transfers.fetched(speed, 1.0)
    decode = choose("cost", Question(tokens, {}, {}), candidates, TieBreak(1))
    prefill = choose("cost", Question(tokens, {}, {}, half="prefill"), candidates, TieBreak(1))
    found = split("auto", decode, prefill, transfers)
    return f"{found.gain_s:.2f} s" if found.elsewhere else "here"
