"""Explains the decision for a request without sending it (docs/router-api.md describes the fields)."""

import asyncio
from collections.abc import Sequence

from api.generation_apis import CHAT, COMPLETIONS
from router.core import Router
from router.dashboard.pauses import paused
from router.members.members import ServedModel
from router.members.upstream import Header
from router.placement import cost
from router.placement.decision import Verdict
from router.placement.holders import slots_of
from router.placement.index import Matches
from router.placement.placement import APPROXIMATE
from router.prompts.prompt import Peek, Prompt, read_peek
from router.prompts.reading.client import is_quick
from router.prompts.reading.messages import Found, Make
from router.prompts.tokens import TokenCounts
from router.proxy.admission import Admitted
from router.proxy.large_prompts import make_for, prompt_from
from router.proxy.request_summary import Exactness, exactness
from router.proxy.sessions import session_of
from router.responses import Candidate, Explanation


async def explained(router: Router, body: bytes, headers: Sequence[Header], admitted: Admitted) -> Explanation:
    """The decision; raise ApiError if the request itself would be refused. Nothing is counted or remembered."""
    peek, prompt = await _read(router, body, admitted)
    model = router.members.model(peek.model)
    session = session_of(headers, peek.prompt_cache_key)
    decision, matches = router.decide(model, prompt, None if session is None else session.key)
    decision, members = decision.at_rest(), list(model.members)
    size = _main_size(model, prompt)
    keys = prompt.keys(size)
    hits = runs_of(router.placement.index_of(size).holders(keys))
    tokens = size or prompt.approximate_block_tokens
    chosen = next((one for one in members if decision.chosen is not None and one.name == decision.chosen.name), None)
    exact = Exactness(prompt.exact, why_not="no replica takes it now")
    if chosen is not None:
        predicted = router.placement.predict(prompt, chosen.candidate, chosen.block_size, matches)
        exact = exactness(prompt, predicted, router.doubt(chosen))
    verdicts = [
        _view(verdict, candidate, _sure(matches, candidate.slot) * tokens)
        async for verdict, candidate in paused(zip(decision.verdicts(), decision.candidates, strict=True))
    ]
    return Explanation(
        model=peek.model,
        policy=router.config.policy,
        prompt_tokens=prompt.tokens,
        exact=prompt.exact and prompt.doubt is None,
        why_not=prompt.why_not or prompt.doubt,
        block_size=size,
        blocks=len(keys),
        chosen=decision.chosen.name if decision.chosen else None,
        candidates=verdicts,
        hits={member.name: hits.get(member.slot, []) for member in members},
        tokens_exact=exact.tokens,
        index_exact=exact.index,
        prediction_exact=exact.prediction,
        why_inexact=exact.why_not,
        session=None if session is None else session.key,
        session_from=None if session is None else session.source,
    )


def _view(verdict: Verdict, candidate: cost.Candidate, sure_tokens: float) -> Candidate:
    return Candidate(
        name=verdict.name,
        matched_tokens=verdict.matched_tokens,
        lower_tokens=verdict.matched_tokens + verdict.lower_tokens,
        sure_tokens=sure_tokens,
        uncached_tokens=verdict.uncached_tokens,
        queued_tokens=verdict.queued_tokens,
        running=verdict.running,
        in_flight=verdict.in_flight,
        lost_tokens=verdict.lost_tokens,
        ttft_s=verdict.ttft_s,
        cost=verdict.cost_s,
        available=candidate.unavailable is None,
        why=verdict.why,
    )


async def _read(router: Router, body: bytes, admitted: Admitted) -> tuple[Peek, Prompt]:
    if is_quick(body):
        peek = read_peek(body)
        model, salt = router.members.model(peek.model), admitted.cache_salt(peek.cache_salt)
        if model.tokens.is_quick(body):
            return peek, _prompt(model, body, peek, salt)
        return peek, await asyncio.to_thread(_prompt, model, body, peek, salt)

    def want(found: Found) -> Make:
        nonlocal peek, model, salt
        peek = Peek(**found.fields)
        model, salt = router.members.model(peek.model), admitted.cache_salt(peek.cache_salt)
        return make_for(model, _api(found.chat), salt)

    made = await router.reading.read(body, want)
    assert made is not None, "it was wanted"
    return peek, prompt_from(made, model, peek, salt, TokenCounts())


def _prompt(model: ServedModel, body: bytes, peek: Peek, salt: str | None) -> Prompt:
    api, counts = _api(peek.messages is not None), TokenCounts()  # no request is served
    return model.tokens.draft(api, body, peek, model.lora, salt, model.max_model_len, counts).finish()


def _api(chat: bool) -> str:
    return CHAT.name if chat else COMPLETIONS.name


def _main_size(model: ServedModel, prompt: Prompt) -> int:
    """The block size of most replicas."""
    if not prompt.exact:
        return APPROXIMATE
    return max(model.slots, key=lambda size: (model.slots[size].bit_count(), size), default=APPROXIMATE)


def _sure(matches: dict[int, Matches], slot: int) -> int:
    return max((found.sure.get(slot, 0) for found in matches.values()), default=0)


def runs_of(holders: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """The first and last block of every run that a slot holds, including runs behind a gap, which are not usable."""
    runs: dict[int, list[tuple[int, int]]] = {}
    begun: dict[int, int] = {}  # by slot
    last = 0
    for block, mask in enumerate((*holders, 0)):
        if mask != last:  # blocks of one chain mostly have the same holders
            for slot in slots_of(last & ~mask):
                runs.setdefault(slot, []).append((begun.pop(slot), block - 1))
            begun.update(dict.fromkeys(slots_of(mask & ~last), block))
            last = mask
    return runs
