"""A controller that follows a script, commands run against it, and a machine without any other fleet."""

import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import click
import pytest
from click.testing import CliRunner


class Asked(NamedTuple):
    method: str
    path: str
    body: Any
    key: str | None


class Script:
    """GET /fleet gives one view after the other, and the last one for ever; other answers are looked up by path."""

    def __init__(self, *views: dict[str, Any]) -> None:
        self.url = ""
        self.views = list(views)
        self.answers: dict[str, tuple[int, Any]] = {}
        self.logs: list[str | tuple[int, Any]] = []  # as the views
        self.asked: list[Asked] = []
        self.stop: Callable[[], None] = lambda: None  # nobody answers any more

    def answer(self, asked: Asked) -> tuple[int, Any]:
        path = urlsplit(asked.path).path
        for named in (path, f"{asked.method} {path}"):
            if named in self.answers:
                return self.answers[named]
        if (asked.method, path) == ("GET", "/fleet"):
            return 200, self.views.pop(0) if len(self.views) > 1 else self.views[0]
        if path == "/replicas/log":
            found = self.logs.pop(0) if len(self.logs) > 1 else self.logs[0]
            return (200, found) if isinstance(found, str) else found
        return 200, {"status": "ok"}

    @property
    def changes(self) -> list[tuple[str, Any]]:
        return [(asked.path, asked.body) for asked in self.asked if asked.method != "GET"]


def refusal(status: int, message: str) -> tuple[int, Any]:
    return status, {"error": {"message": message, "code": "some_code"}}


@contextmanager
def serving(script: Script) -> Iterator[Script]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            asked = Asked(self.command, self.path, body, self.headers.get("authorization"))
            script.asked.append(asked)
            status, what = script.answer(asked)
            if callable(what):  # another one each time
                what = what()
                status, what = what if isinstance(what, tuple) else (status, what)
            content = what.encode() if isinstance(what, str) else json.dumps(what).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = answer  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_port}"

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    script.stop = stop
    try:
        yield script
    finally:
        stop()


# ---- what a controller says


def model(name: str = "demo", wanted: int = 2, ready: int = 2, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": name, "engine": "native", "wanted": wanted, "ready": ready, "replicas": ready} | more


def replica(name: str, life: str = "ready", **more: Any) -> dict[str, Any]:
    usual = {
        "name": name,
        "model": name.rpartition("-")[0],
        "generation": 0,
        "old": False,
        "life": life,
        "why": "",
        "since": 1_800_000_000.0,
        "node": "127.0.0.1",
        "pid": 4711,
        "incarnation": "0123456789ab",
        "url": "http://127.0.0.1:9",
        "starts": 1,
        "load": {"running": 1, "waiting": 2, "queued_prefill_tokens": 4321, "cached_blocks": 250},
        "hit_rate": 0.5,
        "total_blocks": 1000,
        "block_size": 16,
        "measured_at": 1_800_000_000.0,
    }
    return usual | more


def view(models: Sequence[dict[str, Any]], replicas: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"version": "0.1.0", "ending": False, "pid": 1, "models": models, "replicas": replicas} | more


def calm(count: int = 2, **more: Any) -> dict[str, Any]:
    """All that is wanted is ready."""
    return view([model(wanted=count, ready=count)], [replica(f"demo-{number}") for number in range(count)], **more)


# ---- running commands


class Ran(NamedTuple):
    status: int
    output: str
    errors: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()


def run(command: click.Command, *arguments: str, **environment: str) -> Ran:
    """As the dispatcher runs it: an int that a command returns is its exit status."""
    result = CliRunner(env=environment).invoke(command, arguments, standalone_mode=False)
    if isinstance(result.exception, click.ClickException):
        return Ran(result.exception.exit_code, result.stdout, result.stderr + result.exception.format_message())
    if result.exception is not None:
        raise result.exception
    return Ran(result.return_value if isinstance(result.return_value, int) else 0, result.stdout, result.stderr)


def machine_without_fleets(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Whatever fleets run on this machine, commands see none; returns where they would be noted."""
    for name in ("runtime", "temporary", "home"):
        (folder / name).mkdir(exist_ok=True)
    patch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))
    patch.setenv("HOME", str(folder / "home"))
    patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    for name in ("WARMROUTE_FLEET", "WARMROUTE_FLEET_KEY"):
        patch.delenv(name, raising=False)
    patch.setenv("COLUMNS", "80")
    return folder / "runtime" / "warmroute"
