"""What is counted and remembered of a generation request when it is over, however it ended."""

import re
import time
from typing import Any

from router.placement.policy import Decision
from router.prefixes.recent import TEXT_BYTES, Routed
from router.prompt import beginning_of
from router.record import Remembered
from router.request import Request

CACHED = b'"cached_tokens"'
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')


def cached_tokens_in(body: bytes) -> int | None:
    """What an engine's last bytes say of it: `"prompt_tokens_details": {"cached_tokens": N}`."""
    found = _CACHED_TOKENS.findall(body)
    return int(found[-1]) if found else None


def told(routing: Request) -> dict[str, Any]:
    """What the access log says of it."""
    return {
        "model": routing.model.name if routing.model else None,
        "replica": routing.chosen.name if routing.chosen else None,
        "prompt_tokens": routing.prompt.tokens if routing.decision else None,
        "cached_tokens": routing.reported_tokens,
        "ttft_s": round(routing.first_byte_s - routing.arrived_s, 6) if routing.first_byte_s else None,
        "retries": routing.retries,
        "resumes": routing.resumes,
    }


def remembered(routing: Request, decision: Decision, now_s: float) -> Remembered:
    predicted = routing.prediction
    decision.effects = None  # its costs hold them
    return Remembered(
        time.time(),
        (routing.arrived_s, routing.first_byte_s, now_s, routing.waited_s),
        routing.admitted.request_id,
        routing.peek.model,
        routing.chosen.name if routing.chosen is not None else None,
        routing.prompt.tokens,
        routing.prompt.exact,
        decision,
        None if predicted is None else predicted.blocks * predicted.block_size,
        routing.reported_tokens,
        routing.retries,
        routing.resumes,
        routing.exchange.status,
        routing.why,
    )


def routed(routing: Request, *, with_text: bool) -> Routed:
    prompt, size = routing.prompt, routing.block_size
    text = beginning_of(routing.peek, TEXT_BYTES) or None if with_text else None
    return Routed(routing.peek.model, size, prompt.keys(size), routing.arrived_s, text)


def settle(routing: Request, now_s: float) -> bool:
    """Counts what came of it; False where the replica reported another number of cached blocks than predicted."""
    member, status = routing.chosen, routing.exchange.status
    if member is None or routing.decision is None:
        return True
    tally = member.tally(routing.peek.model)
    tally.statuses[status] = tally.statuses.get(status, 0) + 1
    tally.request_s.observe(now_s - routing.arrived_s)
    if routing.first_byte_s:
        tally.first_token_s.observe(routing.first_byte_s - routing.arrived_s)
    tally.prompt_tokens += routing.prompt.tokens
    tally.matched_tokens += int(routing.decision.question.matched.get(member.slot, 0))
    prompt, size = routing.prompt, routing.block_size
    salt = None if prompt.salt is None else (routing.peek.model, prompt.salt)
    tally.sent(prompt.keys(size), size or prompt.approximate_block_tokens, salt)
    predicted = routing.prediction
    if predicted is None or routing.reported_tokens is None or routing.resumes:
        return True
    reported_blocks = routing.reported_tokens // predicted.block_size
    tally.blocks_predicted += predicted.blocks
    tally.blocks_reported += reported_blocks
    tally.compared_tokens += routing.prompt.tokens
    member.accuracy.claimed(predicted.claimed_blocks, reported_blocks)
    return member.accuracy.compare(predicted.blocks, reported_blocks) or not predicted.sure
