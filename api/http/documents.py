"""An app's OpenAPI document as JSON and as a page, for routes of the table."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib.metadata import version
from typing import Any, NamedTuple

from starlette.responses import HTMLResponse, JSONResponse, Response

OPENAPI = "/openapi.json"
INLINE_STYLE_ONLY = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}
SUMMARIES = {  # a router's or a replica's document shows them beside its routes
    "POST /v1/chat/completions": "Answer a conversation, as OpenAI's API does",
    "POST /v1/completions": "Continue a text, as OpenAI's API does",
    "POST /v1/messages": "Answer a conversation, as Anthropic's API does",
    "POST /v1/messages/count_tokens": "Count the tokens of a conversation, as Anthropic's API does",
    "POST /v1/responses": "Answer a conversation, as OpenAI's Responses API does",
    "GET /v1/responses/{response_id}": "Read a stored response",
    "DELETE /v1/responses/{response_id}": "Forget a stored response",
    "GET /v1/models": "List the models",
    "GET /v1/models/{model:path}": "Describe a model",
    "POST /v1/load_lora_adapter": "Load a LoRA adapter",
    "POST /v1/unload_lora_adapter": "Unload a LoRA adapter",
    "POST /tokenize": "Cut a prompt into tokens",
    "POST /detokenize": "Turn tokens into text",
    "GET /tokenizer_info": "Show the special tokens and the chat template",
    "GET /health": "Tell whether the process lives",
    "GET /ready": "Tell whether requests are answered, or why not",
    "GET /metrics": "Show metrics for Prometheus",
    "GET /version": "Show the version of warmroute",
    "GET /load": "Show the replica's load, its cache and its event sockets",
    "GET /usage": "Show requests and tokens by day, key and model",
    "GET /replicas": "List the replicas with their state, cache and load",
    "POST /replicas": "Add a replica",
    "DELETE /replicas/{name}": "Remove a replica that was added",
    "POST /replicas/{name}/drain": "Send a replica no new requests",
    "POST /replicas/{name}/undrain": "Send a replica requests again",
    "POST /replicas/{name}/resync": "Read a replica's whole cache again",
    "POST /reset_prefix_cache": "Clear the prefix caches",
    "POST /retain": "Keep a prefix longer in the caches",
    "GET /retain": "List what is retained",
    "DELETE /retain/{id}": "End a retention",
    "POST /explain": "Show where a request would go, and why",
    "GET /decisions": "List the last decisions",
    "GET /decisions/{request_id:path}": "Show one decision",
    "GET /prefixes": "Show what recent prompts share, and which replicas hold it",
    "GET /debug/index": "Show the sizes of all that can grow",
    "GET /dashboard/replicas/{name}": "Show a replica as its page of the dashboard does",
}
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font-family: system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
summary {{ padding: .3rem 0; cursor: pointer }}
pre {{ overflow-x: auto }}
</style>
<h1>{title} {version}</h1>
<p>Programs read <a href="openapi.json">openapi.json</a>, and so do viewers such as Swagger UI.</p>
<h2>Routes</h2>
{routes}
<h2>Schemas</h2>
{schemas}
</html>
"""


class Operation(NamedTuple):
    """A method of a route, and what the document tells of it."""

    method: str
    template: str
    told: dict[str, Any]


def described(title: str, operations: Iterable[Operation], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """The document of these operations."""
    paths: dict[str, Any] = {}
    for method, template, told in operations:
        path = re.sub(r":path}", "}", template)
        paths.setdefault(path, {})[method.lower()] = {"summary": SUMMARIES[f"{method} {template}"], **told}
    info = {"title": title, "version": version("warmroute")}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": dict(schemas)}}


# Each is made on a thread, since the first one takes long.


async def openapi(make: Callable[[], dict[str, Any]]) -> Response:
    return JSONResponse(await asyncio.to_thread(make))


async def docs(make: Callable[[], dict[str, Any]]) -> Response:
    return HTMLResponse(await asyncio.to_thread(lambda: _page(make())), headers=INLINE_STYLE_ONLY)


def _page(document: Mapping[str, Any]) -> str:
    routes = [
        _folded(f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}", operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    ]
    schemas = [_folded(f"<code>{name}</code>", schema) for name, schema in document["components"]["schemas"].items()]
    return PAGE.format(**document["info"], routes="\n".join(routes), schemas="\n".join(schemas))


def _folded(summary: str, value: Any) -> str:
    text = escape(json.dumps(value, indent=2))
    return f"<details><summary>{summary}</summary><pre>{text}</pre></details>"
