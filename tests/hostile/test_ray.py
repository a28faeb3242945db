"""Ray's own processes are killed and stopped under load: the router stays, and the fleet comes back by itself."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from fleet.on_ray.cleanup import processes
from tests.chaos.ray_here import SLOWLY_S, Stream, Victims, kill, under_load, up, wait_until
from tests.fleet.test_up import Up
from tests.processes import family, is_alive, of_process

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

RAY = str(Path(sys.executable).with_name("ray"))
STOPPED_S = 3.0
# Slow enough for a stream to be running when something happens.
SLOW = ("--simulated", "--replicas", "2", "--", "--set=simulated_decode_tokens_per_s=10")
# Of another Ray's; the second would have ours kill all of its actors.
OTHERS = {"RAY_ADDRESS": "127.0.0.1:9", "RAY_memory_usage_threshold": "0.001", "RAY_AUTH_MODE": "nonsense"}


def test_killed_and_stopped_servers_of_ray_cost_no_new_request_and_at_most_a_wait() -> None:
    with up(*SLOW, **OTHERS) as running:
        victims, port = Victims(running), running.url
        replicas = victims.of("--replica-name")

        with under_load(running) as load:  # stopped, all of them
            stopped = [
                *(victims.one(word) for word in ("gcs/gcs_server ", "raylet/raylet ", "ray::Controller")),
                *(victims.one(word) for word in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")),
                *(pid for pid in victims.of("fleet.on_ray.launch")),
                *victims.of("ray::Replica"),
            ]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            began_s = time.monotonic()
            wait_until(lambda: load.answered_s[-1] > began_s + STOPPED_S, "requests are answered all the while")
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            assert load.failed == []
        assert victims.of("--replica-name") == replicas

        scale(running, 3)
        wait_until(lambda: sum(running.state().values()) == 3, "there are three replicas")

        stream = Stream(running, tokens=200)  # the raylet: everything ends, but for the router
        killed_s = time.monotonic()
        with under_load(running) as load:
            kill(victims.one("raylet/raylet "))
            running.wait_for("The fleet is lost: Ray's raylet has died", within_s=SLOWLY_S)
            running.wait_for("is ready after", times=6, within_s=SLOWLY_S)
            wait_until(lambda: load.answered_s[-1] > killed_s + STOPPED_S, "requests are answered again")
        assert load.failed == []  # they waited
        said = stream.end()
        assert b"broken_stream" not in said and said.endswith(b"data: [DONE]\n\n"), said[-500:]
        wait_until(lambda: sum(running.state().values()) == 3, "as many replicas as before take requests")
        print(f"\nserving again {time.monotonic() - killed_s:.1f} s after kill -9 of the raylet")
        assert running.url == port
        with under_load(running) as load:
            wait_until(lambda: load.asked > 10, "it answers")
        assert load.failed == []

        end_while_it_comes_back(running, signal.SIGINT)


def scale(running: Up, replicas: int) -> None:
    [file] = (running.folder / f"warmroute-{os.geteuid()}").glob("*.json")
    known = json.loads(file.read_bytes())
    headers = {"authorization": f"Bearer {known['key']}"}
    with httpx2.Client(base_url=known["controller"], headers=headers, timeout=20, trust_env=False) as http:
        http.post("/models/scale", json={"model": "demo", "replicas": replicas}).raise_for_status()


def test_kill_9_of_up_while_the_fleet_comes_back_leaves_no_process() -> None:
    with up("--simulated", "--replicas", "1") as running:
        end_while_it_comes_back(running, signal.SIGKILL)


def end_while_it_comes_back(running: Up, number: int) -> None:
    before = family(running.process.pid)
    kill(Victims(running).one("raylet/raylet "))
    wait_until(lambda: new_ray(running, before), "another Ray is being started")
    everything = {*before, *family(running.process.pid)}
    sessions = {each.session for each in processes() if each.pid in everything} - {os.getsid(0)}
    assert running.end(number, SLOWLY_S) == (-number if number == signal.SIGKILL else 0)
    wait_until(lambda: not [pid for pid in everything if is_alive(pid)], "all of it is gone")
    assert [each for each in processes() if each.session in sessions and each.state != "Z"] == []
    wait_until(lambda: not any(map(os.path.exists, map(store_of, sessions))), "no store is left")


def store_of(session: int) -> str:
    return f"/dev/shm/warmroute-gcs-{session}"


def new_ray(running: Up, before: list[int]) -> list[int]:
    return [pid for pid in Victims(running).of("gcs/gcs_server ") if pid not in before]


@pytest.mark.grid
def test_a_ray_that_cannot_start_again_is_the_end_after_some_tries() -> None:
    with up("--simulated", "--replicas", "1") as running:
        everything = family(running.process.pid)
        [folder] = [each for each in running.folder.glob("warmroute-*") if (each / "launcher.log").exists()]
        raylet = Victims(running).one("raylet/raylet ")
        folder.rename(running.folder / "elsewhere")
        folder.touch()  # no folder any more
        kill(raylet)
        assert running.wait(SLOWLY_S) == 1
        assert "The fleet was restarted 5 times, and was lost each time" in running.output
        assert "Traceback" not in running.output
        assert [pid for pid in everything if is_alive(pid)] == []


# ---- a Ray that is somebody else's, and whose GCS keeps nothing


@contextmanager
def own_head(folder: str, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """`ray start --head --block`, which ends when its GCS does."""
    command = [RAY, "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard", "false"]
    command += ["--node-ip-address", "127.0.0.1", "--port", str(port), "--temp-dir", folder]
    command += ["--num-cpus", "10", "--object-store-memory", "78643200"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        command,
        env=environment | {"RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            wait_for_line(process, b"Ray runtime started")
            yield process
        finally:
            for each in processes():
                if each.session == process.pid:
                    kill(each.pid)


def wait_for_line(process: "subprocess.Popen[bytes]", text: bytes) -> None:
    assert process.stdout is not None
    said = b""
    for line in process.stdout:
        said += line
        if text in line:
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return
    raise AssertionError(said)


@pytest.mark.grid
def test_a_head_that_forgets_everything_gets_the_fleet_again() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="h-", ignore_cleanup_errors=True) as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ("--address", f"127.0.0.1:{port}", "--controller-port", "0", "--simulated", "--replicas", "1")
        with own_head(folder, port) as first, up(*options) as running:
            [gcs] = [pid for pid in family(first.pid) if b"gcs_server" in of_process(pid, "cmdline")]
            kill(gcs)
            running.wait_for("The controller is away", within_s=SLOWLY_S)
            first.wait(timeout=30)
            Path(folder, "ray_current_cluster").unlink(missing_ok=True)
            with own_head(folder, port):
                running.wait_for("The fleet is lost: no controller answers", within_s=SLOWLY_S)
                running.wait_for("demo-0 is ready", times=2, within_s=2 * SLOWLY_S)
                wait_until(lambda: running.state() == {"demo-0": True}, "the replica takes requests")
                running.ask()
                assert running.end(signal.SIGINT, SLOWLY_S) == 0
        assert re.search(r"ready at|answers at", running.output)
