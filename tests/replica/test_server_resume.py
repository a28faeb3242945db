"""A request that moves to another replica in the middle: its client must not see where."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from api.native import FRAMES_TYPE, REQUEST_TYPE, Frame, FrameReader, Native, envelope, pack_ids
from tests.api.tokenizers import byte_level
from tests.replica.serving import MODEL, Replica, replica

HEADERS = {"Content-Type": REQUEST_TYPE, "Accept": FRAMES_TYPE}
IDS = {"/v1/messages": "msg_1", "/v1/responses": "resp_1"}
# What depends on the cache, as each API writes it.
CACHED = re.compile(
    rb',"prompt_tokens_details"[^\n]*|"cached_tokens":\d+|"input_tokens":\d+,|"cache_read_input_tokens":\d+,'
)
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def origin(halves: Replica) -> Replica:
    return halves


@pytest.fixture(scope="module")
def successor() -> Iterator[Replica]:
    with replica(vocabulary=(0x80, 0xE0)) as running:
        yield running


def request(path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 24}
    if path == "/v1/completions":
        asked = {"prompt": "hello", "max_tokens": 24}
    elif path == "/v1/responses":
        asked = {"input": "hello", "max_output_tokens": 24}
    return {"model": MODEL, "seed": 3, "temperature": 1, **asked, **fields}


def frames(served: Replica, path: str, body: dict[str, Any], resume: list[bytes] | None = None) -> list[Frame]:
    native = Native(resume_token_ids=resume or [], response_id=IDS.get(path, "cmpl-1"), created=1)
    answer = served.post(path, envelope(native) + json.dumps(body).encode(), **HEADERS)
    assert answer.status == 200, answer.body
    return FrameReader().feed(answer.body)


def payload(received: list[Frame]) -> bytes:
    return b"".join(frame.payload for frame in received)


def said(received: list[Frame], choices: int) -> list[bytes]:
    """The token ids of each choice, as a router keeps them."""
    return [b"".join(frame.packed_ids for frame in received if frame.index == index) for index in range(choices)]


def without_cached(body: bytes) -> bytes:
    return CACHED.sub(b"", body)


def in_order(body: bytes, choices: int) -> list[list[bytes]]:
    """The events of each choice, and of all: two choices may come in another order."""
    events = body.split(b"\n\n")
    marks = [b'"index":%d,' % index for index in range(choices)]
    return [[event for event in events if mark in event] for mark in marks]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *product(
            ["/v1/completions", "/v1/chat/completions"],
            [
                {},
                {"stream_options": {"include_usage": True}},
                {"stop": ["\ufffd\ufffd\ufffd"], "max_tokens": 60},
                {"return_token_ids": True},
                {"max_tokens": 200, "ignore_eos": False, "min_tokens": 2, "seed": 5},
            ],
        ),
        *product(
            ["/v1/messages"],
            [{}, {"stop_sequences": ["\ufffd\ufffd\ufffd"], "max_tokens": 60}, {"stream": False}],
        ),
        *product(["/v1/responses"], [{}, {"stream": False}]),
    ],
    ids=str,
)
def test_an_answer_cut_at_every_token_continues_byte_for_byte(
    origin: Replica, successor: Replica, path: str, fields: dict[str, Any]
) -> None:
    body = request(path, **{"stream": True, **fields})
    whole = frames(origin, path, body)
    text = payload(whole)
    assert any(not frame.payload for frame in whole) or fields.get("return_token_ids")  # cuts inside characters
    step = 1 if len(whole) < 80 else 7
    for cut in range(0, len(whole), step):
        before = whole[:cut]
        after = frames(successor, path, body, said(before, 1))
        assert without_cached(payload(before) + payload(after)) == without_cached(text), cut


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_several_choices_continue_together(origin: Replica, successor: Replica, path: str) -> None:
    body = request(path, stream=True, n=3, stop=["\ufffd\ufffd"], max_tokens=12)
    whole = frames(origin, path, body)
    for cut in range(len(whole)):
        after = frames(successor, path, body, said(whole[:cut], 3))
        assert in_order(payload(whole[:cut]) + payload(after), 3) == in_order(payload(whole), 3)
        assert payload(after).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 1},
        {"n": 2, "stop": "\ufffd\ufffd"},
        {"n": 2, "prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
    ],
    ids=["plain", "logprobs", "n", "prompt_logprobs", "echo", "score"],
)
def test_an_answer_that_is_not_streamed_is_whole_after_a_move(
    origin: Replica, successor: Replica, fields: dict[str, Any]
) -> None:
    body = request("/v1/completions", **fields)
    whole = frames(origin, "/v1/completions", body)
    assert [frame.payload for frame in whole[:-1]] == [b""] * (len(whole) - 1)
    for cut in range(len(whole)):
        after = frames(successor, "/v1/completions", body, said(whole[:cut], fields.get("n", 1)))
        assert without_cached(payload(after)) == without_cached(payload(whole))


def test_a_tokenizer_of_byte_pairs_continues_inside_a_character_too(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    http = {"tokenizer": str(tmp_path), "chat_template": str(tmp_path / "template.jinja")}
    with replica(http=http, vocabulary=(0, 300)) as one:
        path = "/v1/chat/completions"
        body = request(path, stream=True, stop=["\ufffd\ufffd"], ignore_eos=True, seed=8, max_tokens=40)
        whole = frames(one, path, body)
        assert any(not frame.payload for frame in whole)
        for cut in range(len(whole)):
            after = frames(one, path, body, said(whole[:cut], 1))
            assert payload(whole[:cut]) + payload(after) == payload(whole)
        token_ids = one.post("/tokenize", {"messages": MESSAGES}).json["tokens"]
        assert one.post("/detokenize", {"tokens": token_ids}).json["prompt"] == "hello"  # by the template of the file


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ([[5000]], "resume_token_ids[0]"),
        ([[1], [2]], "resume_token_ids"),
        ([[97] * 100_000], "resume_token_ids[0]"),
    ],
)
def test_impossible_resumed_tokens_are_refused(successor: Replica, said: list[list[int]], param: str) -> None:
    native = Native(resume_token_ids=list(map(pack_ids, said)))
    body = envelope(native) + json.dumps(request("/v1/completions")).encode()
    answer = successor.post("/v1/completions", body, **HEADERS)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_only_a_router_can_have_an_answer_resumed(origin: Replica, path: str) -> None:
    plain = origin.post(path, request(path, return_token_ids=True)).json
    named = origin.post(path, request(path, return_token_ids=True, resume_token_ids=[[97] * 9])).json
    assert named["choices"] == plain["choices"]
