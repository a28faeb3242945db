"""`warmroute up` as the README has it: on a Ray of its own, with the demo model, and nothing left of either."""

import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.events.processes import wait_until
from tests.fleet.test_up import Up, output_of, starting
from tests.late import openai
from tests.processes import family, is_alive, of_process, opened

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(120),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

RAY_STARTS_S = 60.0  # beside other tests, on a machine that has not read its files yet
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # as /proc writes 127.0.0.1 and ::ffff:127.0.0.1
SYSTEM = "You are a patient librarian who answers in one short sentence, and who never invents a book. " * 8


@contextmanager
def up_on_ray(*options: str) -> Iterator[Up]:
    with starting("--port", "0", *options) as running:
        running.wait_for("Ctrl-C ends everything", within_s=RAY_STARTS_S)
        yield running


def listening(pids: list[int]) -> dict[str, str]:
    """Address by inode, of the TCP sockets that these processes listen on."""
    inodes = set().union(*map(opened, pids))
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[9]: row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def test_two_chats_share_a_prompt_and_ctrl_c_leaves_nothing() -> None:
    with up_on_ray("--model", "demo") as running:
        assert "Ray is ready after" in running.output
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
        served = []
        for question in ("Which book is about the sea?", "And which one is about a cat?"):
            answer = client.chat.completions.with_raw_response.create(
                model="demo",
                max_tokens=8,
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
            )
            usage = answer.parse().usage
            assert usage is not None and usage.prompt_tokens_details is not None
            served.append((answer.headers["x-warmroute-replica"], usage.prompt_tokens_details.cached_tokens))
        client.close()
        [(first, none), (second, cached)] = served
        assert first == second
        assert not none and cached and cached > 100
        shell = re.search(r"^  (curl .*?\n.*?)\n\n", running.output, re.MULTILINE | re.DOTALL)
        assert shell is not None and '"cached_tokens"' in output_of("bash", "-c", shell[1])

        pids = family(running.process.pid)
        addresses = listening(pids)
        assert len(pids) > 8 and len(addresses) > 8
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {os.getpriority(os.PRIO_PROCESS, 0)}
        assert {address.partition(":")[0] for address in addresses.values()} <= LOOPBACK
        assert running.end(signal.SIGINT) == 0
        assert [pid for pid in pids if is_alive(pid)] == []
        assert listening_now() & set(addresses) == set()
        assert list(running.folder.iterdir()) == []


def listening_now() -> set[str]:
    """The inodes of all listening sockets."""
    tables = (Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6"))
    return {line.split()[9] for table in tables for line in table if line.split()[3] == "0A"}


def test_kill_9_of_up_leaves_no_process_of_rays() -> None:
    with up_on_ray("--simulated", "--replicas", "1") as running:
        pids = family(running.process.pid)
        running.end(signal.SIGKILL)
        wait_until(lambda: not [pid for pid in pids if is_alive(pid)], "all of it is gone")


def test_a_second_ctrl_c_does_not_wait_for_ray_either() -> None:
    with up_on_ray("--simulated", "--replicas", "1") as running:
        pids = family(running.process.pid)
        [replica] = [pid for pid in pids if b"--replica-name\0demo-0" in of_process(pid, "cmdline")]
        os.kill(replica, signal.SIGSTOP)
        running.process.send_signal(signal.SIGINT)
        running.wait_for("Ctrl-C again ends at once")
        running.end(signal.SIGINT)
        wait_until(lambda: not [pid for pid in pids if is_alive(pid)], "all of it is gone")
