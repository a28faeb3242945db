"""Values that a router's settings take beside those of `api.process.settings`, also for commands that ask a router."""

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


class ClientPath(click.ParamType[str]):
    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        try:
            usual = raw_path(parse_path(path.encode())).decode() == path
        except ApiError:
            usual = False
        if not (usual and path.startswith("/v1/")):
            self.fail(f"{path!r} is not a path below /v1/; write it like /v1/videos.", param, ctx)
        return path


class Endpoint(click.ParamType[str]):
    """An endpoint of a ZeroMQ socket."""

    name = "endpoint"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_endpoint(str(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        return str(value)


class Address(click.ParamType[str]):
    """The address of a listening socket."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        host, _, port = str(value).rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
            self.fail(f"{value!r} is no address to listen at; write 127.0.0.1:9002 or [::]:9002.", param, ctx)
        return str(value)


class Secret(click.ParamType[str]):
    """A key that fits into a header; it is never quoted."""

    name = "key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        if not text or not all("!" <= letter <= "~" for letter in text):
            self.fail("The key is empty or has characters that are invalid in a header; use visible ASCII.", param, ctx)
        return text


URL = Url()
ENDPOINT = Endpoint()
ADDRESS = Address()
SECRET = Secret()
