"""Wrong clients: each gets an error, and the router goes on. tests/hostile/test_connections has slow and huge ones."""

import json
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.chaos.replicas import command
from tests.chaos.routers import RouterProcess, router
from tests.replica.serving import MODEL
from tests.router.scripted import CHAT, COMPLETIONS, Answer, connect

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

FAST = (
    *("--set=simulated_prefill_tokens_per_s=1e8", "--set=simulated_decode_tokens_per_s=1e6"),
    *("--set=simulated_batch_slowdown=0", "--set=simulated_step_overhead=0", "--log-level", "warning"),
)
HELLO = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "seed": 1, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[RouterProcess]:
    with command(*FAST) as replica, router("--replica", replica.url, "--log-level", "warning") as running:
        assert running.post(COMPLETIONS, HELLO).status == 200
        yield running
        assert not any("Traceback" in line or " ERROR " in line for line in running.err), running.err


async def asked(served: RouterProcess, raw: bytes) -> Answer:
    """Send these bytes and nothing more; return the router's answer."""
    async with connect(served.port) as client:
        client.write(raw)
        return await client.answer()


def posted(body: bytes, path: str = CHAT) -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


# ---- malformed requests

DEEP = 100_000
WRONG: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no JSON": lambda: b"{'model': 1}",
    "half of JSON": lambda: b'{"model": "demo", "messages": [',
    "a list": lambda: b"[]",
    "null": lambda: b"null",
    "a number": lambda: b"1e999",
    "deep lists": lambda: b"[" * DEEP,
    "deep lists that end": lambda: b'{"model": "demo", "messages": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": lambda: b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep in a field that is not read": lambda: b'{"model":"demo","prompt":"x","x":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "bad UTF-8": lambda: b'{"model": "demo", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a surrogate": lambda: b'{"model": "demo", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "no model": lambda: b'{"messages": []}',
    "a model of another type": lambda: b'{"model": 7, "messages": []}',
    "messages of another type": lambda: b'{"model": "demo", "messages": "hello"}',
    "messages of wrong things": lambda: b'{"model": "demo", "messages": [1, null, []]}',
    "no messages": lambda: b'{"model": "demo", "messages": []}',
    "a prompt of another type": lambda: b'{"model": "demo", "prompt": {"a": 1}}',
    "negative tokens": lambda: b'{"model": "demo", "prompt": [-1]}',
    "huge tokens": lambda: b'{"model": "demo", "prompt": [99999999999999999999]}',
    "a wrong number of tokens": lambda: b'{"model": "demo", "prompt": "x", "messages": [], "max_tokens": "many"}',
    "n of a million": lambda: b'{"model": "demo", "prompt": "x", "messages": [], "n": 1000000}',
    "a temperature that is none": lambda: b'{"model": "demo", "prompt": "x", "messages": [], "temperature": "hot"}',
}


async def test_what_cannot_be_understood_is_refused_as_openai_does(served: RouterProcess) -> None:
    for name, body in WRONG.items():
        told = await asked(served, posted(body()))
        assert 400 <= told.status < 500, (name, told.status, told.body[:300])
        assert told.error["message"] and told.error["type"], (name, told.body[:300])
        assert served.post(COMPLETIONS, HELLO).status == 200


async def test_an_unknown_model_and_an_unknown_path_are_not_found(served: RouterProcess) -> None:
    told = await asked(served, posted(json.dumps(HELLO | {"model": "other"}).encode(), COMPLETIONS))
    assert (told.status, told.error["code"]) == (404, "model_not_found")
    assert (await asked(served, b"GET /nowhere HTTP/1.1\r\nhost: x\r\n\r\n")).status == 404
    assert (await asked(served, b"GET /v1/completions HTTP/1.1\r\nhost: x\r\n\r\n")).status == 405


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200, 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 431),
        (
            b"POST "
            + CHAT.encode()
            + b" HTTP/1.1\r\nhost: x\r\n"
            + b"a: b\r\n" * 1000
            + b"content-length: 2\r\n\r\n{}",
            431,
        ),
        (b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 5, 6\r\n\r\n", 400),
        (b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
    ],
    ids=["version", "TLS", "header", "url", "headers", "length", "lengths", "chunk"],
)
async def test_what_is_hardly_http_is_refused(served: RouterProcess, raw: bytes, status: int) -> None:
    told = await asked(served, raw)
    assert told.status == status, told.body
    assert served.post(COMPLETIONS, HELLO).status == 200
