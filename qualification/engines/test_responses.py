"""Responses that two real vLLM keep, for tenants and without any, and the cases of vLLM's own tests."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from qualification.engines.engine import MODEL, Engine, missing, ready
from tests.chaos.routers import RouterProcess, router
from tests.chaos.vllm_cases import CASES, SCRIPTED, Clients, cases, clients_of

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

PATH = "/v1/responses"
KEEPS = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
ENDS = '{"max_new_tokens": 64}'  # the runner comes to no end by itself
OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--override-generation-config", ENDS)
# Cases of a later version: this one gives messages the ids of chats, tells no `store`, and looks into few blocks.
LATER = {"names_messages", "responses: null store", *(name for name in CASES if name.startswith("refused messages"))}
LATER -= {"refused messages: unknown role", "refused messages: empty salt"}
COUNT = 6
TURNS = ("--policy", "round-robin")
KEYS = ("--api-key", "owner", "--api-key", "other")


def by(key: str) -> dict[str, str]:
    return {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("live")
    with ExitStack() as stack:
        two = [Engine(folder / f"{name}.jsonl", KEEPS, OPTIONS) for name in ("r0", "r1")]
        for one in two:
            stack.enter_context(ready(one))
        yield [
            *(text for n, one in enumerate(two) for text in ("--replica", f"url={one.url},name=r{n},engine=vllm")),
            *("--model-dir", f"{MODEL}={two[0].folder / 'model'}"),
        ]


def asked(said: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": said, "max_output_tokens": 4, **fields}


def make(running: RouterProcess, key: str) -> list[str]:
    answers = [running.post(PATH, asked(f"number {n}"), **by(key)) for n in range(COUNT)]
    assert {answer.headers["x-warmroute-replica"] for answer in answers} == {"r0", "r1"}
    return [answer.json["id"] for answer in answers]


@pytest.mark.parametrize("key", ["", "owner"], ids=["without tenants", "a tenant's"])
def test_a_new_router_finds_each_response(options: list[str], key: str) -> None:
    keys = KEYS if key else ()
    with router(*options, *keys, *TURNS, within_s=60) as running:
        made = make(running, key)
    with router(*options, *keys, *TURNS, within_s=60) as running:
        for response_id in made:
            read = running.ask("GET", f"{PATH}/{response_id}", headers=by(key))
            assert (read.status, read.json.get("id")) == (200, response_id), read.body
            then = running.post(PATH, asked("go on", previous_response_id=response_id), **by(key))
            assert (then.status, then.json["previous_response_id"]) == (200, response_id), then.body


def test_another_tenant_gets_nothing_of_it(options: list[str]) -> None:
    with router(*options, *KEYS, *TURNS, within_s=60) as running:
        made = make(running, "owner")
    with router(*options, *KEYS, *TURNS, within_s=60) as running:
        for response_id in made:
            body = asked("mine", request_id=response_id)
            assert running.post(PATH, body, **by("other")).json["id"] != response_id
            for answer in (
                running.ask("GET", f"{PATH}/{response_id}", headers=by("other")),
                running.post(f"{PATH}/{response_id}/cancel", {}, **by("other")),
                running.post(PATH, asked("go on", previous_response_id=response_id), **by("other")),
            ):
                assert (answer.status, answer.error["code"]) == (404, "response_not_found")
            kept = running.ask("GET", f"{PATH}/{response_id}", headers=by("owner"))
            assert kept.status == 200 and kept.json["id"] == response_id


@pytest.fixture(scope="module")
def clients(options: list[str]) -> Iterator[Clients]:
    with router(*options, within_s=60) as front, clients_of(front.url, MODEL) as made:
        yield made


@pytest.mark.parametrize("name", cases([name for name in CASES if name not in SCRIPTED], LATER))
def test_a_case_of_vllms_tests(clients: Clients, name: str) -> None:
    CASES[name](clients)
