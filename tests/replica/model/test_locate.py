"""Locating a model's files, without any network."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from replica.model.locate import locate, short_name
from tests.replica.model.test_demo import demo_in

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOCATE = "import sys; from replica.model.locate import locate; print(locate(sys.argv[1]))"


def located_elsewhere(model: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Locate in a process of its own, because huggingface_hub reads its environment once."""
    others = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "http", "HTTP", "all_p"))}
    return subprocess.run(
        [sys.executable, "-c", LOCATE, model],
        env=others | environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@contextmanager
def hub_that_answers(status: int, code: str) -> Iterator[str]:
    """A hub on loopback that refuses everything in this way."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_demo_is_made_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = demo_in(tmp_path, monkeypatch)
    assert locate("demo") == folder
    assert (folder / "config.json").is_file()


def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert locate("org/name") == Path("org/name")  # before the hub is asked
    assert locate(str(tmp_path / "org" / "name")) == tmp_path / "org" / "name"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/org/name") == tmp_path / "org" / "name"


def test_of_a_folder_with_a_gguf_file_the_file_is_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "q4.gguf").touch()
    with pytest.raises(ValueError, match=r"has no config\.json, but q4\.gguf; name that file itself"):
        locate(str(tmp_path))


def test_a_file_or_a_path_to_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match=r"config\.json is not a GGUF file: it begins with b''; name one, or"):
        locate(str(tmp_path / "config.json"))
    with pytest.raises(ValueError, match="missing does not exist"):
        locate(str(tmp_path / "missing"))


def test_a_model_in_the_hubs_cache_needs_no_network(tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--org--name"
    snapshot = kept / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)
    found = located_elsewhere("org/name", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert found.stdout.splitlines() == [str(snapshot)], found.stderr


@pytest.mark.parametrize(
    "environment",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}],  # no server listens there
    ids=["offline", "unreachable"],
)
def test_a_hub_that_cannot_be_asked_is_one_clear_error(tmp_path: Path, environment: dict[str, str]) -> None:
    assert_refused(located_elsewhere("org/name", HF_HOME=str(tmp_path), **environment))


@pytest.mark.parametrize(
    ("status", "code"),
    [(404, "RepoNotFound"), (503, "")],
    ids=["not found", "down"],
)
def test_what_the_hub_refuses_is_one_clear_error(tmp_path: Path, status: int, code: str) -> None:
    with hub_that_answers(status, code) as endpoint:
        assert_refused(located_elsewhere("org/name", HF_HOME=str(tmp_path), HF_ENDPOINT=endpoint))


def assert_refused(found: subprocess.CompletedProcess[str]) -> None:
    assert found.returncode == 1
    last = found.stderr.splitlines()[-1]
    assert last.startswith("ValueError: cannot get 'org/name' from the hub: ")
    assert last.endswith("; give a folder")


def test_a_path_is_served_by_its_last_part_and_a_model_of_the_hub_as_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "Q4_1.v2.gguf").touch()
    monkeypatch.chdir(tmp_path / "qwen")
    for given in (".", "../qwen/", str(tmp_path / "qwen")):
        assert short_name(given) == "qwen"
    assert short_name("Q4_1.v2.gguf") == "Q4_1.v2"
    for given in ("Qwen/Qwen3-8B", "smollm2", "/", "/nowhere/" + "x" * 300):
        assert short_name(given) == given
