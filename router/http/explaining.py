"""Explains the decision for a request without sending it (docs/router-api.md describes the fields)."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from api.errors import invalid, quoted
from api.generation_apis import APIS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, GenerationApi
from router.dashboard.sampling import paused
from router.members.members import Members, ServedModel
from router.members.upstream import Header
from router.placement.cost import TAKES
from router.placement.decision import Decision, predict
from router.placement.holders import slots_of
from router.placement.index import APPROXIMATE, Matches
from router.prompts.model_rewrites import rewritten
from router.prompts.prompt import UNREADABLE, Peek, Prompt
from router.prompts.reading.client import Reading, is_quick
from router.prompts.reading.messages import Found, Make
from router.proxy.facts import decide
from router.proxy.headers import session_of
from router.proxy.predicted_hit import Exactness, PredictedHit
from router.proxy.prefill import split_of, why_not_from
from router.proxy.reading import make_for, peek_into, prompt_from
from router.proxy.services import Services
from router.responses import Explanation, PrefillChoice
from router.tenants.admission import Admitted


class _Asked(Struct):
    """Fields by which requests of some APIs are known."""

    messages: Any = None
    input: Any = None
    system: Any = None
    tools: Any = None
    previous_response_id: Any = None


_decode = msgspec.json.Decoder(_Asked).decode


async def explained(
    services: Services, body: bytes, headers: Sequence[Header], admitted: Admitted, named: str | None = None
) -> Explanation:
    """The decision; raise ApiError if the request itself would be refused. Nothing is counted or remembered.

    `named` is the API of the request; None: the one that its fields tell.
    """
    if not services.model_rewrites.is_empty:
        body = bytes(await asyncio.to_thread(rewritten, services.model_rewrites, body) or body)
    api = api_of(named, body)
    peek, prompt = await read_prompt(services.members, services.reading, body, admitted, api)
    model = services.members.model(peek.model)
    if services.asking is not None and services.asking.wants(model.tokens, prompt):
        await services.asking.tell(model, prompt, (api or CHAT).name, body)
    session = session_of(headers, peek.prompt_cache_key)
    session_key = None if session is None else session.key
    decision, matches = decide(services, model, prompt, session_key)
    prefill = _prefill(services, model, prompt, decision, session_key)
    decision, members = decision.at_rest(), list(model.members)
    size = APPROXIMATE
    if prompt.exact:  # the block size of most replicas
        size = max(model.slots, key=lambda size: (model.slots[size].bit_count(), size), default=APPROXIMATE)
    keys = prompt.keys(size)
    hits = runs_of(services.placement.index_of(size).holders(keys))
    tokens = size or prompt.approximate_block_tokens
    chosen = next((one for one in members if decision.chosen is not None and one.name == decision.chosen.name), None)
    exact = Exactness(prompt.exact, why_not="no replica takes it now")
    if chosen is not None:
        model.tokens.is_verified_at(prompt, chosen.server.process)  # this notes in the prompt if it is not
        predicted = predict(prompt, decision, chosen.block_size, matches)
        exact = PredictedHit(prompt, decision, prediction=predicted, index_doubt=services.doubt(chosen)).exactness
    verdicts = []
    async for verdict, candidate in paused(zip(decision.verdicts(), decision.candidates, strict=True)):
        verdict.sure_tokens = _sure(matches, candidate.slot) * tokens
        verdicts.append(verdict)
    return Explanation(
        model=peek.model,
        policy=services.config.policy,
        prompt_tokens=prompt.all_tokens,
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
        session=session_key,
        session_from=None if session is None else session.source,
        prefill=prefill,
    )


def _prefill(
    services: Services, model: ServedModel, prompt: Prompt, decision: Decision, session: str | None
) -> PrefillChoice | None:
    """The choice where the prompt would be computed, with the replicas that may do so."""
    if not model.splits:
        return None
    found, matches = split_of(services, model, prompt, decision, session, None)
    candidates = []
    if found.prefill is not None and decision.chosen is not None:
        generating, now_s = services.members.by_name[decision.chosen.name], services.now_s()
        for verdict, member in zip(found.prefill.verdicts(), model.members, strict=True):
            if member.spec.role in TAKES["prefill"]:
                verdict.why = why_not_from(member, generating, now_s) or verdict.why
                verdict.sure_tokens = _sure(matches, member.slot) * (member.block_size or 1)
                candidates.append(verdict)
    weighed = {name: getattr(found, name) for name in PrefillChoice.__struct_fields__ if name != "candidates"}
    return PrefillChoice(**weighed, candidates=candidates)


def api_of(named: str | None, body: bytes) -> GenerationApi | None:
    """The API; None: a chat or a completion, whose body is too large to look into here."""
    if named is not None and named not in APIS:
        raise invalid(f"api is {quoted(named)}; write one of {', '.join(APIS)}", "api")
    if not is_quick(body):
        return None if named is None else APIS[named]
    try:
        asked = _decode(body)
    except UNREADABLE:
        asked = _Asked()
    if named is not None:
        found = APIS[named]
    elif asked.messages is None:
        found = COMPLETIONS if asked.input is None else RESPONSES
    else:
        tools = asked.tools if isinstance(asked.tools, list) else []
        has_schema = any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)
        found = MESSAGES if asked.system is not None or has_schema else CHAT
    if found is RESPONSES and asked.previous_response_id is not None:
        fix = "its conversation is at a replica, which is not asked here: send all items"
        raise invalid(f"previous_response_id is {quoted(asked.previous_response_id)}; {fix}", "previous_response_id")
    return found


async def read_prompt(
    members: Members, reading: Reading, body: bytes, admitted: Admitted, api: GenerationApi | None
) -> tuple[Peek, Prompt]:
    """Make the prompt of a request that is not sent; a large one in another process."""
    if api is not None and is_quick(body):
        peek = peek_into(api, body)
        model, salt = members.model(peek.model), admitted.cache_salt(peek.cache_salt)
        if model.tokens.is_quick(body):
            return peek, _prompt(model, body, peek, salt, api)
        return peek, await asyncio.to_thread(_prompt, model, body, peek, salt, api)

    def want(found: Found) -> Make:
        nonlocal peek, model, salt
        peek = Peek(**found.fields)
        model, salt = members.model(peek.model), admitted.cache_salt(peek.cache_salt)
        known = api or (CHAT if found.chat else COMPLETIONS)
        return make_for(model, known.name, salt)

    made = await reading.read(body, want)
    assert made is not None, "it was wanted"
    return peek, prompt_from(made, model, peek, salt)


def _prompt(model: ServedModel, body: bytes, peek: Peek, salt: str | None, api: GenerationApi) -> Prompt:
    return model.tokens.draft(api.name, body, peek, model.lora, salt, model.max_model_len).finish()


def _sure(matches: Mapping[int, Matches], slot: int) -> int:
    return max((found.sure.get(slot, 0) for found in matches.values()), default=0)


def runs_of(holders: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """The first and last block of every run that a slot holds, including runs behind a gap, which are not usable."""
    runs: dict[int, list[tuple[int, int]]] = {}
    begun: dict[int, int] = {}  # keyed by slot
    last = 0
    for block, mask in enumerate((*holders, 0)):
        if mask != last:  # blocks of one chain mostly have the same holders
            for slot in slots_of(last & ~mask):
                runs.setdefault(slot, []).append((begun.pop(slot), block - 1))
            begun.update(dict.fromkeys(slots_of(mask & ~last), block))
            last = mask
    return runs
