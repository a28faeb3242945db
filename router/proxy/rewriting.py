"""Requests for models under other names, before anything else looks into their bodies."""

import asyncio
from functools import partial

from api.errors import ApiError
from router.prompts.model_rewrites import Rules, rewritten
from router.prompts.reading.client import is_quick
from router.proxy.exchange import Exchange
from router.proxy.request import Request


def serve_rewritten(request: Request, exchange: Exchange) -> None:
    """Begin with the whole body, for the model that the request gets."""
    rules, body = request.router.model_rewrites, exchange.body
    if rules.is_empty:
        request.serve(exchange)
    elif is_quick(body):
        try:
            exchange.replace_body(rewritten(rules, body))
        except ApiError as error:
            request.refuse(error)
        else:
            request.serve(exchange)
    else:
        request.aside(partial(_serve_apart, request, exchange))


async def _serve_apart(request: Request, exchange: Exchange) -> None:
    """Look into a large body on a thread, one at a time."""
    async with request.router.rewriting:
        body = await asyncio.to_thread(rewritten, request.router.model_rewrites, exchange.body)
    exchange.aside = None
    exchange.replace_body(body)
    request.serve(exchange)


async def rewritten_apart(rules: Rules, body: bytes) -> bytes:
    """Return the body of a request that is not sent."""
    if rules.is_empty:
        return body
    found = await asyncio.to_thread(rewritten, rules, body)
    return body if found is None else bytes(found)
