"""Failures between a command and a controller: one line that says how to fix them."""

import socket
from urllib.parse import parse_qsl, urlsplit

import click
import pytest

from fleet.commands.addresses.address import FleetAddress
from fleet.commands.client import FleetClient
from fleet.commands.drain import drain
from fleet.plan import FleetPlan, ModelPlan
from router.console.asking import Refused, Unreachable
from tests.fleet.scripted import Script, calm, model, refusal, run

pytestmark = pytest.mark.usefixtures("noted_in")


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "line\n"])
def test_a_key_that_no_header_can_carry_is_refused_before_anybody_is_asked(script: Script, key: str) -> None:
    ran = run(drain, "demo-0", "--fleet", script.url, WARMROUTE_FLEET_KEY=key)
    assert ran.status == 2
    assert "WARMROUTE_FLEET_KEY in the environment" in ran.errors
    assert "two" not in ran.errors
    assert script.asked == []


def test_a_view_is_typed_and_fields_of_newer_controllers_are_skipped(script: Script) -> None:
    script.views = [calm(new_field=[1])]
    with FleetClient(script.url) as fleet:
        view = fleet.view()
    assert view.complete
    assert [replica.name for replica in view.of("demo")] == ["demo-0", "demo-1"]
    assert view.replicas[0].load.queued_prefill_tokens == 4321


def test_changes_are_sent_as_the_controller_wants_them(script: Script) -> None:
    script.answers["/models/scale"] = script.answers["/models/restart"] = 200, model(generation=3)
    with FleetClient(script.url, "secret") as fleet:
        assert fleet.scale("demo", 4).wanted == 2
        assert fleet.restart("demo", 1).generation == 3
        fleet.drain("demo-0")
        fleet.drain("demo-0", False)
        fleet.want(FleetPlan(models=(ModelPlan(name="demo", model="demo"),)))
        fleet.end()
    assert script.changes == [
        ("/models/scale", {"model": "demo", "replicas": 4}),
        ("/models/restart", {"model": "demo", "surge": 1}),
        ("/replicas/drain", {"replica": "demo-0", "drain": True}),
        ("/replicas/drain", {"replica": "demo-0", "drain": False}),
        ("/fleet", {"models": [{"name": "demo", "model": "demo"}]}),
        ("/end", {}),
    ]
    assert {asked.key for asked in script.asked} == {"Bearer secret"}


def test_names_are_quoted_in_urls(script: Script) -> None:
    script.logs = ["x"]
    with FleetClient(script.url) as fleet:
        fleet.log("a&lines=9 /ü", 3)
    assert parse_qsl(urlsplit(script.asked[0].path).query) == [("replica", "a&lines=9 /ü"), ("lines", "3")]


def test_an_unknown_replica_lists_the_known_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with FleetClient(url) as fleet, pytest.raises(Unreachable) as caught:
        fleet.view()
    message = caught.value.format_message()
    assert message.startswith(f"no controller answers at {url}: ")
    assert "Connection refused" in message
    assert message.endswith("; is the fleet running? On this machine there are: none")


@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_key_names_the_variable(script: Script, status: int) -> None:
    script.answers["/fleet"] = refusal(status, "a key is demanded")
    with FleetClient(script.url) as fleet, pytest.raises(Refused) as caught:
        fleet.view()
    assert caught.value.format_message() == "a key is demanded; give the fleet's key as WARMROUTE_FLEET_KEY"
    assert caught.value.status == status


@pytest.mark.parametrize("body", ["<html>", "[]", {"models": 5}, {"status": "ok"}])
@pytest.mark.parametrize("status", [200, 404, 500])
def test_other_servers_are_distinguished_from_controllers(script: Script, body: object, status: int) -> None:
    script.answers["/fleet"] = status, body
    with FleetClient(script.url) as fleet, pytest.raises(click.ClickException) as caught:
        fleet.view()
    assert "is not a controller" in caught.value.format_message()
    assert script.url in caught.value.format_message()
    assert "\n" not in caught.value.format_message()


def test_proxies_of_the_environment_are_not_asked(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with FleetClient(script.url) as fleet:
        assert fleet.view().complete


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("8000", "8000"),
        ("08000", "8000"),
        ("http://h:1/", "http://h:1"),
        ("https://h", "https://h"),
        ("h:80", "http://h:80"),
    ],
)
def test_a_fleet_is_named_by_port_or_url(given: str, taken: str) -> None:
    assert FleetAddress().convert(given, None, None) == taken


@pytest.mark.parametrize("given", ["", "0", "65536", "99999999999999999999", "demo", "demo:", "::1:80", "²", "-1"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not an address; write 8000, HOST:8000 or http://HOST:8000"):
        FleetAddress().convert(given, None, None)
