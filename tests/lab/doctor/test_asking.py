"""Replicas to ask, their keys, and the messages for wrong or missing answers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from lab.commands.doctor import doctor
from lab.doctor.asking import Asking
from router.console.asking import Unreachable
from tests.router.scripted import refused_port

ROUTER = "warmroute_router:open_requests 0\n"
ENGINE = 'vllm:prompt_tokens_total{model_name="m"} 7\n'


class Asked(NamedTuple):
    path: str
    key: str | None


class Server(ThreadingHTTPServer):
    """Server that answers each path as its test defines; others with 404."""

    def __init__(self, **paths: str | tuple[int, str]) -> None:
        self.paths = {f"/{path}": answer for path, answer in paths.items()}
        self.asked: list[Asked] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(Asked(path, self.headers.get("authorization")))
        answer = self.server.paths.get(path, (404, "{}"))
        status, body = (200, answer) if isinstance(answer, str) else answer
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def knowing(*urls: str, **paths: str | tuple[int, str]) -> Server:
    replicas = [{"name": f"r{number}", "url": url} for number, url in enumerate(urls)]
    usual = {"metrics": ROUTER, "replicas": json.dumps({"replicas": replicas}), "decisions": '{"decisions": []}'}
    return Server(**(usual | paths))


def test_a_replica_that_only_the_router_names_gets_no_key() -> None:
    with (
        serving(Server(metrics=ENGINE)) as known,
        serving(Server(metrics=ENGINE)) as named,
        serving(knowing(known.url)) as router,
        Asking(router.url, [named.url], "router-key", "replica-key") as asking,
    ):
        look = asking.look()
        assert set(look.replicas) == {known.url, named.url}
        assert {one.key for one in router.asked} == {"Bearer router-key"}
        assert {one.key for one in named.asked} == {"Bearer replica-key"}
        assert {one.key for one in known.asked} == {None}


def test_a_replica_that_does_not_answer_stops_nothing_unless_it_was_named() -> None:
    gone = f"http://127.0.0.1:{refused_port()}"
    with serving(knowing(gone)) as router:
        with Asking(router.url, []) as asking:
            assert isinstance(asking.look().replicas[gone], str)
        with Asking(router.url, [gone]) as asking, pytest.raises(Unreachable, match="no replica answers at"):
            asking.look()


def test_decisions_that_may_not_be_read_are_none() -> None:
    with serving(knowing(decisions=(403, "{}"))) as router, Asking(router.url, []) as asking:
        look = asking.look()
        assert look.router is not None
        assert look.router.decisions is None


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ({"metrics": ENGINE}, "is not a router: its /metrics has no"),
        ({"metrics": "<html>"}, "is not a router: its metrics cannot be parsed"),
        ({"metrics": (500, "")}, "is not a router: status 500 for /metrics; see --router"),
        ({"replicas": (401, "{}")}, "demands a key for /replicas; see --admin-key"),
        ({"replicas": "[]"}, "is not a router: /replicas: Expected `object`"),
        ({"decisions": "no JSON"}, "is not a router: /decisions?limit=2000: JSON is malformed"),
    ],
)
def test_a_server_that_is_no_router_is_reported_in_one_line(
    paths: dict[str, str | tuple[int, str]], message: str
) -> None:
    with serving(knowing(**paths)) as router, Asking(router.url, []) as asking:
        with pytest.raises(click.ClickException) as refused:
            asking.look()
        assert message in refused.value.message
        assert CliRunner().invoke(doctor, ["--router", router.url]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--router", "nowhere"], "'nowhere' is not an address"),
        (["--replica", ""], "is empty"),
        (["--for", "0"], "0.0 is not in the range"),
        (["--for", "nan"], "nan is not"),
        (["--router", "http://127.0.0.1:{refused}"], "no router answers at http://127.0.0.1:{refused}"),
    ],
)
def test_values_that_cannot_be_used_end_with_status_2(arguments: list[str], message: str) -> None:
    refused = str(refused_port())
    given = [one.replace("{refused}", refused) for one in arguments]
    result = CliRunner().invoke(doctor, given, env={"WARMROUTE_ROUTER": None})
    assert result.exit_code == 2
    assert message.replace("{refused}", refused) in " ".join(result.output.split())
