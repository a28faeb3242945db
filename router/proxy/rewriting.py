"""Requests for models under other names, before anything else looks into their bodies."""

import asyncio
from collections.abc import Iterable
from functools import partial

from api.errors import ApiError
from router.members.upstream import Header
from router.prompts.model_rewrites import Rules, rewritten
from router.prompts.reading.client import is_quick
from router.proxy.exchange import Exchange
from router.proxy.request import Request
from router.proxy.responses import made_for
from router.proxy.sessions import session_of


def serve_rewritten(request: Request, exchange: Exchange) -> None:
    """Begin with the whole body, for the model that the request gets."""
    rules, body = request.router.model_rewrites, exchange.body
    if rules.is_empty:
        request.serve(exchange)
    elif is_quick(body):
        try:
            exchange.replace_body(_rewritten(request, exchange))
        except ApiError as error:
            request.refuse(error)
        else:
            request.serve(exchange)
    else:
        request.aside(partial(_serve_apart, request, exchange))


async def _serve_apart(request: Request, exchange: Exchange) -> None:
    """Look into a large body on a thread, one at a time."""
    async with request.router.rewriting:
        body = await asyncio.to_thread(_rewritten, request, exchange)
    exchange.aside = None
    exchange.replace_body(body)
    request.serve(exchange)


async def rewritten_apart(rules: Rules, body: bytes, headers: Iterable[Header]) -> bytes:
    """Return the body of a request that is not sent."""
    if rules.is_empty:
        return body
    found = await asyncio.to_thread(rewritten, rules, body, partial(_session_key, headers))
    return body if found is None else bytes(found)


def _rewritten(request: Request, exchange: Exchange) -> bytearray | None:
    router = request.router

    def kept_by(response_id: str) -> str | None:
        made = made_for(response_id, request.admitted.cache_salt(None))
        return None if made is None else next(filter(made.by, router.members.models), None)

    key = partial(_session_key, exchange.scope["headers"])
    return rewritten(router.model_rewrites, exchange.body, key, kept_by)


def _session_key(headers: Iterable[Header], prompt_cache_key: str | None) -> str | None:
    session = session_of(headers, prompt_cache_key)
    return None if session is None else session.key
