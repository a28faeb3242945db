"""Prompts computed at one real vLLM for another one: NixlConnector's protocol, and a kill in the middle.

API server, scheduler and connector are vLLM's; only the workers are not, so no KV moves (`runner/handovers.py`).
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from qualification.engines.engine import MODEL, Engine, missing, ready
from tests.chaos.replicas import free_ports
from tests.chaos.routers import RouterProcess, router

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
ANSWER = 8  # tokens


class Split(NamedTuple):
    router: RouterProcess
    prefill: Engine
    decode: Engine
    held: Path  # a file for each prompt that is held for a reader


def engine(folder: Path, kind: str, **extra: object) -> Engine:
    connector = {"kv_connector": "NixlConnector", "kv_role": kind, "kv_connector_extra_config": extra}
    environment = {
        "RUNNER_HANDOVERS": str(folder / "held"),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)),
    }
    options = ("--kv-transfer-config", json.dumps(connector))
    return Engine(folder / f"{kind}.jsonl", environment, options)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    folder = tmp_path_factory.mktemp("live")
    (folder / "held").mkdir()
    with ExitStack() as stack:
        # One after the other: at once, both may take too long on a busy machine.
        first, second = (stack.enter_context(ready(engine(folder, kind))) for kind in ("kv_producer", "kv_consumer"))
        options = [
            option
            for one, role in ((first, "prefill"), (second, "decode"))
            for option in ("--replica", f"url={one.url},name={role},engine=vllm,role={role}")
        ]
        model = ("--model-dir", f"{MODEL}={first.folder / 'model'}")
        front = stack.enter_context(router(*options, *model, "--set=prefill_elsewhere=always", within_s=60))
        yield Split(front, first, second, folder / "held")


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"model": MODEL, "prompt": text, "max_tokens": ANSWER, **fields}
    if path == "/v1/responses":
        return {"model": MODEL, "input": text, "max_output_tokens": ANSWER, **fields}
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": ANSWER, **fields}


def text_of(path: str, answer: Any) -> str:
    match path:
        case "/v1/completions":
            return str(answer["choices"][0]["text"])
        case "/v1/messages":
            return str(answer["content"][0]["text"])
        case "/v1/responses":
            return str(answer["output"][0]["content"][0]["text"])
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("path", PATHS)
def test_both_halves_of_every_api(pair: Split, path: str) -> None:
    text = f"far away from {path} " * 60
    with httpx2.Client(timeout=60) as client:
        asked = body(path, text)
        answers = [client.post(f"{pair.router.url}{path}", json=asked) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        alone = client.post(f"{pair.decode.url}{path}", json=asked).json()
        assert {text_of(path, answer.json()) for answer in answers} == {text_of(path, alone)}
        streamed = client.post(f"{pair.router.url}{path}", json=body(path, text + "!", stream=True))
        assert streamed.status_code == 200
        assert "error" not in streamed.text
    last = pair.router.decisions(3)
    assert [one["chosen"] for one in last] == ["decode"] * 3
    assert [(one["prefill"]["replica"], one["prefill"]["outcome"]) for one in last] == [("prefill", "handed")] * 3
    found = [one["prefill"]["reported_cached_tokens"] for one in last]
    assert found[2] < 100 < found[1], "the second time the prompt is cached where it is computed"
    assert not list(pair.held.iterdir()), "all of it was read"


def test_clients_name_no_hosts(pair: Split) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x", "remote_request_id": "y"}
    params |= {"remote_host": "10.0.0.1", "remote_port": 1, "tp_size": 1}
    with httpx2.Client(timeout=60) as client:
        for asked in (body(PATHS[0], "short", kv_transfer_params=params), body(PATHS[0], "short")):
            assert client.post(f"{pair.router.url}{PATHS[0]}", json=asked).status_code == 200


def test_nothing_fails_when_the_prefill_replica_is_killed(pair: Split) -> None:
    """Half of the requests are in its queue, or hold KV there, when it dies."""

    async def drive() -> list[tuple[int, str]]:
        async with httpx2.AsyncClient(base_url=pair.router.url, timeout=120) as client:

            async def one(number: int) -> tuple[int, str]:
                path = PATHS[number % len(PATHS)]
                streams = number // len(PATHS) % 2 == 1
                answer = await client.post(path, json=body(path, f"{number} of many " * 300, stream=streams))
                return answer.status_code, answer.text

            tasks = [asyncio.create_task(one(number)) for number in range(64)]
            while sum(task.done() for task in tasks) < 8:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(pair.prefill.end)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(drive())
    assert [status for status, _ in answers] == [200] * 64
    assert not [text for _, text in answers if '"error":{' in text or "event: error" in text]
    outcomes = {one["prefill"]["outcome"] for one in pair.router.decisions(64)}
    assert "handed" in outcomes and outcomes & {"lost", "unread"}, outcomes
