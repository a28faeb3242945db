"""Values that a router's settings take beside those of `api.process.settings`, also for commands that ask a router."""

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import click

from api.errors import ApiError
from api.http.path import parse_path, raw_path
from api.process.settings import Text
from router.members.spec import parse_target
from router.workers.peer_names import parse_endpoint


class Url(Text):
    """A URL, with or without /v1, as clients of OpenAI's API write it."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        url = super().convert(value, param, ctx)
        try:
            parse_target(url)
        except ValueError:
            self.fail(f"{url!r} is not a URL; write http://HOST:PORT.", param, ctx)
        return url.rstrip("/").removesuffix("/v1")


class Origin(Url):
    name = "origin"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "*":
            return "*"
        origin = super().convert(value, param, ctx)
        if urlsplit(str(value)).path not in ("", "/"):
            self.fail(f"{str(value)!r} has a path; write https://HOST, as browsers send it, or *.", param, ctx)
        return origin


class Checked(click.ParamType[str]):
    """Text that `check` looks at, which raises ValueError."""

    def __init__(self, name: str, check: Callable[[str], object]) -> None:
        self.name = name
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            self._check(str(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        return str(value)


def check_client_path(path: str) -> None:
    try:
        usual = raw_path(parse_path(path.encode())).decode() == path
    except ApiError:
        usual = False
    if not (usual and path.startswith("/v1/")):
        raise ValueError(f"{path!r} is not a path below /v1/; write it like /v1/videos")


def check_address(text: str) -> None:
    """Check the address of a listening socket."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} is no address to listen at; write 127.0.0.1:9002 or [::]:9002")


def check_secret(text: str) -> None:
    """Check a key that has to fit into a header; it is never quoted."""
    if not text or not all("!" <= letter <= "~" for letter in text):
        raise ValueError("The key is empty or has characters that are invalid in a header; use visible ASCII")


URL = Url()
CLIENT_PATH = Checked("path", check_client_path)
ENDPOINT = Checked("endpoint", parse_endpoint)
ADDRESS = Checked("address", check_address)
SECRET = Checked("key", check_secret)
