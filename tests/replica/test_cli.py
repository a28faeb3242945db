"""`warmroute replica` as users run it: its output, its end, and its children's."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from api.process.lifeline import PARENT_VARIABLE
from tests.events.processes import wait_until
from tests.processes import is_alive, opened

COMMAND = [sys.executable, "-m", "fleet", "replica"]
DEMO = ["--model", "demo", "--engine", "simulated", "--port", "0", "--events-port", "0"]
DEADLINE_S = 50.0

PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=sys.stderr)
print(child.pid, flush=True)
child.wait()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run([*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=DEADLINE_S)


@contextmanager
def replica(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running replica, and the address in its ready line."""
    pipe = subprocess.PIPE
    env = os.environ | environment
    with subprocess.Popen([*COMMAND, *arguments], env=env, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            ready = re.match(r"ready on (\S+),", process.stdout.readline())
            assert ready is not None
            yield process, ready[1]
        finally:
            process.kill()


def test_a_model_that_does_not_exist_is_reported_in_one_line() -> None:
    finished = run("--model", "unheard-of")
    assert finished.returncode == 2
    assert finished.stderr == (
        "Error: --model: 'unheard-of' is not a model; give smollm2, demo, a folder with its files, or ORG/NAME to "
        "download\n"
    )


def test_a_role_needs_the_secret_of_the_fleet() -> None:
    ended = run("--model", "demo", "--engine", "simulated", "--role", "prefill")
    assert ended.returncode == 2
    assert "--role prefill" in ended.stderr and "--kv-secret" in ended.stderr


def test_a_setting_that_cannot_be_used_loads_no_web_framework() -> None:
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*(name in sys.modules for name in ('fastapi', 'numpy', 'torch'))))\n"
        "from fleet.cli import main\nmain(['replica', '--model', 'demo', '--port', '-1'])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (finished.returncode, finished.stdout) == (2, "False False False\n")


NATIVE = ["--model", "demo"]


@pytest.mark.parametrize(
    "module",
    ["safetensors", "torch"],
)
def test_without_the_extra_the_command_says_how_to_get_it_and_what_needs_none(module: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None\nfrom fleet.cli import main\nmain(['replica', *{NATIVE!r}])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (finished.returncode, finished.stderr) == (
        1,
        f"warmroute replica needs {module}, which is not installed. "
        "Install it with: pip install 'warmroute[replica]'\n"
        "Or make up the text of answers, without a model: warmroute replica --model demo --engine simulated\n",
    )


def test_a_model_without_a_tokenizer_is_noted() -> None:
    finished = run(*DEMO, "--model", "some/model", "--host", "203.0.113.1")
    assert finished.stderr.startswith(
        "Note: 'some/model' has no tokenizer.json, and there is no --tokenizer: every byte is a token\n"
    )


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_and_ends_as_asked(number: int) -> None:
    with replica(*DEMO, WARMROUTE_API_KEY="a-key-of-mine", WARMROUTE_LOG_LEVEL="debug") as (process, url):
        with urllib.request.urlopen(f"{url}/ready", timeout=DEADLINE_S) as answer:
            assert answer.status == 200
        process.send_signal(number)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "a-key-of-mine" not in out + err


@pytest.mark.chaos
@pytest.mark.parametrize("options", [["--set=die_with_parent=true"], []])
def test_only_with_its_option_it_dies_with_its_parent(options: list[str]) -> None:
    parent = [sys.executable, "-c", PARENT, *COMMAND, *DEMO, *options]
    with subprocess.Popen(parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        pid = int(process.stdout.readline())
        assert process.stderr.readline().startswith("ready on ")
        process.kill()
        process.wait()
        if options:
            wait_until(lambda: not is_alive(pid), "it is gone")
        else:
            with urllib.request.urlopen(f"http://{listening(pid)}/ready", timeout=DEADLINE_S) as answer:
                assert answer.status == 200
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda: not is_alive(pid), "it is gone")


def test_a_parent_that_is_gone_before_the_replica_begins_is_missed() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    finished = run(*DEMO, "--set=die_with_parent=true", **{PARENT_VARIABLE: str(gone.pid)})
    assert (finished.returncode, finished.stdout) == (1, "")


def listening(pid: int) -> str:
    """The address of the process's one TCP socket that listens."""
    own = opened(pid)
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            return f"127.0.0.1:{int(fields[1].partition(':')[2], 16)}"
    raise AssertionError(f"{pid} listens nowhere")
