"""Probes before any measurement, and errors where nothing can be measured."""

import json

import pytest

import lab.bench.probe as probing
from lab.bench.load import Limits
from lab.bench.measure import Plan, measured
from lab.bench.probe import CannotAsk, Probe, RequestSettings
from router.members.spec import parse_target
from tests.lab.bench.endpoints import Call, closed, endpoint, singles


def probed(url: str, wish: RequestSettings, timeout_s: float = 5.0) -> Probe:
    plan = Plan(parse_target(url), wish, lambda _: iter(()), Limits(), timeout_s=timeout_s)
    return measured(plan).probe


def test_the_only_model_and_the_tokens_of_a_word_are_found_out() -> None:
    with endpoint(tokens_per_word=1.5) as server:
        found = probed(server.url, RequestSettings(None, "1"))
    assert (found.model, found.tokens_per_word, found.is_measured) == ("m", 1.5, True)
    assert (found.requests, found.prompt_tokens) == (2, 96 + 672)


@pytest.mark.parametrize(
    ("refused", "ignores_eos", "tells_usage"),
    [
        ((), True, True),
        (("ignore_eos",), False, True),
        (("ignore_eos", "max_tokens", "temperature"), False, True),
        (("ignore_eos", "stream_options", "temperature"), False, False),
    ],
)
def test_fields_that_are_refused_are_left_out(refused: tuple[str, ...], ignores_eos: bool, tells_usage: bool) -> None:
    def strict(call: Call) -> None:
        unknown = [field for field in refused if field in call.body]
        if unknown:
            call.refuse(400, f"unknown field {unknown[0]}")
        else:
            call.answer(1, tells_usage="stream_options" in call.body)

    with endpoint(on_probe=strict) as server:
        found = probed(server.url, RequestSettings("m", "1"))
    assert (found.ignores_eos, found.tells_usage, found.is_measured) == (ignores_eos, tells_usage, tells_usage)


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, {"data": [{"id": "a"}, {"id": "b"}]}, "serves a, b; choose with --model"),
        (200, {"data": []}, "serves no model; choose with --model"),
        (200, {"models": []}, "a list of models; give --model"),
        (401, {"error": {"message": "who are you"}}, "status 401: who are you; give --api-key"),
        (404, {"detail": "Not Found"}, "status 404: Not Found; is this the API's root"),
    ],
)
def test_without_a_model_a_message_says_what_to_do(status: int, body: object, said: str) -> None:
    with (
        endpoint(on_get=lambda call: call.whole(json.dumps(body).encode(), status)) as server,
        pytest.raises(CannotAsk, match=said),
    ):
        probed(server.url, RequestSettings(None, "1"))


def test_an_endpoint_that_is_not_there_cannot_be_asked() -> None:
    with endpoint() as server:
        url = server.url
    with pytest.raises(CannotAsk, match=r"does not answer: no connection: .*; is it started"):
        probed(url, RequestSettings(None, "1"))


@pytest.mark.parametrize("model", [None, "m"])
def test_a_mute_endpoint_is_found_out_long_before_a_long_timeout(
    model: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probing, "PATIENCE_S", 0.2)

    def mute(call: Call) -> None:
        call.server.released.wait(10)

    said = r"timeout.*, after 0\.2 s; is it still starting\? At first --timeout counts up to 0\.2 s only"
    with endpoint(on_get=mute, on_probe=mute) as server, pytest.raises(CannotAsk, match=said):
        probed(server.url, RequestSettings(model, "1"), timeout_s=5)


def test_the_load_has_the_whole_timeout_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "PATIENCE_S", 0.3)

    def slow(call: Call) -> None:
        call.server.released.wait(0.6)
        call.answer()

    with endpoint(slow) as server:
        ran = closed(server.url, singles(1), 1).ran
    assert [outcome.error for outcome in ran.outcomes] == [None]


def test_a_refusal_is_reported_with_what_may_help() -> None:
    with (
        endpoint(on_probe=lambda call: call.refuse(401, "no")) as server,
        pytest.raises(CannotAsk, match=r"does not take a first request: status 401: no; give --api-key$"),
    ):
        probed(server.url, RequestSettings("m", "1"))
