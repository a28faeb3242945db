"""The event sockets of a warmroute replica, asked for at its HTTP address."""

import os

import click
import httpx2
import msgspec
from msgspec import Struct

from events.publisher import EventEndpoints
from events.source import Source

TIMEOUT_S = 5.0
KEY = "WARMROUTE_API_KEY"


class _LoadResponse(Struct):
    model: str
    topic: str | None = None
    endpoints: EventEndpoints | None = None


def source_at(url: str) -> Source:
    """Return all sockets of a replica, at its URL with or without /v1; raise a click error if it has none."""
    url = url.rstrip("/").removesuffix("/v1")
    key = os.environ.get(KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx2.get(f"{url}/load", headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise click.UsageError(f"nothing answers at {url}: {error or type(error).__name__}") from error
    if answer.status_code == 401:
        raise click.UsageError(f"the replica at {url} requires a key; set {KEY}")
    try:
        said = msgspec.json.decode(answer.content, type=_LoadResponse)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise click.UsageError(
            f"{url} is not a warmroute replica; name the socket of its events, tcp://HOST:PORT"
        ) from error
    if said.endpoints is None:
        raise click.UsageError(f"the replica at {url} sends no events, or has not started yet")
    found = said.endpoints
    name = url.partition("://")[2]
    return Source(name, found.events, found.replay, found.status, found.snapshot, said.topic or "", said.model)
