"""A request of a real model that moves to another replica in the middle: in float32 its client reads the same bytes.

The origin computes it in a batch with others, the successor alone, from nothing at every second cut and from a warm
cache at the others.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from api.native import FrameReader, Native, envelope
from tests.events.processes import wait_until
from tests.replica.natives import demo
from tests.replica.serving import Replica
from tests.replica.test_server_resume import HEADERS, frames, in_order, payload, request, said, without_cached

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
OTHERS = {"n": 3, "max_tokens": 1000, "ignore_eos": True, "stream": True, "seed": 4}


@pytest.fixture(scope="module")
def vocabulary(demo_cache: Path) -> dict[str, int]:
    [folder] = demo_cache.iterdir()
    ids: dict[str, int] = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return ids


@pytest.fixture
def letters(vocabulary: dict[str, int]) -> dict[str, int]:
    """A bias that makes every token a letter."""
    return {str(vocabulary[letter]): 60 for letter in "abcdefghijklmnopqrstuvwxyz"}


@pytest.fixture
def halves(vocabulary: dict[str, int]) -> dict[str, int]:
    """A bias that makes every token a half, or a third, of a character."""
    return {str(vocabulary[written]): 60 for written in "ÃÄâĤĤ©"}


@contextmanager
def in_company(served: Replica) -> Iterator[None]:
    """While it computes, other requests are in its batches."""
    connection, _ = served.open("POST", COMPLETIONS, request(COMPLETIONS, **OTHERS))
    yield
    connection.close()


def forget(served: Replica) -> None:
    wait_until(lambda: served.post("/reset_prefix_cache").status == 200, "nothing of the cache is used")


def assert_goes_on(
    origin: Replica, successor: Replica, path: str, body: dict[str, Any], *, everywhere: bool = False
) -> str:
    """Cut the stream at several places, or between any two frames, and return the client's text."""
    n = body.get("n", 1)
    with in_company(origin):
        whole = frames(origin, path, body)
    text = without_cached(payload(whole))
    for number, cut in enumerate(range(0, len(whole), 1 if everywhere else 1 + len(whole) // 8)):
        if number % 2:
            forget(successor)
        after = frames(successor, path, body, said(whole[:cut], n))
        joined = without_cached(payload(whole[:cut]) + payload(after))
        if n == 1:
            assert joined == text, cut
        else:
            assert in_order(joined, n) == in_order(text, n), cut
    return text.decode()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "return_token_ids": True},
        {"temperature": 0.9, "seed": 11, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
        {"temperature": 1.3, "seed": 12, **PENALTIES, "stream_options": {"include_usage": True}},
        {"temperature": 1, "n": 2, "seed": 13},
        {"temperature": 1, "seed": 14, "max_tokens": 60, "min_tokens": 3},
    ],
    ids=["greedy", "seeded", "penalties", "n", "eos"],
)
def test_a_stream_continues_byte_for_byte(
    origin: Replica, successor: Replica, path: str, fields: dict[str, Any]
) -> None:
    assert_goes_on(origin, successor, path, request(path, stream=True, **fields))


@pytest.mark.parametrize(
    ("path", "wanted"), [(COMPLETIONS, {"logprobs": 4}), (CHAT, {"logprobs": True, "top_logprobs": 4})]
)
def test_log_probabilities_continue_to_the_last_digit(
    origin: Replica, successor: Replica, path: str, wanted: dict[str, Any]
) -> None:
    body = request(path, stream=True, ignore_eos=True, **wanted, **PENALTIES)
    assert assert_goes_on(origin, successor, path, body).count("top_logprobs") >= 24


@pytest.mark.chaos
def test_a_stream_continues_after_its_replica_was_killed(demo_cache: Path, successor: Replica) -> None:
    body = request(COMPLETIONS, stream=True, max_tokens=300, ignore_eos=True, **PENALTIES)
    expected = payload(frames(successor, COMPLETIONS, body))
    with demo(demo_cache) as dying:
        native_body = envelope(Native(response_id="cmpl-1", created=1)) + json.dumps(body).encode()
        connection, response = dying.open("POST", COMPLETIONS, native_body, HEADERS)
        reader = FrameReader()
        seen = reader.feed(response.read1())
        while len(seen) < 50:
            seen += reader.feed(response.read1())
        dying.process.kill()
        connection.close()
    with demo(demo_cache) as fresh:
        after = frames(fresh, COMPLETIONS, body, said(seen, 1))
    assert 50 <= len(seen) < 300
    assert payload(seen) + payload(after) == expected
