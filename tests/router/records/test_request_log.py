"""One line for every generation request: what analysis of it needs, and no word of its prompt."""

import gc
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.blocks import block_keys, root_key
from lab.trace.formats import read_log
from router.log_lines import LogLine
from router.proxy.request import Request
from router.records.request_log import RequestLog
from tests.router.loopback import until
from tests.router.scripted import (
    CHAT,
    COMPLETIONS,
    DONE,
    MODEL,
    QUEUE_FULL,
    Call,
    Script,
    chat,
    connect,
    event,
    named,
    says,
    served,
    silent,
)

GOOD = b'{"usage":{"completion_tokens": 7,"prompt_tokens_details":{"cached_tokens":16}}}'
SECRET = "SECRET words that nobody may read, again and again"


def lines_of(path: Path) -> list[LogLine]:
    return list(read_log(path))


def body_of(line: LogLine) -> Any:
    assert line.body is not None
    return msgspec.json.decode(line.body)


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED: dict[str, dict[str, Any]] = {
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": SECRET}]},
    RESPONSES: {"input": SECRET},
}


def text(prompt: str = SECRET, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


@pytest.mark.parametrize("path", ASKED)
async def test_requests_of_apis_that_only_engines_speak_have_lines(path: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    answer = b'{"usage":{"output_tokens": 7,"input_tokens_details":{"cached_tokens":16}}}'
    async with (
        served(*Script(says(answer)).replicas(2), request_log=str(log), log_prompts=True) as running,
        connect(running.port) as client,
    ):
        await client.post(path, {"model": MODEL, **ASKED[path]}, x_request_id="my-id")
    [line] = lines_of(log)
    assert (line.request_id, line.model, line.status) == ("my-id", MODEL, 200)
    assert body_of(line) == {"model": MODEL, **ASKED[path]}
    assert (line.output_tokens, line.cached_tokens) == (7, 16)
    [sending] = line.sendings
    assert line.replica == sending.replica and line.at_s <= sending.sent_at_s < sending.begun_at_s <= sending.ended_at_s


async def test_a_line_has_request_answer_and_replica(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with (
        served(*Script(says(GOOD)).replicas(2), request_log=str(log)) as running,
        connect(running.port) as client,
    ):
        await client.post(CHAT, chat(SECRET), x_request_id="my-id", x_session_id="s-1")
        await client.post("/v1/embeddings", {"input": SECRET})  # generates nothing
        await client.get("/v1/models")
    [line] = lines_of(log)
    assert (line.request_id, line.model, line.session, line.status) == ("my-id", MODEL, "s-1", 200)
    assert (line.output_tokens, line.cached_tokens) == (7, 16)
    assert not line.exact and not line.blocks and line.block_tokens == 0
    assert line.ttft_s is not None and 0 <= line.ttft_s <= line.duration_s
    [sending] = line.sendings
    assert line.policy == "round-robin" and line.replica == sending.replica
    assert [(one.name, one.cost_s is not None) for one in line.candidates] == [("r0", True), ("r1", True)]
    assert line.at_s <= sending.sent_at_s <= sending.begun_at_s <= sending.ended_at_s


async def test_no_word_of_a_prompt_is_written_unless_it_was_asked_for(tmp_path: Path) -> None:
    log, with_bodies = tmp_path / "log", tmp_path / "with"
    for path, log_prompts in ((log, False), (with_bodies, True)):
        replicas = Script(says(GOOD)).replicas(1, native=True)
        given: dict[str, Any] = {"request_log": str(path), "log_prompts": log_prompts}
        async with served(*replicas, **given) as running, connect(running.port) as client:
            await client.post(COMPLETIONS, text())
    assert "SECRET" not in log.read_text() and lines_of(log)[0].body is None and '"body"' not in log.read_text()
    assert body_of(lines_of(with_bodies)[0]) == text()


async def test_a_body_over_several_lines_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    sent = json.dumps(chat(SECRET), indent=2).encode()
    given: dict[str, Any] = {"request_log": str(log), "log_prompts": True}
    async with served(*Script(says(GOOD)).replicas(1), **given) as running, connect(running.port) as client:
        await client.post(CHAT, sent)
        await client.post(CHAT, sent)
    assert [body_of(line) for line in lines_of(log)] == [chat(SECRET)] * 2


async def test_the_blocks_of_an_exact_prompt_are_its_keys_for_the_replica(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def answers(call: Call) -> None:
        call.begin_frames(x_warmroute_cached_tokens="16")
        call.frame(event("a"), 5, 6)
        call.frame(event("b") + DONE, 7)
        call.end()

    [replica] = Script(answers).replicas(1, native=True)
    loaded = replica.control["/load"][1]
    sockets = {name: f"ipc:///nowhere/{name}" for name in ("events", "replay", "status", "snapshot")}
    loaded["endpoints"] = sockets
    async with served(replica, request_log=str(log)) as running, connect(running.port) as client:
        await client.post(COMPLETIONS, text(stream=True))
        await running.idle()
    [line] = lines_of(log)
    tokens = line.prompt_tokens
    assert line.exact and tokens >= len(SECRET)
    assert (line.block_tokens, len(line.blocks), line.output_tokens, line.cached_tokens) == (16, tokens // 16, 3, 16)
    prompt = replica.calls[0].native[0].prompts[0]
    assert line.blocks == block_keys(prompt, 16, root_key(MODEL, None, None, 16))
    assert [one.name for one in line.candidates] == [line.replica]


async def test_tries_at_several_replicas_stand_in_one_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = Script(lambda call: call.drop(), says(GOOD))
    async with served(*script.replicas(2), request_log=str(log)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat())).status == 200
    [line] = lines_of(log)
    first, second = line.sendings
    assert first.fault and not first.begun_at_s and not second.fault and line.replica == second.replica
    assert first.replica != second.replica


async def test_an_unplaced_request_has_a_line_and_an_invalid_one_has_none(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = Script(says(QUEUE_FULL, 429))
    async with served(*script.replicas(1), request_log=str(log)) as running, connect(running.port) as client:
        assert (await client.post(CHAT, chat())).status == 429
        assert (await client.post(CHAT, b"{")).status == 400
        assert (await client.post(CHAT, {**chat(), "model": "other"})).status == 404
    [line] = lines_of(log)
    assert (line.status, line.output_tokens) == (429, None)


async def test_a_client_that_left_has_a_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = Script(silent)
    async with served(*script.replicas(1), request_log=str(log)) as running, connect(running.port) as client:
        client.send("POST", CHAT, chat())
        await until(lambda: script.calls, "the replica is asked")
        client.leave()
        await running.idle()
    [line] = lines_of(log)
    assert line.client_left and line.ttft_s is None and not line.sendings[0].begun_at_s


async def test_it_is_for_its_owner_alone_and_lines_are_added(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for _ in range(2):
        async with served(named("r0"), request_log=str(log)) as running, connect(running.port) as client:
            await client.post(CHAT, chat())
    assert os.stat(log).st_mode & 0o777 == 0o600
    first, second = lines_of(log)
    assert first.run != second.run


async def test_a_session_that_is_not_unicode_spoils_no_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with served(named("r0"), request_log=str(log)) as running, connect(running.port) as client:
        await client.post(CHAT, b'{"model":"m","messages":[],"prompt_cache_key":"\\ud800"}')
        await client.post(CHAT, chat(prompt_cache_key="k"))
    assert lines_of(log)[-1].session == "k"


@contextmanager
def no_request_in_a_cycle() -> Iterator[None]:
    """Check that none of the block's is left to the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [kept for kept in gc.garbage if isinstance(kept, Request)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_an_answered_request_is_not_kept_in_a_cycle_of_references(tmp_path: Path, log_prompts: bool) -> None:
    """The router's collector does not look at it for long, and bodies are megabytes."""
    given: dict[str, Any] = {"request_log": str(tmp_path / "log"), "log_prompts": log_prompts}
    async with served(*Script(says(GOOD)).replicas(1), **given) as running, connect(running.port) as client:
        with no_request_in_a_cycle():
            for _ in range(3):
                assert (await client.post(CHAT, chat(SECRET))).status == 200
            await running.idle()
    assert len(lines_of(tmp_path / "log")) == 3


async def test_a_body_nested_however_deep_has_its_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    given: dict[str, Any] = {"request_log": str(log), "log_prompts": True}
    routed = 0
    async with served(named("r0"), **given) as running, connect(running.port) as client:
        for depth in (*range(900, 1000), 5000):
            answer = await client.post(CHAT, b'{"model":"m","messages":[],"x":%b%b}' % (b"[" * depth, b"]" * depth))
            routed += answer.status == 200
        await running.idle()
        assert running.router.history.request_log.lost_lines == 0
        [tally] = running.member("r0").tallies.values()
        assert tally.statuses == {200: routed}
    assert routed and len(log.read_bytes().splitlines()) == routed


async def test_a_mistake_of_the_log_costs_lines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> LogLine:
        raise RuntimeError("our mistake")

    log = tmp_path / "log"
    async with served(named("r0"), request_log=str(log)) as running, connect(running.port) as client:
        with monkeypatch.context() as broken:
            broken.setattr(RequestLog, "_line", fails)
            for _ in range(3):
                assert (await client.post(CHAT, chat())).status == 200
            await running.idle()
        assert running.router.history.request_log.lost_lines == 3
        [tally] = running.member("r0").tallies.values()
        assert tally.statuses == {200: 3} and len(running.router.history.decisions) == 3
        await client.post(CHAT, chat())
    assert len(lines_of(log)) == 1
    assert [record.levelno for record in caplog.records if "request log" in record.message] == [logging.ERROR]
    assert "our mistake" in caplog.text


@pytest.mark.parametrize("cut", [1, 20])
async def test_the_first_line_after_a_torn_one_is_whole(tmp_path: Path, cut: int) -> None:
    log = tmp_path / "log"

    async def two_requests() -> None:
        async with served(named("r0"), request_log=str(log)) as running, connect(running.port) as client:
            await client.post(CHAT, chat())
            await client.post(CHAT, chat())

    await two_requests()
    log.write_bytes(log.read_bytes()[:-cut])
    await two_requests()
    assert len(log.read_bytes().splitlines()) == 4 and len(lines_of(log)) == (4 if cut == 1 else 3)
