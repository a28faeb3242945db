"""Has replicas give a prefix up last that they hold already; computes and moves nothing for it."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from api.errors import ApiError, invalid, quoted
from api.generation_apis import CHAT, COMPLETIONS
from api.native import unpack_ids
from api.openai.engine_requests import RetainRequest
from api.openai.requests import Identifier
from api.reading import read
from api.responses import RetainedPrefix as RetainedAtReplica
from router.http.at_replicas import BAD_GATEWAY, SUCCESS, Failure, at_all, say
from router.http.explaining import read_prompt, runs_of
from router.members.members import Member, Members
from router.prompts.prefixes.retained import Full, RetainedPrefix, RetainedPrefixes
from router.prompts.prompt import Prompt
from router.proxy.services import Services
from router.responses import Retained, RetainedAt, RetainedList
from router.tenants.admission import Admitted

RETAIN_S = 10.0  # a replica has so long to answer
_decode = msgspec.json.Decoder(RetainedAtReplica).decode


class RetainAsked(RetainRequest, kw_only=True):
    replicas: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None  # the most replicas; None: all that hold it
    key: Identifier | None = None  # the name of the API key whose cache it is in; None: the one that all share


class RetainReport(Retained, kw_only=True, omit_defaults=True):
    error: Failure | None = None  # if no replica has done it


async def retain(services: Services, retained: RetainedPrefixes, body: bytes) -> tuple[int, RetainReport]:
    """Ask the replicas that hold most of the prompt to retain it, or no longer; return a status and their answers."""
    asked = read(body, RetainAsked)
    prompt = await _prompt_of(services, asked)
    held: list[tuple[int, Member]] = []  # replicas of ours that hold something of it
    for member in services.members.model(asked.model).members:
        if member.profile.retains and (size := member.block_size):
            runs = runs_of(services.placement.index_of(size).holders(prompt.keys(size))).get(member.slot, [])
            if runs and not runs[0][0]:
                held.append((runs[0][1] + 1, member))
    holders = [member for _, member in sorted(held, key=lambda one: (-one[0], one[1].name))][: asked.replicas]
    packed = prompt.packed[0]
    size = holders[0].block_size if holders else 0
    keys = prompt.keys(size) if size else []
    key = keys[-1] if keys else 0
    if asked.ttl_s and keys:
        try:
            retained.check_room(key, packed, services.now_s())
        except Full as full:
            raise ApiError(409, str(full), code="retention_full") from full
    found = await _ask_all(holders, asked.model, packed, prompt.salt, asked.ttl_s)
    now_s = services.now_s()
    prefix = RetainedPrefix(key, asked.model, size, len(keys) * size, asked.ttl_s, {}, packed, prompt.salt)
    prefix.until_s = {one.name: now_s + asked.ttl_s for one in found if one.retained_blocks}
    if asked.ttl_s and prefix.until_s:
        retained.retain(prefix)
    elif not asked.ttl_s:
        retained.end(key)
    return _reported(prefix, found)


async def end(members: Members, retained: RetainedPrefixes, now_s: float, id: str) -> tuple[int, RetainReport]:
    """End an operator's retention; ApiError 404 or 409."""
    retained.expire(now_s)
    prefix = retained.find(id)
    if prefix is None:
        raise ApiError(404, f"nothing is retained as {quoted(id)}; see GET /retain", code="retention_not_found")
    if not prefix.is_operators:
        fix = "its tokens are not kept here: send its messages and ttl_s 0 to POST /retain, or let its time pass"
        raise ApiError(409, f"{quoted(id)} is retained for a client; {fix}", code="retained_by_client")
    holders = [member for name in prefix.until_s if (member := members.by_name.get(name)) is not None]
    found = await _ask_all(holders, prefix.model, prefix.packed, prefix.salt, 0)
    retained.end(prefix.key)
    prefix.ttl_s = 0
    return _reported(prefix, found)


def listed(retained: RetainedPrefixes, now_s: float) -> RetainedList:
    def at(prefix: RetainedPrefix) -> list[RetainedAt]:
        return [RetainedAt(name, left_s=round(until_s - now_s, 3)) for name, until_s in prefix.until_s.items()]

    return RetainedList([Retained(**_about(prefix, at(prefix))) for prefix in retained.all(now_s)])


def _reported(prefix: RetainedPrefix, found: Sequence[RetainedAt]) -> tuple[int, RetainReport]:
    failed = [one for one in found if one.error is not None]
    error = None
    if failed and len(failed) == len(found):
        message = f"none of {len(found)} replicas has done it; {failed[0].name} says: {failed[0].error}"
        error = Failure(message, "server_error", "not_retained")
    return (SUCCESS if error is None else BAD_GATEWAY), RetainReport(**_about(prefix, found), error=error)


def _about(prefix: RetainedPrefix, at: Sequence[RetainedAt]) -> dict[str, Any]:
    of_whom = {"by": "operator" if prefix.is_operators else "client", "replicas": list(at)}
    of_what = {"id": prefix.id if prefix.tokens else "", "model": prefix.model, "tokens": prefix.tokens}
    return of_what | of_whom | {"ttl_s": prefix.ttl_s}


async def _prompt_of(services: Services, asked: RetainAsked) -> Prompt:
    key = next((key for key in services.admission.keys.values() if key.name == asked.key), None)
    if asked.key is not None and key is None:
        fix = "leave key out for the cache that all share"
        raise invalid(f"there is no API key named {quoted(asked.key)}; {fix}", "key")
    fields: dict[str, Any] = {"model": asked.model}
    if asked.cache_salt is not None:
        fields["cache_salt"] = asked.cache_salt
    if asked.messages is None:
        api = COMPLETIONS
        fields |= {"prompt": asked.prompt}
    else:
        api = CHAT
        fields |= {"messages": asked.messages, "tools": asked.tools, "add_generation_prompt": False}
        fields["chat_template_kwargs"] = asked.chat_template_kwargs
    body = msgspec.json.encode(fields)
    _, prompt = await read_prompt(services.members, services.reading, body, Admitted("", key=key), api)
    if not prompt.exact:
        raise invalid(f"the tokens of {quoted(asked.model)} are not known here: {prompt.why_not}", "model")
    return prompt


async def _ask_all(
    members: Sequence[Member], model: str, packed: bytes, salt: str | None, ttl_s: float
) -> list[RetainedAt]:
    fields: dict[str, Any] = {"model": model, "ttl_s": ttl_s}
    if salt is not None:
        fields["cache_salt"] = salt
    body = msgspec.json.encode(fields | {"prompt": unpack_ids(packed)}) if members else b""

    async def at(member: Member) -> RetainedAt:
        said = await say(member.server, "/retain", body, RETAIN_S)
        if said.status != SUCCESS:
            return RetainedAt(member.name, error=said.message)
        try:
            found = _decode(said.body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return RetainedAt(member.name, error=str(error))
        left_s = ttl_s if found.retained_blocks else 0.0
        return RetainedAt(member.name, found.cached_blocks, found.retained_blocks, left_s)

    return await at_all(members, at)
