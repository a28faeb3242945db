"""A stand-in for the Hugging Face hub on loopback, which lists and sends a model, and for a package index."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Standin:
    """One model, `hub_id`, whose `main` is COMMIT; `asked` says what was, without HEAD."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.hub_id = "org/name"
        self.wheels: dict[str, bytes] = {}  # of the index, below /simple
        self.commit = COMMIT
        self.commits = {COMMIT}  # that can be asked for, whatever `main` is
        self.asked: list[str] = []
        self.cut: str | None = None  # of this file only half is sent
        self.held: str | None = None  # this file waits for `go_on`
        self.holds = threading.Event()
        self.go_on = threading.Event()
        self.url = ""

    def downloads(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.asked if "/resolve/" in path)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = unquote(path).replace(self.hub_id, "org/name").strip("/").split("/")
        match parts:
            case ["simple", _]:
                links = (f'<a href="/wheels/{name}">{name}</a>' for name in self.wheels)
                return 200, {"Content-Type": "text/html"}, "\n".join(links).encode()
            case ["wheels", name]:
                return 200, {}, self.wheels[name]
            case ["api", "models", "org", "name"] | ["api", "models", "org", "name", "revision", "main"]:
                return 200, {}, self._model(self.commit)
            case ["api", "models", "org", "name", "revision", revision] if revision in self.commits:
                return 200, {}, self._model(revision)
            case ["api", "models", "org", "name", "revision", _]:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            case ["api", "models", "org", "name", "tree", _, *_]:
                entries = [
                    {"type": "file", "path": name, "size": len(content), "oid": self._oid(name)}
                    for name, content in self.files.items()
                ]
                return 200, {}, json.dumps(entries).encode()
            case ["org", "name", "resolve", commit, *names] if "/".join(names) in self.files:
                name = "/".join(names)
                headers = {"ETag": f'"{self._oid(name)}"', "X-Repo-Commit": commit}
                return 200, headers, self.files[name]
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"

    def _model(self, commit: str) -> bytes:
        siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
        return json.dumps({"id": "org/name", "modelId": "org/name", "sha": commit, "siblings": siblings}).encode()

    def _oid(self, name: str) -> str:
        return hashlib.sha1(self.files[name]).hexdigest()


@contextmanager
def standing_in(files: Mapping[str, bytes]) -> Iterator[Standin]:
    hub = Standin(files)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            hub.asked.append(urlsplit(self.path).path)
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = urlsplit(self.path).path
            status, headers, content = hub.answer(path)
            begin = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").partition("-")[0])
            self.send_response(206 if begin and status == 200 else status)
            for name, value in headers.items():
                self.send_header(name, value)
            if begin:
                self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
            content = content[begin:]
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self._send(path, content)

        def _send(self, path: str, content: bytes) -> None:
            half = len(content) // 2
            self.wfile.write(content[:half])
            self.wfile.flush()
            if hub.held is not None and path.endswith(hub.held):
                hub.holds.set()
                hub.go_on.wait(30)
            if hub.cut is None or not path.endswith(hub.cut):
                self.wfile.write(content[half:])

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """A client that was killed has left."""

    with Server(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.go_on.set()
            server.shutdown()
            thread.join()
