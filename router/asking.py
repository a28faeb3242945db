"""Asks a running router, for commands that draw what it says; every failure is a click error of one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
import httpx2
import msgspec
from msgspec import Struct

from events.tool.words import printable

TIMEOUT_S = 30.0


class _Error(Struct):
    message: str


class _Refusal(Struct):
    error: _Error


@contextmanager
def asking(router_url: str, key: str | None) -> Iterator[httpx2.Client]:
    """A client whose paths are the router's; `checked` reads what it answers."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        with httpx2.Client(base_url=router_url, timeout=TIMEOUT_S, headers=headers, trust_env=False) as client:
            yield client
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise click.ClickException(f"no router answers at {router_url}: {reason}; see --router") from error


def checked(response: httpx2.Response, router_url: str) -> bytes:
    if response.status_code == 200:
        return response.content
    try:
        why = msgspec.json.decode(response.content, type=_Refusal).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise click.ClickException(
            f"what answers at {router_url} is no router: status {response.status_code} for {response.url.path}"
        ) from None
    hint = "; see --admin-key" if response.status_code in (401, 403) else ""
    raise click.ClickException(f"the router says: {printable(why)}{hint}")
