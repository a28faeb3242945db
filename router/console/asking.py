"""An HTTP client for commands; every failure is a click error of one line that says what to do."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import click
import httpx2
import msgspec
from msgspec import Struct

from events.tool.words import printable

TIMEOUT_S = 30.0

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class _Error(Struct):
    message: str


class _Refusal(Struct):
    error: _Error


class Server(NamedTuple):
    """A kind of server, and the options that name one and its key."""

    name: str
    option: str
    key: str
    says: str = ""  # before its own message
    more: Callable[[], str] = str  # appended to the error if it does not answer


ROUTER = Server("router", "see --router", "see --admin-key", "the router says: ")


class Unreachable(click.ClickException):
    """No server answers; `reason` is a few words."""

    def __init__(self, server: Server, url: str, reason: str) -> None:
        self.reason = reason
        self._more = server.more
        super().__init__(f"no {server.name} answers at {url}: {reason}; {server.option}")

    def format_message(self) -> str:
        return self.message + self._more()


class Refused(click.ClickException):
    """An error response, with the server's own message."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Client:
    """A client of one server, with persistent connections; close it, or use it as a context manager."""

    def __init__(self, url: str, key: str | None = None, server: Server = ROUTER, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._server = server
        self._http = httpx2.Client(**options(key, timeout_s))

    def get(self, path: str, kind: type[T]) -> T:
        return self.decode(path, self.ask("GET", path), kind)

    def post(self, path: str, body: object, kind: type[T]) -> T:
        return self.decode(path, self.ask("POST", path, body), kind)

    def ask(
        self, method: str, path: str, body: object = None, parameters: Mapping[str, str | int] | None = None
    ) -> bytes:
        content = None if body is None else _encode(body)
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            answer = self._http.request(method, self.url + path, content=content, params=parameters, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unreachable(self._server, self.url, reason_of(error)) from error
        return checked(answer, self.url, self._server)

    def decode(self, path: str, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.stranger(f"{path}: {error}") from error

    def stranger(self, why: object) -> click.ClickException:
        """The error for a response that no such server would give."""
        return click.ClickException(
            f"the server at {self.url} is not a {self._server.name}: {why}; {self._server.option}"
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


# The authorities are loaded once: that takes 20 ms, which each client would take anew.
_trusted = cache(partial(httpx2.create_ssl_context, trust_env=False))


def options(key: str | None, timeout_s: float) -> dict[str, Any]:
    """Return the options of an HTTP client that ignores proxies in the environment."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return {"timeout": timeout_s, "headers": headers, "trust_env": False, "verify": _trusted()}


def reason_of(error: Exception) -> str:
    return str(error) or type(error).__name__


def checked(answer: httpx2.Response, url: str, server: Server = ROUTER) -> bytes:
    """Return a good answer's content; raise Refused, or a click error for another kind of server."""
    if answer.is_success:
        return answer.content
    status, path = answer.status_code, answer.url.path
    demands_key = status in (401, 403)
    try:
        said = printable(msgspec.json.decode(answer.content, type=_Refusal).error.message)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        if not demands_key:
            why = f"status {status} for {path}"
            raise click.ClickException(f"the server at {url} is not a {server.name}: {why}; {server.option}") from None
        said = f"it demands a key for {path}"
    raise Refused(status, f"{server.says}{said}" + (f"; {server.key}" if demands_key else ""))
