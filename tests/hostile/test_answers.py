"""Answers in progress that would fill a replica's memory: whole ones, and streams that their clients do not read."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replica.config import SimulatedConfig
from replica.http.engine_client import MAX_BYTES, MAX_BYTES_EACH, SMALL_BYTES, HeldAnswer, HeldAnswers, NoRoom
from replica.messages import Output, TokenLogprobs
from tests.events.processes import DEADLINE_S, wait_until
from tests.replica.serving import MODEL, SERVE, Replica, config

FASTEST = SimulatedConfig(prefill_tokens_per_s=1e9, decode_tokens_per_s=1e6, step_overhead_s=0.0, mean_output_tokens=0)
LARGEST = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "n": 64,
    "max_tokens": 4000,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}


def resident_bytes(replica: Replica) -> int:
    return int(Path(f"/proc/{replica.process.pid}/statm").read_text().split()[1]) * 4096


class Limited(Replica):
    """Holds an eighth of what a replica would, so that it is reached sooner."""

    def __init__(self) -> None:
        less = f"import replica.http.engine_client as held; held.MAX_BYTES_EACH = {MAX_BYTES_EACH // 8}; {SERVE}"
        self._start([sys.executable, "-c", less, msgspec.json.encode(config(FASTEST)).decode()])


@pytest.fixture(scope="module")
def replica() -> Iterator[Replica]:
    started = Limited()
    try:
        started.wait_ready()
        yield started
    finally:
        started.end()


def test_a_whole_answer_that_would_take_too_much_ends_with_an_error(replica: Replica) -> None:
    before = resident_bytes(replica)
    answer = replica.post("/v1/chat/completions", LARGEST)
    assert answer.status == 400, answer.body[:200]
    assert "ask for fewer choices, tokens or log probabilities" in answer.error["message"]
    assert resident_bytes(replica) - before < MAX_BYTES_EACH / 4
    replica.wait_idle()


def test_a_stream_that_is_not_read_ends_with_an_error(replica: Replica) -> None:
    body = json.dumps(LARGEST | {"stream": True}).encode()
    with socket.create_connection((replica.host, replica.port), DEADLINE_S) as opened:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: r\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        before = resident_bytes(replica)
        opened.sendall(head.encode() + body)
        assert opened.recv(1, socket.MSG_PEEK)  # it has begun
        wait_until(lambda: replica.load()["load"]["running"] == 0, "the engine works on it no more")
        assert resident_bytes(replica) - before < MAX_BYTES_EACH / 4
        received = b""
        while piece := opened.recv(65536):
            received = (received + piece)[-2000:]
    assert b"stream the answer and read on" in received
    replica.wait_idle()


def test_a_stream_that_is_read_goes_on(replica: Replica) -> None:
    answer = replica.post("/v1/chat/completions", LARGEST | {"stream": True, "n": 4, "max_tokens": 500})
    assert answer.status == 200 and answer.body.rstrip().endswith(b"data: [DONE]")


def output(tokens: int, alternatives: int | None) -> Output:
    logprobs: Any = alternatives and [TokenLogprobs(0.0, [(1, 0.0)] * alternatives) for _ in range(tokens)]
    return Output(1, [7] * tokens, logprobs=logprobs)


def fill(answers: list[HeldAnswer], tokens_bytes: int, alternatives: int | None) -> None:
    for _ in range(tokens_bytes // 400_000):
        for held in answers:
            held.add(output(1000, alternatives))


@pytest.mark.parametrize("alternatives", [None, 20])
def test_every_field_that_makes_an_answer_larger_counts(alternatives: int | None) -> None:
    held = HeldAnswer(HeldAnswers())
    with pytest.raises(NoRoom) as refused:
        fill([held], MAX_BYTES_EACH + 400_000, alternatives)
    assert refused.value.alone


def test_answers_together_leave_room_for_small_ones() -> None:
    answers = HeldAnswers()
    large = [HeldAnswer(answers) for _ in range(MAX_BYTES // MAX_BYTES_EACH + 1)]
    with pytest.raises(NoRoom) as refused:
        fill(large, MAX_BYTES_EACH - 400_000, None)
    assert not refused.value.alone
    small = HeldAnswer(answers)
    small.add(output(SMALL_BYTES // 400, None))
    for held in (*large, small):
        held.release()
    assert answers.used_bytes == 0
