"""Loads and unloads a LoRA adapter at every replica of its base model, and reports which have it."""

import asyncio
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from api.errors import ApiError, invalid, quoted
from router.core import Router
from router.members.broken import Broken, no_replica
from router.members.fetch import fetch
from router.members.members import Server
from router.members.spec import ModelName
from router.monitor.upkeep import Upkeep
from router.workers.questions import FORGET, LEARN_AGAIN

LOAD_S = 120.0  # an engine may read an adapter from a slow disk
MOST_AT_ONCE = 32
MOST_SHOWN = 300  # characters of an engine's answer
SUCCESS, BAD_GATEWAY = 200, 502


class AdapterRequest(Struct, frozen=True):
    """The part of vLLM's and SGLang's request that the router reads; replicas get all of it."""

    lora_name: ModelName
    model: Annotated[str, Meta(max_length=512)] | None = None  # the base, if the router serves several


class AdapterAtReplica(Struct, frozen=True):
    name: str
    has_it: bool  # by its list of models afterwards
    status: int | None  # of its answer; None: there was none
    message: str


class Failure(Struct, frozen=True):
    """An error, in the form that clients know."""

    message: str
    type: str
    code: str
    param: str | None = None


class AdapterReport(Struct, frozen=True, omit_defaults=True):
    lora_name: str
    model: str
    replicas: list[AdapterAtReplica]
    error: Failure | None = None  # if not all replicas are as wanted


_decode = msgspec.json.Decoder(AdapterRequest).decode


async def change_adapter(router: Router, upkeep: Upkeep, body: bytes, *, load: bool) -> tuple[int, AdapterReport]:
    """Send the request to every replica that it concerns; return a status and what each has now.

    If a replica does not have the adapter that should, or the other way round, the status is 400 or 404 where all of
    these answer so, and 502 otherwise.
    """
    try:
        asked = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(
            f"the body does not name an adapter: {error}; write lora_name, and lora_path to load it"
        ) from error
    servers = list(router.members.servers.values())
    if load:
        model = asked.model or _only_base(servers)
        concerned = [one for one in servers if model in one.models and model not in one.adapters]
    else:
        concerned = [one for one in servers if asked.lora_name in one.adapters]
        model = asked.model or (concerned[0].models[0] if concerned else "")
        concerned = [one for one in concerned if model in one.models]
    if not concerned:
        raise ApiError(404, f"no replica {_serves(asked, model, load=load)}", code="adapter_not_found")
    at_once = asyncio.Semaphore(MOST_AT_ONCE)

    async def at(server: Server) -> AdapterAtReplica:
        async with at_once:
            return await _change(upkeep, server, asked.lora_name, body, load=load)

    found = await asyncio.gather(*map(at, concerned))
    if router.colleagues is not None:
        await router.colleagues.told(LEARN_AGAIN, [one.name for one in concerned])
    if not load:
        router.members.forget(asked.lora_name)
        if router.colleagues is not None:
            await router.colleagues.told(FORGET, asked.lora_name)
    status, failure = SUCCESS, None
    if failed := [one for one in found if one.has_it != load]:
        status = failed[0].status or BAD_GATEWAY
        if status not in (400, 404) or any(one.status != status for one in failed):
            status = BAD_GATEWAY
        what = f"{len(failed)} of {len(found)} replicas {'do not have' if load else 'still have'} the adapter"
        message = f"{what}; {failed[0].name} says: {failed[0].message}"
        kind = "server_error" if status == BAD_GATEWAY else "invalid_request_error"
        failure = Failure(message, kind, "adapter_not_changed")
    return status, AdapterReport(asked.lora_name, model, found, failure)


async def _change(upkeep: Upkeep, server: Server, adapter: str, body: bytes, *, load: bool) -> AdapterAtReplica:
    path = f"{server.profile.adapter_routes}/{'load' if load else 'unload'}_lora_adapter"
    status, message = None, ""
    try:
        answer = await fetch(server.upstream, path, body=body, lines=server.key_line, timeout_s=LOAD_S)
        status, message = answer.status, answer.body[: 4 * MOST_SHOWN].decode(errors="replace")[:MOST_SHOWN]
        await upkeep.learn_again(server)
    except Broken as broken:
        message = str(broken)
    return AdapterAtReplica(server.name, adapter in server.adapters, status, message)


def _only_base(servers: Iterable[Server]) -> str:
    bases = sorted({one.models[0] for one in servers if one.models})
    if not bases:
        raise no_replica("no replica has reported its models yet")
    if len(bases) > 1:
        raise invalid(f"the router serves {len(bases)} base models; name the adapter's base as model", "model")
    return bases[0]


def _serves(asked: AdapterRequest, model: str, *, load: bool) -> str:
    return f"serves the base model {quoted(model)}" if load else f"has an adapter {quoted(asked.lora_name)}"
