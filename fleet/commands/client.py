"""Talks to the controller of a fleet over HTTP. What goes wrong is an error in one line that says what to do."""

from types import TracebackType
from typing import Self, TypeVar

import click
import httpx2
import msgspec
from msgspec import Struct

from fleet.commands.known import known, listed
from fleet.commands.view import ModelView, View
from fleet.plan import FleetPlan

TIMEOUT_S = 10.0

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class _Error(Struct):
    message: str


class _Refusal(Struct):
    error: _Error


class _Names(Struct):
    replicas: tuple[str, ...]


class Unreachable(click.ClickException):
    """The controller does not answer, or does not know yet what to say; `reason` is a few words."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        self.reason = reason
        super().__init__(f"no controller answers at {url}: {reason}")

    def format_message(self) -> str:
        return f"{self.message}; is the fleet running? On this machine there are: {listed(known())}"


class Refused(click.ClickException):
    """The controller's own words."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class Fleet:
    """One fleet's controller; to be closed, or used as a context manager."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._http = httpx2.Client(timeout=TIMEOUT_S, headers=headers, trust_env=False)

    def view(self) -> View:
        return self.read(self.answer())

    def answer(self) -> bytes:
        """What `read` reads, as it came."""
        return self._ask("GET", "/fleet")

    def read(self, answer: bytes) -> View:
        return self._decode(answer, View)

    def scale(self, model: str, count: int) -> ModelView:
        return self._decode(self._ask("POST", "/models/scale", {"model": model, "replicas": count}), ModelView)

    def restart(self, model: str, surge: int = 0) -> ModelView:
        return self._decode(self._ask("POST", "/models/restart", {"model": model, "surge": surge}), ModelView)

    def drain(self, replica: str, wanted: bool = True) -> None:
        self._ask("POST", "/replicas/drain", {"replica": replica, "drain": wanted})

    def drain_node(self, node: str, wanted: bool = True) -> tuple[str, ...]:
        """Returns the replicas that run there."""
        return self._decode(self._ask("POST", "/nodes/drain", {"node": node, "drain": wanted}), _Names).replicas

    def log(self, replica: str, lines: int) -> str:
        content = self._ask("GET", "/replicas/log", parameters={"replica": replica, "lines": str(lines)})
        return content.decode(errors="replace")

    def want(self, plan: FleetPlan) -> None:
        self._ask("PUT", "/fleet", plan)

    def end(self) -> None:
        self._ask("POST", "/end", {})

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: str, path: str, body: object = None, parameters: dict[str, str] | None = None) -> bytes:
        content = None if body is None else _encode(body)
        try:
            answer = self._http.request(
                method,
                self.url + path,
                content=content,
                params=parameters,
                headers={} if content is None else {"content-type": "application/json"},
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unreachable(self.url, str(error) or type(error).__name__) from error
        if answer.is_success:
            return answer.content
        raise self._refusal(answer)

    def _refusal(self, answer: httpx2.Response) -> click.ClickException:
        try:
            message = msgspec.json.decode(answer.content, type=_Refusal).error.message
        except (msgspec.MsgspecError, UnicodeDecodeError):
            where = f"{self.url}{answer.url.path}"
            return click.ClickException(
                f"what answers at {where} with status {answer.status_code} is no fleet's controller; see --fleet"
            )
        if answer.status_code in (401, 403):
            message += "; give the fleet's key as WARMROUTE_FLEET_KEY"
        return Refused(answer.status_code, message)

    def _decode(self, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise click.ClickException(
                f"what answers at {self.url} is no fleet's controller: {error}; see --fleet"
            ) from error
