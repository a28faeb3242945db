"""The decision for a request that is not sent, block by block (docs/router.md says what the fields mean)."""

import asyncio
from collections.abc import Sequence

from msgspec import Struct

from router.admission import Admitted
from router.core import Router
from router.index import Matches, PrefixIndex
from router.members import APPROXIMATE, ServedModel
from router.prompt import Peek, Prompt, read_peek


class CandidateView(Struct):
    name: str
    matched_tokens: float
    lower_tokens: float
    sure_tokens: float
    uncached_tokens: float
    queued_tokens: float
    running: int
    in_flight: int
    ttft_s: float
    cost: float | None
    available: bool
    why: str


class Explained(Struct):
    model: str
    policy: str
    prompt_tokens: int
    exact: bool
    why_not: str | None
    block_size: int
    blocks: int
    chosen: str | None
    candidates: list[CandidateView]
    hits: dict[str, list[tuple[int, int]]]


async def explained(router: Router, body: bytes, admitted: Admitted) -> Explained:
    """ApiError where the request itself would be refused. Nothing is counted or taken for granted."""
    peek = read_peek(body)
    model = router.members.model(peek.model)
    salt = admitted.cache_salt(peek.cache_salt)
    if model.tokens.is_quick(body):
        prompt = _prompt(model, body, peek, salt)
    else:
        prompt = await asyncio.to_thread(_prompt, model, body, peek, salt)
        model = router.members.model(peek.model)  # its replicas may be others by now
    question, matches = router.question(model, prompt, peek.prompt_cache_key)
    decision = router.choose(model, question)
    size = _main_size(model, prompt)
    tokens = size or prompt.approximate_block_tokens
    verdicts = [
        CandidateView(
            name=verdict.name,
            matched_tokens=verdict.matched_tokens,
            lower_tokens=verdict.matched_tokens + verdict.lower_tokens,
            sure_tokens=_sure(matches, member.slot) * tokens,
            uncached_tokens=verdict.uncached_tokens,
            queued_tokens=verdict.queued_tokens,
            running=verdict.running,
            in_flight=verdict.in_flight,
            ttft_s=verdict.ttft_s,
            cost=verdict.cost_s,
            available=member.candidate.unavailable is None,
            why=verdict.why,
        )
        for verdict, member in zip(decision.explain(), model.members, strict=True)
    ]
    keys = prompt.keys(size)
    index = router.guesses if size == APPROXIMATE else router.index
    return Explained(
        model=peek.model,
        policy=router.config.policy,
        prompt_tokens=prompt.tokens,
        exact=prompt.exact,
        why_not=prompt.why_not,
        block_size=size,
        blocks=len(keys),
        chosen=decision.chosen.name if decision.chosen else None,
        candidates=verdicts,
        hits={member.name: runs_of(index, keys, member.slot) for member in model.members},
    )


def _prompt(model: ServedModel, body: bytes, peek: Peek, salt: str | None) -> Prompt:
    chat = peek.messages is not None
    return model.tokens.draft(chat, body, peek, model.lora, salt, max_model_len=model.max_model_len).finish()


def _main_size(model: ServedModel, prompt: Prompt) -> int:
    """The block size that most replicas have."""
    if not prompt.exact:
        return APPROXIMATE
    return max(model.slots, key=lambda size: (model.slots[size].bit_count(), size), default=APPROXIMATE)


def _sure(matches: dict[int, Matches], slot: int) -> int:
    return max((found.sure.get(slot, 0) for found in matches.values()), default=0)


def runs_of(index: PrefixIndex, keys: Sequence[int], slot: int) -> list[tuple[int, int]]:
    """First and last block of every run that a replica holds, also behind a gap, where it cannot be used."""
    runs: list[tuple[int, int]] = []
    for block, held in enumerate(index.holds(slot, keys)):
        if held and runs and runs[-1][1] == block - 1:
            runs[-1] = (runs[-1][0], block)
        elif held:
            runs.append((block, block))
    return runs
