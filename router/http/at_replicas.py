"""Has every replica load or unload a LoRA adapter, or clear its cache, for an administrator; and reports how that went.

The router doubts what is in a cache that may have been cleared, until events show it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec import Meta, Struct

from api.errors import ApiError, invalid, quoted
from router.members.broken import Broken, no_replica
from router.members.fetch import fetch
from router.members.members import Members, Server
from router.members.spec import ModelName
from router.monitor.upkeep import Upkeep
from router.placement.placement import Placement
from router.workers.colleagues import Colleagues
from router.workers.questions import EXPECT_CLEAR, FORGET, LEARN_AGAIN

LOAD_S = 120.0  # an engine may read an adapter from a slow disk
RESET_S = 60.0  # an engine may first end its requests
MAX_AT_ONCE = 32
MAX_SHOWN = 300  # characters of an engine's answer
SUCCESS, BAD_GATEWAY = 200, 502

At = TypeVar("At")
Result = TypeVar("Result")


class Failure(Struct, frozen=True):
    """An error, in the form that clients know."""

    message: str
    type: str
    code: str
    param: str | None = None


class Said(NamedTuple):
    status: int | None  # None: there was no answer
    message: str  # the beginning of the answer, or why there is none
    body: bytes = b""


async def at_all(replicas: Iterable[At], ask: Callable[[At], Awaitable[Result]]) -> list[Result]:
    """Ask all of them, some at a time."""
    at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def at(replica: At) -> Result:
        async with at_once:
            return await ask(replica)

    return list(await asyncio.gather(*map(at, replicas)))


async def say(server: Server, path: str, body: bytes, timeout_s: float) -> Said:
    try:
        answer = await fetch(server.upstream, path, body=body, lines=server.key_line, timeout_s=timeout_s)
    except Broken as broken:
        return Said(None, str(broken))
    message = answer.body[: 4 * MAX_SHOWN].decode(errors="replace")[:MAX_SHOWN]
    return Said(answer.status, message, answer.body)


def judged(found: Sequence[Any], failed: Sequence[Any], what: str, own: Sequence[int], code: str) -> tuple[int, Any]:
    """The status of those that failed: theirs, where all have the same one of these `own`, and else 502; and why."""
    if not failed:
        return SUCCESS, None
    status = failed[0].status or BAD_GATEWAY
    if status not in own or any(one.status != status for one in failed):
        status = BAD_GATEWAY
    message = f"{len(failed)} of {len(found)} replicas {what}; {failed[0].name} says: {failed[0].message}"
    return status, Failure(message, "server_error" if status == BAD_GATEWAY else "invalid_request_error", code)


# ---- adapters


class AdapterRequest(Struct, frozen=True):
    """The part of vLLM's and SGLang's request that the router reads; replicas get all of it."""

    lora_name: ModelName
    model: Annotated[str, Meta(max_length=512)] | None = None  # the base, if the router serves several


class AdapterAtReplica(Struct, frozen=True):
    name: str
    has_it: bool  # its list of models says so afterwards
    status: int | None  # the status of its answer; None: there was none
    message: str


class AdapterReport(Struct, frozen=True, omit_defaults=True):
    lora_name: str
    model: str
    replicas: list[AdapterAtReplica]
    error: Failure | None = None  # if not all replicas are as wanted


_decode = msgspec.json.Decoder(AdapterRequest).decode


async def change_adapter(
    members: Members, upkeep: Upkeep, colleagues: Colleagues | None, body: bytes, *, load: bool
) -> tuple[int, AdapterReport]:
    """Send the request to every replica that it concerns; return a status and what each has now.

    If a replica does not have the adapter that should, or the other way round, the status is 400 or 404 where all of
    these answer so, and 502 otherwise.
    """
    try:
        asked = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fix = "write lora_name, and lora_path to load it"
        raise invalid(f"the body does not name an adapter: {error}; {fix}") from error
    servers = list(members.servers.values())
    if load:
        bases = sorted({one.models[0] for one in servers if one.models})
        if not asked.model and not bases:
            raise no_replica("no replica has reported its models yet")
        if not asked.model and len(bases) > 1:
            raise invalid(f"the router serves {len(bases)} base models; name the adapter's base as model", "model")
        model = asked.model or bases[0]
        concerned = [one for one in servers if model in one.models and model not in one.adapters]
    else:
        concerned = [one for one in servers if asked.lora_name in one.adapters]
        model = asked.model or (concerned[0].models[0] if concerned else "")
        concerned = [one for one in concerned if model in one.models]
    if not concerned:
        what = f"serves the base model {quoted(model)}" if load else f"has an adapter {quoted(asked.lora_name)}"
        raise ApiError(404, f"no replica {what}", code="adapter_not_found")

    async def at(server: Server) -> AdapterAtReplica:
        path = f"{server.profile.adapter_routes}/{'load' if load else 'unload'}_lora_adapter"
        said, message = await say(server, path, body, LOAD_S), None
        try:
            if said.status is not None:
                await upkeep.learn_again(server)
        except Broken as broken:
            message = str(broken)
        return AdapterAtReplica(server.name, asked.lora_name in server.adapters, said.status, message or said.message)

    found = await at_all(concerned, at)
    if colleagues is not None:
        await colleagues.told(LEARN_AGAIN, [one.name for one in concerned])
    if not load:
        members.forget(asked.lora_name)
        if colleagues is not None:
            await colleagues.told(FORGET, asked.lora_name)
    failed, what = [one for one in found if one.has_it != load], "do not have" if load else "still have"
    status, failure = judged(found, failed, f"{what} the adapter", (400, 404), "adapter_not_changed")
    return status, AdapterReport(asked.lora_name, model, found, failure)


# ---- caches


class ResetAtReplica(Struct, frozen=True):
    name: str
    cleared: bool  # its answer says so
    status: int | None  # the status of its answer; None: there was none
    message: str


class ResetReport(Struct, frozen=True, omit_defaults=True):
    replicas: list[ResetAtReplica]
    error: Failure | None = None  # if not all have cleared their cache


class _Cleared(Struct):
    """The answer of vLLM since 0.33: it clears nothing while blocks are used, and says so with status 200."""

    success: bool = True


_decode_cleared = msgspec.json.Decoder(_Cleared).decode


def expect_clear(server: Server, placement: Placement) -> None:
    """Note that the replicas at this address may clear their caches: nothing of them is sure until events come."""
    for member in server.members:
        if member.feed is None:
            placement.approximate.clear(member.slot)
        else:
            member.feed.expect_clear()


async def reset_caches(
    members: Members,
    placement: Placement,
    colleagues: Colleagues | None,
    query: Iterable[tuple[str, str]],
) -> tuple[int, ResetReport]:
    """Send the request, with the client's query, to every replica; return a status and what each says.

    If a cache was not cleared, the status is 400, 404 or 409 where all of these answer so, and 502 otherwise.
    """
    servers, asked = list(members.servers.values()), urlencode(list(query))
    if not servers:
        raise no_replica("there is no replica")
    if colleagues is not None:
        await colleagues.told(EXPECT_CLEAR)

    async def at(server: Server) -> ResetAtReplica:
        expect_clear(server, placement)
        try:
            said = await say(server, server.profile.reset_path + (f"?{asked}" if asked else ""), b"", RESET_S)
        finally:
            expect_clear(server, placement)  # it may have happened just now, or happen later
        cleared = said.status == SUCCESS
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # an older one answers in words
            cleared = cleared and _decode_cleared(said.body).success
        return ResetAtReplica(server.name, cleared, said.status, said.message)

    found = await at_all(servers, at)
    failed, what = [one for one in found if not one.cleared], "have not cleared their cache"
    status, failure = judged(found, failed, what, (400, 404, 409), "cache_not_cleared")
    return status, ResetReport(found, failure)
