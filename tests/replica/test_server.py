"""The paths of the API, one by one, over HTTP."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest

from api.native import (
    CACHED_TOKENS_HEADER,
    FRAMES_TYPE,
    PRIORITY_HEADER,
    REQUEST_TYPE,
    FrameReader,
    Native,
    envelope,
    pack_ids,
)
from replica.server import load_prompts
from tests.api.tokenizers import byte_level
from tests.events.processes import wait_until
from tests.replica.serving import KEY, MODEL, SLOW, Replica, config, replica


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 8, "seed": 1, "ignore_eos": True} | fields


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, "seed": 1, "ignore_eos": True} | fields


def chunks(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_health_ready_version_and_models(served: Replica) -> None:
    assert served.get("/health").status == 200
    assert served.get("/ready").status == 200
    assert served.get("/version").json["version"]
    [model] = served.get("/v1/models").json["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 8192)


def test_load_names_the_replica_and_its_load(served: Replica) -> None:
    load = served.load()
    assert (load["model"], load["block_size"], load["ready"], load["draining"]) == (MODEL, 16, True, False)
    assert load["endpoints"]["events"].startswith("tcp://127.0.0.1:")
    assert load["topic"].endswith(f"@{MODEL}")
    assert load["incarnation"]
    assert load["pool"]["total"] == 8192
    assert set(load["load"]) >= {"running", "waiting", "queued_prefill_tokens", "free_blocks", "prefill_tokens_per_s"}


def test_a_streamed_answer_is_the_whole_one_in_pieces(served: Replica) -> None:
    whole = served.post("/v1/chat/completions", chat(n=2)).json
    streamed = served.post("/v1/chat/completions", chat(n=2, stream=True, stream_options={"include_usage": True}))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *parts, last = chunks(streamed.body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 16
    assert all(part["usage"] is None for part in parts)
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine][-1] == choice["finish_reason"] == "length"


def test_cached_tokens_are_reported_in_usage_and_header(served: Replica) -> None:
    prompt = "a prefix that nobody else in these tests uses, as long as it takes to fill a few blocks"
    cold = served.post("/v1/completions", completion(prompt=prompt))
    warm = served.post("/v1/completions", completion(prompt=prompt))
    all_but_one = len(prompt)  # the beginning-of-sequence token makes up for the last one
    assert int(cold.headers[CACHED_TOKENS_HEADER]) < 16  # no more than how other prompts begin
    assert warm.headers[CACHED_TOKENS_HEADER] == str(all_but_one)
    assert warm.json["usage"]["prompt_tokens_details"] == {"cached_tokens": all_but_one}
    streamed = served.post("/v1/completions", completion(prompt=prompt, stream=True))
    assert streamed.headers[CACHED_TOKENS_HEADER] == str(all_but_one)


def test_the_cache_is_reset_on_request(served: Replica) -> None:
    served.wait_idle()
    served.post("/v1/completions", completion(prompt="x" * 64))
    served.wait_idle()
    assert served.post("/reset_prefix_cache").status == 200
    again = served.post("/v1/completions", completion(prompt="x" * 64))
    assert again.headers[CACHED_TOKENS_HEADER] == "0"


def test_a_stop_string_ends_the_text_before_it(served: Replica) -> None:
    [free] = served.post("/v1/completions", completion(max_tokens=40)).json["choices"]
    stop = free["text"][10:13]
    end = free["text"].index(stop)
    [stopped] = served.post("/v1/completions", completion(max_tokens=40, stop=stop)).json["choices"]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == (free["text"][:end], "stop", stop)
    shown = completion(max_tokens=40, stop=[stop], include_stop_str_in_output=True, stream=True)
    parts = [part["choices"][0] for part in chunks(served.post("/v1/completions", shown).body)]
    assert "".join(part["text"] for part in parts) == free["text"][: end + 3]
    served.wait_idle()  # the engine does not know stop strings: it was told to end


def test_logprobs_in_both_shapes(served: Replica) -> None:
    [choice] = served.post("/v1/completions", completion(logprobs=2)).json["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(8))
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    [choice] = served.post("/v1/chat/completions", chat(logprobs=True, top_logprobs=3)).json["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    assert all(len(token["top_logprobs"]) == 3 and token["logprob"] <= 0 for token in content)


def test_log_probabilities_of_the_prompt_in_both_shapes(served: Replica) -> None:
    asked = {"prompt_logprobs": 2, "return_token_ids": True, "n": 2}
    answer = served.post("/v1/completions", completion(prompt=["hello", "x"], **asked)).json
    shown = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert shown[0] == shown[1] and shown[2] == shown[3]
    chat_answer = served.post("/v1/chat/completions", chat(**asked)).json
    assert all("prompt_logprobs" not in choice for choice in chat_answer["choices"])
    told = [
        (chat_answer["prompt_logprobs"], chat_answer["prompt_token_ids"]),
        *((choice["prompt_logprobs"], choice["prompt_token_ids"]) for choice in answer["choices"]),
    ]
    for logprobs, token_ids in told:
        assert logprobs[0] is None
        for of_token, token_id in zip(logprobs[1:], token_ids[1:], strict=True):
            assert of_token[str(token_id)]["rank"] == 1 and len(of_token) == 2
    spelled = [of_token[str(ord(char))]["decoded_token"] for of_token, char in zip(shown[0][1:], "hello", strict=True)]
    assert "".join(spelled) == "hello"


@pytest.fixture(scope="module")
def small() -> Iterator[Replica]:
    with replica(max_model_len=100, num_blocks=64, http={"max_body_bytes": 1000}) as running:
        yield running


def test_a_chat_without_max_tokens_may_use_what_is_left(small: Replica) -> None:
    answer = small.post("/v1/chat/completions", chat(max_tokens=None)).json
    assert answer["usage"]["total_tokens"] == 100
    assert answer["choices"][0]["finish_reason"] == "length"
    too_much = small.post("/v1/chat/completions", chat(max_completion_tokens=90))
    assert (too_much.status, too_much.error["param"]) == (400, "max_completion_tokens")
    assert "100" in too_much.error["message"] and "90" in too_much.error["message"]
    too_long = small.post("/v1/completions", completion(prompt="x" * 200))
    assert (too_long.status, too_long.error["code"]) == (400, "context_length_exceeded")
    fitting = small.post("/v1/completions", completion(prompt="x" * 89, max_tokens=None)).json
    assert fitting["usage"]["total_tokens"] == 100, "the default of 16 tokens is cut to the remaining context"


def test_tokenize_and_detokenize_are_inverse(served: Replica) -> None:
    tokens = served.post("/tokenize", {"model": MODEL, "prompt": "héllo", "return_token_strs": True}).json
    assert tokens["tokens"] == [256, *"héllo".encode()]
    assert (tokens["count"], tokens["max_model_len"], tokens["token_strs"][1]) == (7, 8192, "h")
    text = served.post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"][1:]}).json
    assert text == {"prompt": "héllo"}
    messages = served.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert messages["tokens"][0] == 258


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", completion(model="other"), 404, "model", "model_not_found"),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "model", "model_not_found"),
        ("/v1/completions", {"model": MODEL}, 400, "prompt", None),
        ("/v1/completions", completion(temperature=-1), 400, "temperature", None),
        ("/v1/completions", completion(n=0), 400, "n", None),
        ("/v1/completions", completion(prompt=[]), 400, "prompt", None),
        ("/v1/completions", completion(prompt=[99999]), 400, "prompt", None),
        ("/v1/completions", completion(prompt=["x"] * 1000, n=2), 400, "n", None),
        ("/v1/completions", completion(max_tokens=9000), 400, "max_tokens", "context_length_exceeded"),
        ("/v1/completions", completion(prompt="x" * 9000), 400, "prompt", "context_length_exceeded"),
        ("/v1/chat/completions", chat(messages=[{"role": "king", "content": ""}]), 400, "messages[0].role", None),
        ("/v1/chat/completions", b"{", 400, None, None),
        ("/v1/chat/completions", b"\xff\xfe", 400, None, None),
        ("/detokenize", {"tokens": [99999]}, 400, "tokens", None),
        ("/nowhere", {}, 404, None, "not_found"),
        ("/load", {}, 405, None, "method_not_allowed"),
    ],
)
def test_errors_name_what_is_wrong(
    served: Replica, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    answer = served.post(path, body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert (answer.error["param"], answer.error["code"]) == (param, code)
    assert answer.error["message"]


def test_a_body_over_the_limit_is_refused_while_it_comes(small: Replica) -> None:
    declared = small.post("/v1/completions", completion(prompt="x" * 2000))
    assert (declared.status, declared.error["code"]) == (413, "body_too_large")
    pieces = iter([b" " * 600] * 2)  # chunked: no length is declared
    assert small.post("/v1/completions", pieces).status == 413
    assert small.post("/v1/completions", completion()).status == 200


WITH_KEY = {"Authorization": f"Bearer {KEY}"}


def test_a_key_is_asked_for_everywhere_but_at_the_probes(guarded: Replica) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert guarded.get(path).status == 200
    for path in ("/v1/models", "/load", "/version", "/openapi.json", "/nowhere"):
        refused = guarded.get(path)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    assert guarded.post("/v1/completions", completion(), Authorization="Bearer wrong").status == 401
    assert guarded.post("/v1/completions", completion(), **WITH_KEY).status == 200


def test_a_full_queue_is_reported_with_the_time_to_come_back(guarded: Replica) -> None:
    endless = completion(max_tokens=2000, stream=True)
    connection, response = guarded.open("POST", "/v1/completions", endless, WITH_KEY)
    many = guarded.post("/v1/completions", completion(n=2), **WITH_KEY)
    assert (many.status, many.error["type"], many.error["code"]) == (429, "rate_limit_error", "queue_full")
    assert int(many.headers["retry-after"]) >= 1
    streamed = guarded.post("/v1/completions", completion(n=2, stream=True), **WITH_KEY)
    assert streamed.status == 429, "only one of two fits: both are rejected"
    assert 'finished_reason="error",model_name="demo"} 0.0' in guarded.get("/metrics").body.decode()
    response.close()
    connection.close()
    guarded.wait_idle()  # the one of the two that had been taken was cancelled, too
    assert guarded.post("/v1/completions", completion(max_tokens=1), **WITH_KEY).status == 200


async def test_clients_that_leave_at_random_leave_nothing_behind(served: Replica) -> None:
    random = Random(0)
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
    files = Path(f"/proc/{served.process.pid}/fd")
    served.wait_idle()
    before = len(list(files.iterdir()))

    async def visit() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = json.dumps(completion(max_tokens=500, stream=random.random() < 0.8, n=random.randint(1, 3))).encode()
        writer.write(request % (len(body), body))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(random.random() * 0.3):
                await reader.read(random.choice([0, 1, 5000, -1]))
        writer.transport.abort()

    await asyncio.gather(*(visit() for _ in range(150)))
    served.wait_idle()
    wait_until(lambda: len(list(files.iterdir())) <= before, "every socket is closed")
    assert served.post("/v1/completions", completion()).status == 200


# ---- what routers say


def frames_of(body: bytes) -> list[Any]:
    reader = FrameReader()
    frames = reader.feed(body)
    assert reader.pending_bytes == 0
    return frames


@pytest.mark.parametrize("stream", [True, False])
def test_frames_carry_the_token_ids_and_exactly_the_clients_bytes(served: Replica, stream: bool) -> None:
    native = Native(response_id="cmpl-mine", created=7, seed=3, prompts=[pack_ids([256, *b"hello"])])
    body = json.dumps(completion(seed=None, n=2, stream=stream)).encode()
    plain = served.post("/v1/completions", envelope(native) + body, **{"Content-Type": REQUEST_TYPE})
    headers = {"Content-Type": REQUEST_TYPE, "Accept": FRAMES_TYPE}
    framed = served.post("/v1/completions", envelope(native) + body, **headers)
    assert framed.headers["content-type"] == FRAMES_TYPE
    assert plain.headers["content-type"].startswith(framed.headers["x-warmroute-content-type"])
    frames = frames_of(framed.body)
    payload = b"".join(frame.payload for frame in frames)
    if stream:
        assert sorted(payload.split(b"\n\n")) == sorted(plain.body.split(b"\n\n"))
        texts = [chunk["choices"][0] for chunk in chunks(payload)]
        text = "".join(choice["text"] for choice in texts if choice["index"] == 1)
    else:
        assert payload == replaced_cached_tokens(plain.body, framed.headers[CACHED_TOKENS_HEADER])
        text = json.loads(payload)["choices"][1]["text"]
    token_ids = [token for frame in frames if frame.index == 1 for token in frame.token_ids]
    assert bytes(token_ids).decode() == text
    assert b'"id":"cmpl-mine"' in payload and b'"created":7' in payload
    [alone] = served.post("/v1/completions", completion(seed=3 + 1)).json["choices"]
    assert alone["text"] == text


def replaced_cached_tokens(body: bytes, cached_tokens: str) -> bytes:
    answer = json.loads(body)
    found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return body.replace(b'"cached_tokens":%d' % found, b'"cached_tokens":%b' % cached_tokens.encode())


def test_a_gateways_picker_says_whom_to_compute_first() -> None:
    with replica(SLOW, max_num_seqs=1) as busy, ThreadPoolExecutor(2) as threads:
        connection, response = busy.open("POST", "/v1/completions", completion(max_tokens=2000, stream=True))
        done: list[str] = []

        def ask(name: str, **headers: str) -> None:
            assert busy.post("/v1/completions", completion(max_tokens=1), **headers).status == 200
            done.append(name)

        later = threads.submit(ask, "later", **{PRIORITY_HEADER: "30.5"})
        wait_until(lambda: busy.load()["load"]["waiting"] == 1, "the first one waits")
        sooner = threads.submit(ask, "sooner")
        wait_until(lambda: busy.load()["load"]["waiting"] == 2, "both wait")
        response.close()
        connection.close()
        for asked in (later, sooner):
            asked.result()
        assert done == ["sooner", "later"]


# ---- what is too much


def test_a_long_text_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with replica(http={"tokenizer": str(tmp_path)}, vocabulary=(0, 300), max_model_len=100) as small:
        answer = small.post("/v1/completions", completion(prompt="the fox " * 100_000))
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "or more tokens" in answer.error["message"]
        assert 'refused_total{model_name="demo",reason="too_long"} 1.0' in small.get("/metrics").body.decode()


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "x" * 4 * 1024 * 1024}), ("/detokenize", {"tokens": [97] * 2 * 1024 * 1024})],
)
def test_no_long_text_is_tokenized_for_its_own_sake(served: Replica, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, json.dumps(body).encode())
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_a_model_is_found_by_its_name(served: Replica) -> None:
    [listed] = served.get("/v1/models").json["data"]
    assert served.get(f"/v1/models/{MODEL}").json == listed
    for name in ("other", "some/other", "some%2Fother"):
        unknown = served.get(f"/v1/models/{name}")
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00abc", b"{% for a in %}", b"{% for a in b %}" * 30 + b"{% endfor %}" * 30]
)
def test_a_file_that_is_no_template_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "template.jinja"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"/template\.jinja"):
        load_prompts(config(http={"chat_template": str(file)}))


def test_the_tokenizer_is_described_as_vllm_does(served: Replica) -> None:
    found = served.get("/tokenizer_info").json
    assert (found["bos_token"], found["eos_token"]) == ("<|bos|>", "<|eos|>")
    assert found["model_max_length"] == served.load()["max_model_len"]
    assert found["chat_template"] is None
