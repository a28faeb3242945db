"""A router that picks endpoints for a real Envoy, in front of simulated replicas."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse, IncompleteRead
from typing import Any

import pytest

from tests.chaos.envoy import (
    Change,
    Gateway,
    as_documented,
    by_metadata,
    duplex,
    duplex_requests,
    fails_closed,
    gateway,
    heads_of_answers,
    offering,
    overriding,
    port_of_picker,
    trusting_clients,
)
from tests.chaos.routers import Fleet, RouterProcess, events_in, fleet, router, steady_ports
from tests.events.processes import DEADLINE_S, wait_until
from tests.router.scripted import refused_port

pytestmark = pytest.mark.chaos

CHAT = "/v1/chat/completions"
BLOCK = 128  # tokens
RATES = (
    *("--set=simulated_prefill_tokens_per_s=1e6", "--set=simulated_decode_tokens_per_s=100"),
    *("--set=simulated_step_overhead=0", "--set=simulated_mean_output_tokens=0"),
    *("--block-size", BLOCK, "--max-model-len", 2_000_000, "--num-blocks", 20_000),  # room for a megabyte
)
LONG = "".join(f"word{number} " for number in range(110_000))
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def replicas() -> Iterator[Fleet]:
    with fleet(2, *RATES) as started:
        yield started


@contextmanager
def picking(replicas: Fleet, *options: object, port: int = 0) -> Iterator[tuple[RouterProcess, int]]:
    """A router for gateways, and its picker's port."""
    listen = ("--picker-listen", f"127.0.0.1:{port}")
    with router(*replicas.as_options, *listen, "--log-level", "error", *options) as running:
        yield running, port_of_picker(running)


@contextmanager
def behind(
    replicas: Fleet, *changes: Change, options: tuple[object, ...] = ()
) -> Iterator[tuple[Gateway, RouterProcess]]:
    with picking(replicas, *options) as (running, port), gateway(port, *changes) as envoy:
        yield envoy, running


@pytest.fixture(
    scope="module",
    params=[as_documented, pytest.param(duplex, marks=pytest.mark.grid)],
    ids=lambda change: change.__name__,
)
def both(replicas: Fleet, request: pytest.FixtureRequest) -> Iterator[tuple[Gateway, RouterProcess]]:
    with behind(replicas, request.param) as started:
        yield started


@pytest.fixture(scope="module")
def envoy(both: tuple[Gateway, RouterProcess]) -> Gateway:
    return both[0]


@pytest.fixture(scope="module")
def picker(both: tuple[Gateway, RouterProcess]) -> RouterProcess:
    return both[1]


def asked(text: str, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "max_tokens": tokens, "messages": [{"role": "user", "content": text}], **fields}


def wait_idle(picker: RouterProcess) -> None:
    """Until no request is counted at any replica."""

    def idle() -> bool:
        found = picker.get("/replicas").json["replicas"]
        return all(one["load"]["in_flight"] == 0 for one in found)

    wait_until(idle, "no request is in flight")


def in_flight(picker: RouterProcess) -> int:
    return sum(one["load"]["in_flight"] for one in picker.get("/replicas").json["replicas"])


def test_an_answer_comes_from_the_replica_that_was_picked(envoy: Gateway, picker: RouterProcess) -> None:
    answer = envoy.post(CHAT, asked("Who picks?"), **JSON)
    assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 4)
    decision = picker.decisions(1)[0]
    assert decision["chosen"] == answer.headers["x-warmroute-replica"]
    assert decision["request_id"] == answer.headers["x-request-id"]
    assert (decision["status"], decision["exact"], decision["retries"]) == (200, True, 0)
    wait_idle(picker)


def test_a_warm_prefix_goes_to_the_warm_replica(envoy: Gateway, picker: RouterProcess) -> None:
    long = "A prefix that is long enough to be worth a walk. " * 1200
    first = envoy.post(CHAT, asked(long), **JSON)
    name = first.headers["x-warmroute-replica"]
    wait_until(lambda: picker.decisions(1)[0]["status"] == 200, "the answer is in the books")
    for number in range(6):
        answer = envoy.post(CHAT, asked(f"{long} {number}"), **JSON)
        assert answer.headers["x-warmroute-replica"] == name
        assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 50_000
    wait_idle(picker)
    decision = picker.decisions(1)[0]
    assert decision["predicted_cached_tokens"] > 50_000
    assert decision["reported_cached_tokens"] >= decision["predicted_cached_tokens"]


def test_a_stream_is_observed_token_by_token(envoy: Gateway, picker: RouterProcess) -> None:
    answer = envoy.post(CHAT, asked("Stream.", 20, stream=True, stream_options={"include_usage": True}), **JSON)
    events = events_in(answer.body)
    assert events[-1]["usage"]["completion_tokens"] == 20
    wait_idle(picker)
    decision = picker.decisions(1)[0]
    assert 0 < decision["ttft_s"] < decision["duration_s"]
    assert decision["duration_s"] - decision["ttft_s"] > 0.1  # 19 tokens at 100 a second


def curl(url: str, body: bytes, *options: str) -> tuple[str, bytes]:
    """The version and the status of an answer, and its body."""
    command = [
        *("curl", "-s", "-m", str(DEADLINE_S), *options, "--data-binary", "@-", "-w"),
        "\n%{http_version} %{http_code}",
    ]
    header = ["-H", "content-type: application/json"]
    finished = subprocess.run([*command, *header, url + CHAT], input=body, capture_output=True, check=True)
    content, _, told = finished.stdout.rpartition(b"\n")
    return told.decode(), content


def test_clients_may_speak_http_2(envoy: Gateway, picker: RouterProcess) -> None:
    body = json.dumps(asked("By HTTP/2.", 8, stream=True)).encode()
    told, content = curl(envoy.url, body, "--http2-prior-knowledge")
    assert told == "2 200"
    assert len(events_in(content)) == 9
    wait_idle(picker)


def test_a_body_of_a_megabyte_arrives_whole(envoy: Gateway, picker: RouterProcess) -> None:
    body = {"model": "demo", "max_tokens": 1, "prompt": LONG}
    answer = envoy.post("/v1/completions", body, **JSON)
    assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, len(LONG) + 1)
    told, content = curl(envoy.url, json.dumps(asked(LONG, 1)).encode(), "-H", "transfer-encoding: chunked")
    assert told == "1.1 200", content
    assert json.loads(content)["usage"]["prompt_tokens"] > len(LONG)
    wait_idle(picker)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, asked("x", model="none"), 404, "model_not_found"),
        (CHAT, b"{", 400, None),
        ("/v1/%2e%2e/load", None, 400, "invalid_path"),
    ],
)
def test_a_refusal_is_the_routers_own(
    envoy: Gateway, picker: RouterProcess, path: str, body: Any, status: int, code: str | None
) -> None:
    answer = envoy.ask("GET" if body is None else "POST", path, body, JSON)
    assert (answer.status, answer.error["code"]) == (status, code)
    wait_idle(picker)


def test_models_are_those_of_all_replicas(envoy: Gateway) -> None:
    answer = envoy.get("/v1/models")
    assert [one["id"] for one in answer.json["data"]] == ["demo"]


@pytest.mark.grid
def test_the_endpoint_may_be_read_from_the_metadata(replicas: Fleet) -> None:
    with behind(replicas, duplex, by_metadata) as (envoy, picker):
        assert len(events_in(envoy.post(CHAT, asked("Hello.", 12, stream=True), **JSON).body)) == 13
        wait_idle(picker)
        assert picker.decisions(1)[0]["status"] == 200


@pytest.mark.grid
def test_a_gateway_may_offer_only_some_replicas(replicas: Fleet) -> None:
    with behind(replicas, offering(address_of(replicas, 1))) as (envoy, _):
        names = {envoy.post(CHAT, asked(f"{number}"), **JSON).headers["x-warmroute-replica"] for number in range(6)}
        assert names == {"r1"}
    for none in (offering("10.0.0.1:80"), offering()):
        with behind(replicas, none) as (envoy, picker):
            answer = envoy.post(CHAT, asked("Nobody."), **JSON)
            assert (answer.status, answer.error["code"]) == (503, "no_replica")
            wait_idle(picker)


@pytest.mark.grid
def test_a_request_counts_where_the_gateway_has_sent_it_after_all(replicas: Fleet) -> None:
    knows_one = overriding(replicas.urls[:1])  # and passes over the other
    with behind(replicas, knows_one, options=("--policy", "round-robin")) as (envoy, picker):
        for number in range(4):
            answer = envoy.post(CHAT, asked(f"Number {number}."), **JSON)
            assert (answer.status, answer.headers["x-warmroute-replica"]) == (200, "r0")
        wait_idle(picker)
        assert [one["retries"] for one in picker.decisions(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])
        assert {one["name"]: one["served"]["requests"] for one in picker.get("/replicas").json["replicas"]} == {
            "r0": 4,
            "r1": 0,
        }


def address_of(replicas: Fleet, number: int) -> str:
    return replicas.urls[number].removeprefix("http://")


# ---- what goes wrong


@contextmanager
def stream_of(envoy: Gateway, tokens: int) -> Iterator[HTTPResponse]:
    """A stream whose first token has come."""
    connection, response = envoy.open("POST", CHAT, asked("A long answer.", tokens, stream=True), JSON)
    try:
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        yield response
    finally:
        response.close()
        connection.close()


def test_a_client_that_leaves_is_out_of_the_books(envoy: Gateway, picker: RouterProcess) -> None:
    with stream_of(envoy, 10_000):
        assert in_flight(picker) == 1
    wait_idle(picker)


def test_an_answer_whose_head_alone_is_seen_is_in_the_books_until_it_ends(replicas: Fleet) -> None:
    with behind(replicas, heads_of_answers) as (envoy, picker):
        with stream_of(envoy, 60) as response:
            assert in_flight(picker) == 1
            assert len(events_in(b"data: {}\n" + response.read())) == 61
        wait_idle(picker)
        assert picker.decisions(1)[0]["status"] == 200
        with stream_of(envoy, 10_000):
            assert in_flight(picker) == 1
        wait_idle(picker)


# ---- a picker that is lost


def killed(picker: RouterProcess) -> None:
    picker.process.send_signal(signal.SIGKILL)
    picker.process.wait(DEADLINE_S)


def states(picker: RouterProcess) -> set[str]:
    return {one["state"] for one in picker.get("/replicas").json["replicas"]}


def test_running_streams_outlive_the_picker_and_the_next_one_is_exact_again(replicas: Fleet) -> None:
    port = steady_ports(1)
    long = "A prefix that outlives the picker. " * 1600
    with gateway(port) as envoy:
        with picking(replicas, port=port) as (picker, _):
            name = envoy.post(CHAT, asked(long), **JSON).headers["x-warmroute-replica"]
            with stream_of(envoy, 100) as response:
                killed(picker)
                assert len(events_in(b"data: {}\n" + response.read())) == 101
        with picking(replicas, port=port) as (picker, _):
            wait_until(lambda: states(picker) == {"exact"}, "all is known again")
            answer = envoy.post(CHAT, asked(f"{long} again"), **JSON)
            assert (answer.status, answer.headers["x-warmroute-replica"]) == (200, name)
            wait_idle(picker)
            decision = picker.decisions(1)[0]
            assert decision["prediction_exact"], decision["why_inexact"]
            assert decision["reported_cached_tokens"] // BLOCK * BLOCK == decision["predicted_cached_tokens"] > 50_000


@pytest.mark.grid
@pytest.mark.parametrize("change", [duplex, duplex_requests, fails_closed], ids=lambda change: change.__name__)
def test_other_modes_cut_a_stream_whose_picker_is_killed(replicas: Fleet, change: Change) -> None:
    with behind(replicas, change) as (envoy, picker), stream_of(envoy, 1000) as response:
        killed(picker)
        with pytest.raises(IncompleteRead):
            response.read()


def test_a_picker_that_ends_in_order_waits_for_its_streams(replicas: Fleet) -> None:
    with behind(replicas, duplex) as (envoy, picker), stream_of(envoy, 100) as response:
        picker.process.send_signal(signal.SIGTERM)
        assert len(events_in(b"data: {}\n" + response.read())) == 101
        assert picker.process.wait(DEADLINE_S) == 0


@pytest.mark.grid
def test_without_a_picker_the_gateways_mode_decides(replicas: Fleet) -> None:
    nobody = refused_port()
    knows_all = overriding(replicas.urls)
    for changes, status in (((fails_closed,), 500), ((), 503), ((knows_all,), 200), ((knows_all, fails_closed), 500)):
        with gateway(nobody, *changes) as envoy:
            assert envoy.post(CHAT, asked("Is anybody there?"), **JSON).status == status, changes


def test_no_client_names_its_own_endpoint(replicas: Fleet) -> None:
    named = {"x-gateway-destination-endpoint": address_of(replicas, 0)}
    nobody = refused_port()
    with gateway(nobody) as envoy:
        assert envoy.post(CHAT, asked("Straight to r0."), **JSON, **named).status == 503
    with gateway(nobody, trusting_clients) as envoy:
        assert envoy.post(CHAT, asked("Straight to r0."), **JSON, **named).status == 200
