"""A fleet in a real Ray on this machine: killed processes return, and in the end nothing is left."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from tests.processes import is_alive, of_process

pytest.importorskip("ray")

from fleet.on_ray.cleanup import processes
from fleet.on_ray.cluster import Free, lacking
from fleet.on_ray.launch import LONGEST_SOCKET, explained, too_long
from fleet.on_ray.orders import Launched, Order, Trouble, decode_answer
from fleet.on_ray.settings import joined_environment, local_environment, not_for_children
from fleet.plan import FleetPlan, ModelPlan, Resources
from tests.events.processes import wait_until
from tests.replica.serving import MODEL

ray_needed = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
PLAN = FleetPlan(models=(ModelPlan(name="sim", model=MODEL, engine="simulated", replicas=2),))
ENDS_WITHIN_S = 5.0
KEY = "a-key"
TOKENS = 4


class Launcher:
    """`python -m fleet.on_ray.launch` with an order."""

    def __init__(self, folder: str, **order: Any) -> None:
        self.folder = folder
        self.log = open(Path(folder) / "launcher.log", "w+b")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fleet.on_ray.launch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_"))},
        )
        self._send(msgspec.json.encode(Order(**{"plan": PLAN, "key": KEY, "temp_dir": folder, **order})) + b"\n")

    def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def answer(self) -> Launched | Trouble:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.said()
        return decode_answer.decode(line)

    def launched(self) -> Launched:
        answer = self.answer()
        assert isinstance(answer, Launched), (answer, self.said())
        return answer

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def session(self) -> list[int]:
        return [each.pid for each in processes() if each.session == self.process.pid and each.state != "Z"]

    def server(self, name: str) -> int:
        """Process id of one of Ray's own servers."""
        [pid] = [pid for pid in self.session() if f"/{name}\0".encode() in of_process(pid, "cmdline")]
        return pid

    def close_stdin(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        self.close_stdin()
        self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


@contextmanager
def launcher(**order: Any) -> Iterator[Launcher]:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r-", ignore_cleanup_errors=True) as folder:
        running = Launcher(folder, **order)
        try:
            yield running
        finally:
            running.close()


class Fleet:
    """A fleet as its controller shows it."""

    def __init__(self, url: str) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        self._http = httpx2.Client(base_url=url, timeout=15, trust_env=False, headers=headers)

    def get(self, path: str) -> Any:
        return self._http.get(path).raise_for_status().json()

    def post(self, path: str, **body: object) -> Any:
        return self._http.post(path, json=body).raise_for_status().json()

    @property
    def replicas(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.get("/fleet")["replicas"]}

    def ready(self, count: int) -> dict[str, dict[str, Any]]:
        """Wait until there are `count` replicas, all ready; return them."""
        found: dict[str, dict[str, Any]] = {}

        def all_ready() -> bool:
            found.clear()
            with suppress(httpx2.HTTPError):  # the controller may be on its way back
                found.update(self.replicas)
            return len(found) == count and all(each["life"] == "ready" for each in found.values())

        wait_until(all_ready, f"{count} replicas are ready")
        return found

    def close(self) -> None:
        self._http.close()


def actor_of(replica: Mapping[str, Any]) -> int:
    """Process id of the replica's actor, which is its parent."""
    return next(each.parent for each in processes() if each.pid == replica["pid"])


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if entry)


@pytest.fixture(scope="module")
def local() -> Iterator[tuple[Launcher, Launched, Fleet]]:
    """One Ray with two replicas, for all tests that leave it unchanged."""
    with launcher() as running:
        launched = running.launched()
        fleet = Fleet(launched.controller)
        try:
            yield running, launched, fleet
        finally:
            fleet.close()


Local = tuple[Launcher, Launched, Fleet]


def mark(test: Callable[..., None]) -> Callable[..., None]:
    for each in ray_needed:
        test = each(test)
    return test


# ---- a life


@mark
def test_replicas_in_ray_answer_and_are_members(local: Local) -> None:
    _, launched, fleet = local
    replicas = fleet.ready(2)
    assert sorted(replicas) == ["sim-0", "sim-1"]
    assert all(each["node"] == "127.0.0.1" and each["log"].startswith(launched.logs) for each in replicas.values())
    members = fleet.get("/members")["members"]
    assert {each["name"]: each["url"] for each in members} == {name: each["url"] for name, each in replicas.items()}
    for member in members:
        assert answer_of(member["url"])["usage"]["completion_tokens"] == TOKENS


def answer_of(url: str) -> Any:
    body = {"model": "sim", "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True}
    return httpx2.post(f"{url}/v1/completions", json=body, trust_env=False).raise_for_status().json()


@mark
def test_a_replicas_log_is_read_through_its_actor(local: Local) -> None:
    _, _, fleet = local
    fleet.ready(2)
    answer = fleet._http.get("/replicas/log", params={"replica": "sim-0", "lines": "1000"})
    assert "ready on http://127.0.0.1:" in answer.text


@mark
def test_a_replica_inherits_nothing_that_is_rays(local: Local) -> None:
    _, _, fleet = local
    for replica in fleet.ready(2).values():
        inherited = environment(replica["pid"])
        assert [name for name in inherited if name.startswith("RAY_") or name == "OMP_NUM_THREADS"] == []
        assert "PATH" in inherited


@mark
@pytest.mark.skipif(shutil.which("ss") is None, reason="needs ss of iproute2")
def test_all_that_listens_listens_on_loopback(local: Local) -> None:
    running, _, fleet = local
    replicas = fleet.ready(2)
    own = {*running.session(), *(each["pid"] for each in replicas.values())}
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = [line for line in lines if own & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]
    assert len(ours) > 5
    addresses = {line.split()[3].rpartition(":")[0] for line in ours}
    assert addresses <= {"127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"}


# ---- killed processes return


@mark
def test_a_replica_whose_process_is_killed_comes_back_as_another_one(local: Local) -> None:
    _, _, fleet = local
    before = fleet.ready(2)["sim-0"]
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: fleet.replicas["sim-0"]["pid"] != before["pid"], "it has another process")
    after = fleet.ready(2)["sim-0"]
    assert after["incarnation"] != before["incarnation"]
    assert (after["starts"], after["why"]) == (before["starts"] + 1, "")


@mark
def test_a_replica_whose_actor_is_killed_comes_back_and_its_process_dies_with_it(local: Local) -> None:
    _, _, fleet = local
    before = fleet.ready(2)["sim-1"]
    actor = actor_of(before)
    began_s = time.monotonic()
    os.kill(actor, signal.SIGKILL)
    wait_until(lambda: not is_alive(before["pid"]), "the replica's process is gone")
    wait_until(lambda: fleet.replicas["sim-1"].get("pid") != before["pid"], "Ray has made another actor")
    after = fleet.ready(2)["sim-1"]
    assert actor_of(after) != actor
    print(f"ready again {time.monotonic() - began_s:.1f} s after the death of its actor")


@mark
def test_a_killed_controller_comes_back_where_it_was_and_knows_what_was_wanted(local: Local) -> None:
    _, _, fleet = local
    fleet.ready(2)
    fleet.post("/models/scale", model="sim", replicas=3)
    before, controller = fleet.ready(3), fleet.get("/fleet")["pid"]
    members = fleet.get("/members")["members"]
    began_s = time.monotonic()
    os.kill(controller, signal.SIGKILL)
    heard: list[Any] = []

    def is_back() -> bool:
        with suppress(httpx2.HTTPError):
            heard.append(fleet.get("/members")["members"])
        return bool(heard) and fleet.get("/fleet")["pid"] != controller

    wait_until(is_back, "it answers at the same URL")
    back_s = time.monotonic() - began_s
    assert heard[0] == members, "routers saw fewer replicas than are running"
    after = fleet.ready(3)
    assert fleet.get("/fleet")["models"][0]["wanted"] == 3
    assert {name: each["pid"] for name, each in after.items()} == {name: each["pid"] for name, each in before.items()}
    print(f"the controller answers {back_s:.1f} s after its death")
    fleet.post("/models/scale", model="sim", replicas=2)
    fleet.ready(2)


@mark
def test_a_stopped_replica_leaves_neither_process_nor_actor(local: Local) -> None:
    running, _, fleet = local
    fleet.ready(2)
    fleet.post("/models/scale", model="sim", replicas=3)
    third = fleet.ready(3)["sim-2"]
    actor = actor_of(third)
    fleet.post("/models/scale", model="sim", replicas=2)
    wait_until(lambda: "sim-2" not in fleet.replicas, "it has left")
    wait_until(lambda: not is_alive(third["pid"]) and actor not in running.session(), "its processes are gone")


@mark
def test_a_missing_resource_is_reported(local: Local) -> None:
    _, _, fleet = local
    fleet.ready(2)
    needy = ModelPlan(name="big", model=MODEL, engine="simulated", resources=Resources(custom={"moon": 1.0}))
    fleet._http.put("/fleet", content=msgspec.json.encode(FleetPlan(models=(*PLAN.models, needy)))).raise_for_status()
    wait_until(lambda: fleet.replicas["big-0"]["why"], "it is said why it has no place")
    assert fleet.replicas["big-0"]["life"] == "placing"
    assert fleet.replicas["big-0"]["why"] == "no node has moon 1 free; none has any at all"
    fleet._http.put("/fleet", content=msgspec.json.encode(PLAN)).raise_for_status()
    assert sorted(fleet.ready(2)) == ["sim-0", "sim-1"]


# ---- hosts, without a controller


@pytest.fixture(scope="module")
def acts() -> dict[str, list[dict[str, Any]]]:
    """Output of each act of `driving_ray`."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r-", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.fleet.driving_ray",
                folder,
                "hangs,cannot_begin,dies_unheard,has_no_place,is_refused",
            ],
            env=os.environ | local_environment(),
            capture_output=True,
            timeout=170,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    heard: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        if "act" in line:
            said = heard[line["act"]] = []
        else:
            said.append(line)
    return heard


@mark
def test_an_actor_that_hangs_is_killed_and_comes_back(acts: dict[str, list[dict[str, Any]]]) -> None:
    said = acts["hangs"]
    assert said[-1] == {"life": "ready"}
    why = [each["why"] for each in said if each.get("error") == "HostLost"]
    assert any(each.startswith("its actor does not answer for") for each in why)
    assert any(each.startswith("its actor was killed: it did not answer for") for each in why)


@mark
def test_an_actor_that_cannot_begin_is_not_made_again_and_again(acts: dict[str, list[dict[str, Any]]]) -> None:
    *said, actors, there = acts["cannot_begin"]
    cannot_begin(said)
    assert 2 <= actors["actors"] <= 4
    assert there == {"there": []}


@mark
def test_a_host_without_news_of_failure_is_not_failed(acts: dict[str, list[dict[str, Any]]]) -> None:
    cannot_begin(acts["dies_unheard"])


def cannot_begin(said: list[dict[str, Any]]) -> None:
    assert {each["error"] for each in said} == {"HostLost"}, said
    assert any(each["why"].startswith("its actor cannot begin: FileNotFoundError") for each in said), said


@mark
def test_an_actor_without_a_place_is_silent_until_it_is_stopped(acts: dict[str, list[dict[str, Any]]]) -> None:
    missing, there, *said = acts["has_no_place"]
    assert missing == {"missing": "no node has GPU 3 free; none has any at all"}
    assert there == {"there": []}
    assert {each["error"] for each in said} == {"HostGone"}


@mark
def test_resources_that_ray_refuses_are_reported(acts: dict[str, list[dict[str, Any]]]) -> None:
    [said] = acts["is_refused"]
    assert said["error"] == "HostLost"
    assert said["why"].startswith("Ray does not take its actor: GPU resource quantities >1 must be whole numbers")


# ---- ends


@mark
def test_nothing_is_left_after_the_end() -> None:
    with launcher() as running:
        fleet = Fleet(running.launched().controller)
        started = [each["pid"] for each in fleet.ready(2).values()]
        fleet.close()
        began_s = time.monotonic()
        running.close_stdin()
        assert running.process.wait(timeout=ENDS_WITHIN_S) == 0
        print(f"ended within {time.monotonic() - began_s:.1f} s")
        assert running.session() == []
        wait_until(lambda: not any(map(is_alive, started)), "no replica is left")


@mark
def test_kill_9_of_the_launcher_leaves_nothing_running() -> None:
    with launcher() as running:
        fleet = Fleet(running.launched().controller)
        started = [each["pid"] for each in fleet.ready(2).values()]
        fleet.close()
        began_s = time.monotonic()
        os.kill(running.process.pid, signal.SIGKILL)
        wait_until(lambda: not running.session() and not any(map(is_alive, started)), "nothing is left")
        assert time.monotonic() - began_s < ENDS_WITHIN_S


@mark
def test_a_fleet_that_was_told_to_end_leaves_its_ray_empty() -> None:
    with launcher() as running:
        fleet = Fleet(running.launched().controller)
        controller = fleet.get("/fleet")["pid"]
        started = [each["pid"] for each in fleet.ready(2).values()]
        fleet.post("/end")
        fleet.close()
        wait_until(lambda: not any(map(is_alive, [controller, *started])), "all have ended")
        time.sleep(1.5)  # Ray would restart an actor within that time
        names = [of_process(pid, "cmdline") for pid in running.session()]
        assert [name for name in names if b"ray::Controller" in name or b"ray::Replica" in name] == []
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(timeout=ENDS_WITHIN_S) == 0
        assert running.session() == []


@mark
@pytest.mark.parametrize("server", ["gcs/gcs_server", "raylet/raylet"])
def test_the_death_of_a_server_of_rays_is_reported_and_is_the_end(server: str) -> None:
    with launcher() as running:
        running.launched()
        os.kill(running.server(server), signal.SIGKILL)
        said = running.answer()
        assert isinstance(said, Trouble) and f"Ray's {server.partition('/')[2]} has died" in said.message
        assert running.process.wait(timeout=ENDS_WITHIN_S) == 1
        assert running.session() == []


# ---- impossible fleets


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"address": "127.0.0.1:9"}, "no Ray answers at '127.0.0.1:9': Connection refused"),
        ({"address": "ray://h:10001"}, "is not the address of a GCS"),
        ({"address": "nonsense"}, "'nonsense' is not the address of a Ray; give HOST:PORT"),
        ({"temp_dir": "/tmp/" + 60 * "x"}, "is too long a folder for Ray's sockets: 65 bytes"),
    ],
)
def test_what_cannot_be_is_trouble_in_one_line(order: dict[str, str], said: str) -> None:
    with launcher(**order) as running:
        answer = running.answer()
        assert isinstance(answer, Trouble) and said in answer.message and "\n" not in answer.message
        assert running.process.wait(timeout=ENDS_WITHIN_S) == 1


@mark
def test_a_taken_port_of_the_controller_is_trouble(local: Local) -> None:
    taken = int(local[1].controller.rpartition(":")[2])
    with launcher(port=taken) as running:
        answer = running.answer()
        assert isinstance(answer, Trouble)
        assert f"cannot listen on 127.0.0.1:{taken}: Address already in use; choose another port" in answer.message


def test_an_order_that_cannot_be_read_is_trouble() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet.on_ray.launch"], input=b'{"pl', capture_output=True, check=False, timeout=20
    )
    assert done.returncode == 1
    assert "the order cannot be read" in json.loads(done.stdout)["message"]


# ---- pure


def test_a_folder_is_too_long_when_its_sockets_would_be() -> None:
    most = LONGEST_SOCKET - len("/s/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
    assert too_long(Path("/" + (most - 1) * "x")) is None
    assert too_long(Path("/" + most * "x")) is not None


def test_every_local_ray_has_a_token_of_its_own() -> None:
    one, other = local_environment(), local_environment()
    assert one["RAY_AUTH_MODE"] == "token"
    assert one["RAY_AUTH_TOKEN"] != other["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "disabled"),
        ({"RAY_AUTH_TOKEN": "t"}, "token"),
        ({"RAY_AUTH_TOKEN_PATH": "/t"}, "token"),
        ({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}, "disabled"),
    ],
)
def test_authentication_is_as_the_environment_says_and_never_as_a_leftover_file(
    given: dict[str, str], mode: str
) -> None:
    assert joined_environment(given)["RAY_AUTH_MODE"] == mode


def test_a_number_of_threads_that_the_user_set_is_kept() -> None:
    own = {"OMP_NUM_THREADS": "1", "RAY_JOB_ID": "1", "PATH": "/bin"}
    assert not_for_children(own, {}) == {"OMP_NUM_THREADS", "RAY_JOB_ID"}
    assert not_for_children(own, {"OMP_NUM_THREADS": "1"}) == {"RAY_JOB_ID"}


MISMATCH = (
    "Version mismatch: The cluster was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    "This process on 10.0.0.2 was started with:\n    Ray: 2.61.0\n    Python: 3.12.1\n"
)
NO_NODE = (
    "This node has an IP address of 10.0.0.9, and Ray expects this IP address to be either the GCS address or one of"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(MISMATCH),
            "it has Ray 2.60.0 and Python 3.11.7, and here is Ray 2.61.0 and Python 3.12.1; have the",
        ),
        (RuntimeError(NO_NODE), "this machine is not one of its nodes; run `ray start --address=...` here"),
        (ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379"), "it lets nobody in; set a token"),
        (ConnectionError("Could not find any running Ray instance. Please"), "start one with `ray start --head`"),
        (ValueError("something\nelse"), "something else"),
    ],
)
def test_why_a_ray_cannot_be_joined_is_reported_with_the_fix(error: Exception, said: str) -> None:
    assert said in explained(error, "set a token")


ONE = Free("10.0.0.1", {"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 0.5})
OTHER = Free("10.0.0.2", {"CPU": 4.0}, {"CPU": 4.0})


@pytest.mark.parametrize(
    ("needed", "found", "said"),
    [
        ({"CPU": 4.0}, [ONE, OTHER], None),
        ({"GPU": 1.0}, [ONE, OTHER], "no node has GPU 1 free; the most is 0.5 of 2 on 10.0.0.1"),
        ({"moon": 1.0}, [ONE, OTHER], "no node has moon 1 free; none has any at all"),
        (
            {"CPU": 4.0, "GPU": 0.5},
            [ONE._replace(available={"CPU": 1.0, "GPU": 0.5}), OTHER],
            "no node has CPU 4 and GPU 0.5 free together",
        ),
        ({"CPU": 1.0}, [], "Ray has no node"),
    ],
)
def test_missing_parts_are_reported_in_one_clause(
    needed: dict[str, float], found: list[Free], said: str | None
) -> None:
    assert lacking(needed, found) == said
