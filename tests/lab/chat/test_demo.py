"""`warmroute demo`, on a fleet of its own and on one that runs already; its replicas are simulated."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.control.record import ReplicaView
from lab.chat import scenes
from lab.chat.scenes import kill
from tests.events.processes import DEADLINE_S
from tests.events.terminals import terminal
from tests.fleet.test_up import Up

SPEED = {
    "WARMROUTE_SIMULATED": "1",
    "WARMROUTE_MODEL": "demo",
    "WARMROUTE_MAX_MODEL_LEN": "32768",
    "WARMROUTE_NUM_BLOCKS": "4000",
    "WARMROUTE_SIMULATED_PREFILL_TOKENS_PER_S": "20000",
    "WARMROUTE_SIMULATED_DECODE_TOKENS_PER_S": "200",
    "WARMROUTE_SIMULATED_MEAN_OUTPUT_TOKENS": "0",
}
COLD = re.compile(r"^cold +([\d.]+) s   0 of ([\d,]+) tokens cached · demo-\d", re.M)
WARM = re.compile(r"^cold +[\d.]+ s   warm +([\d.]+) s   ([\d,]+) of [\d,]+ tokens cached · demo-\d", re.M)
LOST = re.compile(
    r"(demo-\d) was killed in the middle of an answer, and (demo-\d) went on in the same stream .*s later"
)


def demo(folder: Path, *arguments: str, **environment: str) -> str:
    """Return what it prints in a pipe."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WARMROUTE_")}
    here = {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    finished = subprocess.run(
        [sys.executable, "-m", "fleet", "demo", *arguments],
        env=env | here | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (finished.stderr, finished.returncode) == ("", 0), finished.stdout
    return finished.stdout


def check_clocks(output: str) -> None:
    [(cold_s, tokens)], warm = COLD.findall(output), WARM.findall(output)
    assert len(warm) == 2
    for warm_s, cached in warm:
        assert float(warm_s) < float(cold_s)
        assert int(cached.replace(",", "")) > 0.9 * int(tokens.replace(",", "")) > 10_000


@pytest.mark.chaos
def test_a_fleet_is_started_loses_a_replica_and_is_ended(tmp_path: Path) -> None:
    output = demo(tmp_path, **SPEED)
    check_clocks(output)
    [(killed, other)] = LOST.findall(output)
    assert killed != other
    assert [*tmp_path.iterdir()] == []


@pytest.mark.chaos
def test_a_fleet_that_runs_loses_a_replica_only_if_it_is_named(tmp_path: Path) -> None:
    up = Up(str(tmp_path), "--port", "0", "--no-ray", XDG_RUNTIME_DIR=str(tmp_path), **SPEED)
    try:
        up.wait_for("Ctrl-C ends everything")
        assert demo(tmp_path).endswith("No replica was killed.\n")
        with terminal("demo", up.url.rpartition(":")[2], TMPDIR=str(tmp_path), XDG_RUNTIME_DIR=str(tmp_path)) as screen:
            screen.read_until(b"later.")
            assert screen.end() == 0
        assert re.search(rb"\rcold +\d\.\d\d s\rcold", screen.written), "a clock runs"
        output = re.sub(r"\x1b\[[\d;?]*\w", "", screen.written.decode()).replace("\r\n", "\n")
        check_clocks(output)  # it asks with another salt each time
        assert LOST.search(output)
        up.wait_for("is ready", times=3)
        assert up.end() == 0
    finally:
        up.close()


def test_a_process_that_is_no_such_replica_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            with pytest.raises(Exception, match=f"process {process.pid} is not demo-0"):
                kill(ReplicaView(name="demo-0", model="demo", life="ready", pid=process.pid))
            assert process.poll() is None
        finally:
            process.kill()


def test_the_guide_is_plain_text_of_some_4_000_tokens() -> None:
    guide = scenes.GUIDE.read_text()
    assert guide.isascii() and 15_000 < len(guide) < 17_000
    assert all(len(line) <= 100 for line in guide.splitlines())
