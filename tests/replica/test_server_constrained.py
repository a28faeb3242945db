"""Constrained answers over HTTP, of the demo model and of the simulated engine: whole, streamed and continued."""

import json
import re
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from api.native import FRAMES_TYPE, REQUEST_TYPE, FrameReader, Native, envelope
from tests.replica.grammar.constraints import CHOICES, LIST, WEATHER
from tests.replica.serving import FAST, Answer, Replica, replica

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "additionalProperties": False}}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
HEADERS = {"Content-Type": REQUEST_TYPE, "Accept": FRAMES_TYPE}


@pytest.fixture(scope="module")
def simulated() -> Iterator[Replica]:
    with replica(simulated=FAST, eos_token_ids=(257, 259)) as running:
        yield running


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 600, "seed": 1, **fields}


def chat(served: Replica, **fields: Any) -> Answer:
    return served.post("/v1/chat/completions", asked(**fields))


def said(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    assert {choice["finish_reason"] for choice in answer.json["choices"]} == {"stop"}
    return [choice["message"]["content"] for choice in answer.json["choices"]]


def calls(answer: Answer, finish_reason: str) -> list[tuple[str, Any]]:
    """The names and arguments of the functions that an answer calls."""
    assert answer.status == 200, answer.body
    [choice] = answer.json["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == (finish_reason, None)
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@pytest.mark.parametrize("name", ["origin", "simulated"])
def test_every_field_is_honoured(name: str, request: pytest.FixtureRequest) -> None:
    served: Replica = request.getfixturevalue(name)
    for content in said(chat(served, response_format=FORMAT, n=3)):
        jsonschema.validate(json.loads(content), WEATHER)
    [found] = said(chat(served, structured_outputs={"regex": r"\d{3}-[a-f]{2}"}, ignore_eos=True))
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", found)
    assert said(chat(served, guided_choice=CHOICES))[0] in CHOICES
    assert re.fullmatch(r"\[[a-z]{1,3}(,[a-z]{1,3})?\]", said(chat(served, guided_grammar=LIST))[0])
    [(called, arguments)] = calls(
        chat(served, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}), "stop"
    )
    assert called == "weather"
    jsonschema.validate(arguments, WEATHER)
    close = {str(ord("]")): 20} if name == "origin" else {}  # one that says nothing of its own would go on
    for called, arguments in calls(chat(served, tools=TOOLS, tool_choice="required", logit_bias=close), "tool_calls"):
        jsonschema.validate(arguments, WEATHER if called == "weather" else {"const": {}})
    answer = served.post("/v1/completions", {"model": "demo", "prompt": "x", "guided_choice": ["a", "b"]})
    assert answer.json["choices"][0]["text"] in ("a", "b")


def test_a_schema_that_cannot_be_compiled_is_quoted(origin: Replica) -> None:
    schema = {"type": "object", "properties": {"a": {"items": {"type": "strin"}}}}
    answer = chat(origin, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert answer.status == 400
    assert answer.error["param"] == "response_format.json_schema.schema"
    assert answer.error["message"].endswith("cannot be compiled: Invalid type: strin")
    assert chat(origin, guided_regex="(a").status == chat(origin, guided_grammar="start: b").status == 400


def test_a_constraint_that_meets_a_limit_is_counted(origin: Replica) -> None:
    counted = 'warmroute:constraint_limits_total{limit="size",model_name="demo"} 1.0'
    assert counted not in origin.get("/metrics").body.decode()
    assert chat(origin, guided_choice=[f"choice {number}" for number in range(4000)]).status == 400
    assert counted in origin.get("/metrics").body.decode()


def test_a_stop_string_ends_it_early_and_log_probabilities_are_finite(origin: Replica) -> None:
    answer = chat(origin, response_format=FORMAT, stop='"days', logprobs=True, top_logprobs=20)
    [content] = said(answer)
    assert '"city"' in content and "days" not in content
    logprobs = answer.json["choices"][0]["logprobs"]["content"]
    assert all(token["logprob"] > -100 and len(token["top_logprobs"]) == 20 for token in logprobs)


def test_a_stream_continues_on_another_replica_byte_for_byte(origin: Replica, successor: Replica) -> None:
    body = json.dumps(asked(response_format=FORMAT, stream=True)).encode()

    def frames(served: Replica, resume: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        given = Native(resume_token_ids=resume, response_id="chatcmpl-1", created=1)
        answer = served.post("/v1/chat/completions", envelope(given) + body, **HEADERS)
        assert answer.status == 200, answer.body
        received = FrameReader().feed(answer.body)
        return [frame.payload for frame in received], [frame.packed_ids for frame in received]

    payloads, ids = frames(origin, [])
    for cut in range(1, len(payloads), 1 + len(payloads) // 4):
        after, _ = frames(successor, [b"".join(ids[:cut])])
        assert b"".join(payloads[:cut] + after) == b"".join(payloads), cut
    wrong = served_status(successor, body, Native(resume_token_ids=[b"A\0\0\0"]))
    assert wrong.status == 400 and "does not allow" in wrong.error["message"]


def served_status(served: Replica, body: bytes, given: Native) -> Answer:
    return served.post("/v1/chat/completions", envelope(given) + body, **HEADERS)


def test_clients_that_leave_while_a_constraint_is_compiled_leave_nothing(origin: Replica) -> None:
    for number in range(5):
        schema = {"enum": [f"value {number} {index}" for index in range(500)]}
        connection = HTTPConnection(origin.host, origin.port)
        body = json.dumps(asked(guided_json=schema)).encode()
        connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        connection.close()
    assert said(chat(origin, guided_choice=["done"])) == ["done"]
    origin.wait_idle()
