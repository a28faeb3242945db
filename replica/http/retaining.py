"""Retaining what is cached of a prompt, for an operator: nothing is computed for it."""

from starlette.requests import Request
from starlette.responses import Response

from api.http.responses import json_response
from api.native import pack_ids
from api.openai.engine_requests import RetainRequest
from api.openai.requests import read
from api.responses import RetainedPrefix
from replica.http.engine_client import EngineClient
from replica.http.request_reader import Reader


async def retain(request: Request, engine: EngineClient, reader: Reader, block_size: int) -> Response:
    """Retain the cached blocks of the prompt, or no longer, and say how many there are."""
    async with reader.body(request) as body:
        asked, tokens = await reader.aside(request, len(body), lambda: _asked(body, reader))
    found = await engine.retain(pack_ids(tokens), asked.ttl_s, reader.adapter(asked.model), asked.cache_salt)
    return json_response(
        RetainedPrefix(
            blocks=len(tokens) // block_size,
            cached_blocks=found.cached_blocks,
            retained_blocks=found.retained_blocks,
            block_size=block_size,
        )
    )


def _asked(body: bytes, reader: Reader) -> tuple[RetainRequest, list[int]]:
    asked = read(body, RetainRequest)
    reader.check_model(asked.model)
    return asked, reader.prompts.beginning(asked)
