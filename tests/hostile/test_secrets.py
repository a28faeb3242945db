"""No key of any kind appears in any output of any process."""

import json
import os
import re
import subprocess
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from fleet.host.engines import launch
from fleet.plan import ModelPlan, Task
from tests.chaos.replicas import command
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import DEADLINE_S
from tests.fleet.test_up import SIMULATED, starting
from tests.processes import family, of_process
from tests.replica.serving import Replica

CLIENT, ADMIN, OF_REPLICA, OF_FLEET = (
    "secret-of-a-client",
    "secret-of-an-admin",
    "secret-of-replicas",
    "secret-of-fleet",
)
SECRETS = (CLIENT, ADMIN, OF_REPLICA, OF_FLEET, "secret-that-is-wrong")
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
RAY_TOKEN = re.compile(rb"RAY_AUTH_TOKEN=([0-9a-f]{32,})")


def found_in(text: str | bytes) -> list[str]:
    said = text.decode(errors="replace") if isinstance(text, bytes) else text
    return [secret for secret in SECRETS if secret in said]


def attack(server: Replica, key: str) -> list[bytes]:
    """Requests with keys where they belong and where they do not; what was answered."""
    bodies: list[object] = [CHAT, {**CHAT, "n": -1}, b"{", {"model": key, "messages": []}, {**CHAT, "stream": True}]
    answers = [server.post("/v1/chat/completions", body, authorization=f"Bearer {key}") for body in bodies]
    for given in (f"Bearer {key}", "Bearer secret-that-is-wrong", f"Basic {key}", key):
        paths = ("/v1/models", "/replicas", "/decisions", "/metrics", "/dashboard/replicas/r0", "/openapi.json")
        answers += [
            server.ask("GET", path, None, {"authorization": given}) for path in (*paths, "/dashboard/replicas/r0")
        ]
    # Not the model that was asked for by a key: whoever sends a key as something else says it himself.
    return [answer.body for answer in answers if b"is not served here" not in answer.body]


@pytest.mark.chaos
def test_a_router_and_its_replica_keep_their_keys_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        monkeypatch.setenv("WARMROUTE_API_KEY", OF_REPLICA)
        replica = stack.enter_context(command("--log-level", "debug"))
        monkeypatch.setenv("WARMROUTE_API_KEY", CLIENT)
        monkeypatch.setenv("WARMROUTE_ADMIN_KEY", ADMIN)
        monkeypatch.setenv("WARMROUTE_REPLICA_API_KEY", OF_REPLICA)
        logs = [tmp_path / "access.log", tmp_path / "requests.log"]
        options = (
            *("--replica", f"url={replica.url},name=r0", "--log-level", "debug", "--log-prompts", "--queue-timeout"),
            1,
        )
        running: RouterProcess = stack.enter_context(
            router(*options, "--access-log", logs[0], "--request-log", logs[1])
        )
        answers = [*attack(running, CLIENT), *attack(running, ADMIN), *attack(replica, OF_REPLICA)]
        assert any(b"choices" in answer for answer in answers), "no request got through"
        assert [found_in(answer) for answer in answers if found_in(answer)] == []
        for process in (running.process.pid, replica.process.pid):
            for pid in family(process):
                assert found_in(of_process(pid, "cmdline")) == []
        replica.signal(9)  # what is said of a replica that is lost
        running.post("/v1/chat/completions", CHAT, authorization=f"Bearer {CLIENT}")
    for log in logs:
        assert log.read_text() and found_in(log.read_text()) == [], log
    said = "".join([*running.err, *replica.err])
    assert "r0: added" in said, "nothing was logged"
    assert found_in(said) == []


ON_RAY = pytest.param((), marks=pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"), id="ray")


@pytest.mark.chaos
@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", [pytest.param(("--no-ray",), id="processes"), ON_RAY])
def test_a_fleet_keeps_its_keys_secret(where: tuple[str, ...]) -> None:
    keys = {"WARMROUTE_API_KEY": CLIENT, "WARMROUTE_ADMIN_KEY": ADMIN, "WARMROUTE_FLEET_KEY": OF_FLEET}
    options = ("--replicas", "2", "--port", "0", *SIMULATED, *where)
    with starting(*options, WARMROUTE_LOG_LEVEL="debug", **keys) as up:
        up.wait_for("Ctrl-C ends everything")
        own = family(up.process.pid)
        tokens = {found[1] for pid in own if (found := RAY_TOKEN.search(of_process(pid, "environ")))}
        assert bool(tokens) == (not where), "only our own Ray cluster has a token"
        secrets = {*(key.encode() for key in keys.values()), *tokens}
        told = {f"command of {pid}": of_process(pid, "cmdline") for pid in own}
        [known] = up.folder.glob("warmroute-*/*.json")  # by which commands of this user find the fleet
        assert known.parent.stat().st_mode & 0o077 == 0
        told |= {str(path): path.read_bytes() for path in up.folder.rglob("*") if is_text(path) and path != known}
        up.end()
    told["output"] = up.output.encode()
    assert len(told) > len(own) + 2, "no logs were found"
    assert [where for where, said in told.items() if any(secret in said for secret in secrets)] == []


def is_text(path: Path) -> bool:
    return path.is_file() and path.suffix in (".log", ".out", ".err", ".txt", ".json")


def test_a_key_of_sglang_is_in_no_process_list(tmp_path: Path) -> None:
    """SGLang takes its key as an option alone: it is added where no other process can read it."""
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").touch()
    tells = "print(json.dumps([sys.argv, open('/proc/self/cmdline').read(), dict(os.environ)]))"
    (package / "launch_server.py").write_text(f"import json, os, sys\nif __name__ == '__main__':\n    {tells}\n")
    environment = {"KEY": OF_REPLICA, "PYTHONPATH": str(tmp_path)}
    plan = ModelPlan(name="m", model="m", engine="sglang", api_key_env="KEY", environment=environment)
    begun = launch(Task(name="m-0", plan=plan), "127.0.0.1", "1")
    assert found_in(" ".join(begun.command)) == []
    done = subprocess.run(
        begun.command, env=os.environ | begun.environment, capture_output=True, check=True, timeout=DEADLINE_S
    )
    arguments, cmdline, _ = json.loads(done.stdout)
    assert arguments[arguments.index("--api-key") + 1] == OF_REPLICA
    assert arguments[arguments.index("--model-path") + 1] == "m"
    assert found_in(cmdline) == []
