"""FILE and ENDPOINT arguments, and the errors for wrong ones."""

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from events.cli import COMMANDS, events
from events.sockets.curve import write_keys
from events.tool.options import StreamOptions, open_target, open_targets
from tests.events.recorded import record_incident
from tests.lab.doctor.test_asking import Server, serving

TAIL = "tail tcp://127.0.0.1:5557"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tail nowhere.wre", "no file 'nowhere.wre'"),
        ("tail 127.0.0.1:5557", "no file '127.0.0.1:5557'; an endpoint is written tcp://127.0.0.1:5557"),
        ("tail .", "no file '.'"),
        ("tail udp://127.0.0.1:5557", "'udp://127.0.0.1:5557' is not an endpoint; write tcp://HOST:PORT, with a port"),
        ("tail http://127.0.0.1:1", "nothing answers at http://127.0.0.1:1: "),
        ("tail http://127.0.0.1:1 http://127.0.0.1:1", "http://127.0.0.1:1 appears twice"),
        *((f"tail {end}", f"{end!r} is not an endpoint") for end in ("ipc://", "tcp://a", "tcp://a:0", "tcp://*:5557")),
        ("tail tcp://a:1 tcp://a:1", "tcp://a:1 appears twice"),
        ("tail tcp://a:1 tcp://b:1 --replay tcp://a:2", "--replay is given 1 times for 2 endpoints; give one for each"),
        (f"{TAIL} --replay tcp://127.0.0.1", "--replay: 'tcp://127.0.0.1' is not an endpoint"),
        (f"{TAIL} --status tcp://127.0.0.1:5559", "--status needs --snapshot too"),
        (f"{TAIL} --curve-server a.key", "give both --curve-server"),
        (f"{TAIL} --curve-server a.key --curve-secret b.key", "a.key is not a CURVE key file"),
        (f"{TAIL} --for 0", "0"),
        ("replay tcp://a:1 --bind tcp://127.0.0.1:1", "tcp://a:1 is an endpoint; replay publishes a recording"),
    ],
)
def test_a_wrong_argument_is_quoted_with_its_fix(line: str, message: str) -> None:
    result = CliRunner().invoke(events, line.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    result = CliRunner().invoke(events, ["tail", str(tmp_path / "a.txt")])
    assert result.exit_code == 2
    assert "is not a recording of warmroute (it starts with b'hello')" in result.stderr


@pytest.mark.parametrize("option", ["--replay", "--status", "--snapshot", "--topic"])
def test_options_of_endpoints_are_refused_with_a_file(tmp_path: Path, option: str) -> None:
    record_incident(tmp_path / "a.wre")
    result = CliRunner().invoke(events, ["tail", str(tmp_path / "a.wre"), option, "1"])
    assert result.exit_code == 2
    assert f"{option} needs an ENDPOINT" in result.stderr


def test_sockets_belong_to_the_endpoints_in_order() -> None:
    options = StreamOptions(replay=("tcp://a:2", "tcp://b:2"), topic="kv@", model="m")
    first, second = (target.sources[0] for target in open_targets(["tcp://a:1", "tcp://b:1"], options))
    assert (first.name, first.events, first.replay, first.topic) == ("a:1", "tcp://a:1", "tcp://a:2", "kv@")
    assert (second.name, second.replay, second.model) == ("b:1", "tcp://b:2", "m")


def test_keys_are_loaded(tmp_path: Path) -> None:
    server, _ = write_keys(str(tmp_path / "engine"))
    _, secret = write_keys(str(tmp_path / "me"))
    options = StreamOptions(curve_server=str(server), curve_secret=str(secret))
    assert open_target("tcp://a:1", options).sources[0].curve is not None


def test_a_recording_knows_its_sources_and_the_model_can_be_given_again(tmp_path: Path) -> None:
    record_incident(tmp_path / "a.wre")
    path = str(tmp_path / "a.wre")
    assert open_target(path, StreamOptions()).sources[0].model == "m"
    assert open_target(path, StreamOptions(model="other")).sources[0].model == "other"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_tool_explains_itself_with_examples(name: str) -> None:
    _, command, _ = events.resolve_command(click.Context(events), [name])
    assert command is not None
    text = command.get_help(click.Context(command, info_name=name))
    assert f"warmroute events {name}" in text.partition("Examples:")[2]
    assert command.help is not None
    assert len(command.help.split("\n\n")[0]) > 20


def test_listing_the_tools_imports_none() -> None:
    output = CliRunner().invoke(events, ["--help"], terminal_width=120).output
    for name, (_, help_text) in COMMANDS.items():
        assert f"  {name} " in output
        assert help_text in output


SAID = {
    "model": "m",
    "topic": "kv@a@m",
    "endpoints": {
        "events": "tcp://127.0.0.1:1",
        "replay": "tcp://127.0.0.1:2",
        "status": "tcp://127.0.0.1:3",
        "snapshot": "tcp://127.0.0.1:4",
    },
}


def test_a_replica_is_asked_for_all_of_its_sockets() -> None:
    with serving(Server(load=json.dumps(SAID))) as replica:
        [source] = open_target(replica.url, StreamOptions()).sources
        [narrowed] = open_target(replica.url, StreamOptions(topic="kv@")).sources
    assert [asked.path for asked in replica.asked] == ["/load", "/load"]
    assert (source.events, source.replay, source.status, source.snapshot) == tuple(SAID["endpoints"].values())  # type: ignore[attr-defined]
    assert (source.model, source.topic, source.native) == ("m", "kv@a@m", True)
    assert narrowed.topic == "kv@"


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, {}, "requires a key; set WARMROUTE_API_KEY"),
        (200, {"model": "m"}, "sends no events, or has not started yet"),
        (404, {"error": "?"}, "is not a warmroute replica"),
    ],
)
def test_what_a_replica_does_not_say_is_explained(status: int, body: dict[str, str], said: str) -> None:
    with serving(Server(load=(status, json.dumps(body)))) as server, pytest.raises(click.UsageError, match=said):
        open_target(server.url, StreamOptions())
