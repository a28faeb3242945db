"""Requests for models under other names, before anything else looks into their bodies."""

import asyncio
from collections.abc import Collection, Iterable
from functools import partial

import msgspec
from msgspec import Struct

from router.members.upstream import Header
from router.prompts.model_rewrites import Rules, rewritten
from router.prompts.prompt import UNREADABLE
from router.prompts.reading.client import is_quick
from router.proxy.exchange import Exchange
from router.proxy.request import Request
from router.proxy.sessions import session_of

PREVIOUS = b"previous_response_id"


class _Continued(Struct):
    previous_response_id: str | None = None


_decode_continued = msgspec.json.Decoder(_Continued).decode


def serve_rewritten(request: Request, exchange: Exchange) -> None:
    """Begin with the whole body, for the model that the request gets."""
    if request.router.model_rewrites.is_empty:
        request.serve(exchange)
    elif is_quick(exchange.body) and PREVIOUS not in exchange.body:
        _replace(exchange, _rewritten(request, exchange))
        request.serve(exchange)
    else:
        request.aside(partial(_serve_apart, request, exchange))


async def _serve_apart(request: Request, exchange: Exchange) -> None:
    """Look into a large body on a thread; and learn who has the response that this one continues."""
    responses = request.router.responses
    previous = _previous_in(exchange.body) if PREVIOUS in exchange.body else None
    if previous is not None and responses.may_be_elsewhere(previous):
        await responses.find(previous)
    body = await asyncio.to_thread(_rewritten, request, exchange)
    exchange.aside = None
    _replace(exchange, body)
    request.serve(exchange)


async def rewritten_apart(rules: Rules, body: bytes, headers: Iterable[Header]) -> bytes:
    """Return the body of a request that is not sent."""
    if rules.is_empty:
        return body
    return await asyncio.to_thread(rewritten, rules, body, partial(_session_key, headers)) or body


def _rewritten(request: Request, exchange: Exchange) -> bytes | None:
    router = request.router

    def kept(response_id: str) -> Collection[str]:
        """Return the models of the replica that has this response."""
        held = router.responses.get(response_id)
        member = None if held is None else router.members.by_name.get(held.replica)
        return () if member is None else member.models

    key = partial(_session_key, exchange.scope["headers"])
    return rewritten(router.model_rewrites, exchange.body, key, kept)


def _session_key(headers: Iterable[Header], prompt_cache_key: str | None) -> str | None:
    session = session_of(headers, prompt_cache_key)
    return None if session is None else session.key


def _replace(exchange: Exchange, body: bytes | None) -> None:
    if body is not None:
        exchange.replace_body(body)


def _previous_in(body: bytes | bytearray) -> str | None:
    try:
        return _decode_continued(body).previous_response_id
    except UNREADABLE:
        return None
