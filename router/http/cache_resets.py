"""Clears the prefix cache of every replica, and says of each until its events show it that its cache is in doubt."""

import asyncio
from collections.abc import Iterable, Sequence
from urllib.parse import urlencode

import msgspec
from msgspec import Struct

from router.core import Router
from router.http.adapters import BAD_GATEWAY, MOST_AT_ONCE, MOST_SHOWN, SUCCESS, Failure
from router.members.broken import Broken, no_replica
from router.members.fetch import fetch
from router.members.members import Server
from router.workers.questions import EXPECT_CLEAR

RESET_S = 60.0  # an engine may first end its requests
REFUSALS = 400, 404, 409


class ResetAtReplica(Struct, frozen=True):
    name: str
    cleared: bool  # by its answer
    status: int | None  # of its answer; None: there was none
    message: str


class ResetReport(Struct, frozen=True, omit_defaults=True):
    replicas: list[ResetAtReplica]
    error: Failure | None = None  # if not all have cleared their cache


class _Answer(Struct):
    """The answer of vLLM since 0.33: it clears nothing while blocks are used, and says so with status 200."""

    success: bool = True


_decode = msgspec.json.Decoder(_Answer).decode


async def reset_caches(router: Router, query: Iterable[tuple[str, str]]) -> tuple[int, ResetReport]:
    """Send the request, with the client's query, to every replica; return a status and what each says.

    If a cache was not cleared, the status is 400, 404 or 409 where all of these answer so, and 502 otherwise.
    """
    servers, asked = list(router.members.servers.values()), urlencode(list(query))
    if not servers:
        raise no_replica("there is no replica")
    at_once = asyncio.Semaphore(MOST_AT_ONCE)
    if router.colleagues is not None:
        await router.colleagues.told(EXPECT_CLEAR)

    async def at(server: Server) -> ResetAtReplica:
        async with at_once:
            return await _reset(router, server, asked)

    found = await asyncio.gather(*map(at, servers))
    return _reported(found)


def _reported(found: Sequence[ResetAtReplica]) -> tuple[int, ResetReport]:
    failed = [one for one in found if not one.cleared]
    if not failed:
        return SUCCESS, ResetReport(list(found))
    status = failed[0].status or BAD_GATEWAY
    if status not in REFUSALS or any(one.status != status for one in failed):
        status = BAD_GATEWAY
    message = f"{len(failed)} of {len(found)} replicas have not cleared their cache; {failed[0].name} says: "
    kind = "server_error" if status == BAD_GATEWAY else "invalid_request_error"
    return status, ResetReport(list(found), Failure(message + failed[0].message, kind, "cache_not_cleared"))


async def _reset(router: Router, server: Server, query: str) -> ResetAtReplica:
    path = server.profile.reset_path + (f"?{query}" if query else "")
    status, cleared = None, False
    router.expect_clear(server)
    try:
        answer = await fetch(server.upstream, path, body=b"", lines=server.key_line, timeout_s=RESET_S)
        status, message = answer.status, answer.body[: 4 * MOST_SHOWN].decode(errors="replace")[:MOST_SHOWN]
        cleared = status == SUCCESS and _succeeded(answer.body)
    except Broken as broken:
        message = str(broken)
    finally:
        router.expect_clear(server)  # it may have happened just now, or happen later
    return ResetAtReplica(server.name, cleared, status, message)


def _succeeded(body: bytes) -> bool:
    try:
        return _decode(body).success
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # older ones answer in words, or nothing
