"""`warmroute shadow` beside routers and real simulated replicas, as users run it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lab.shadow.findings import Findings
from tests.chaos.replicas import wait_gone
from tests.chaos.routers import Fleet, fleet, router
from tests.events.processes import wait_until
from tests.lab.shadow.mirroring import NGINX, mirroring, shadow
from tests.processes import children
from tests.replica.serving import MODEL, Replica

pytestmark = pytest.mark.chaos

FAMILIES, TURNS = 3, 4
SHARED = 640  # bytes, which are tokens here: 40 blocks
CHAT = "/v1/chat/completions"
SPEED = ("--set=simulated_prefill_tokens_per_s=20_000", "--set=simulated_decode_tokens_per_s=2000")
NO_NGINX = pytest.mark.skipif(NGINX is None, reason="there is no nginx; WARMROUTE_NGINX names one")


@pytest.fixture
def replicas() -> Iterator[Fleet]:
    with fleet(2, *SPEED) as started:
        yield started


def bodies() -> list[dict[str, Any]]:
    """Prompts that share a long beginning with those of their family; each family's turns alternate."""
    return [
        {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": shared + f"turn {turn}" * 9}]}
        for turn in range(TURNS)
        for shared in (f"family {number} " * (SHARED // 9) for number in range(FAMILIES))
    ]


def asked(running: Replica, replicas: Fleet) -> int:
    """Ask for all of them, one by one, until the replicas' counters tell so."""
    answers = [running.post(CHAT, body) for body in bodies()]
    assert {answer.status for answer in answers} == {200}
    tokens = sum(answer.json["usage"]["prompt_tokens"] for answer in answers)
    wait_until(lambda: counted(replicas, "query_tokens") == tokens, "the counters are up to date")
    return len(answers)


def counted(replicas: Fleet, counter: str) -> int:
    return sum(replica.load()["pool"][counter] for replica in replicas.replicas)


def hit_share(replicas: Fleet) -> float:
    return counted(replicas, "hit_tokens") / counted(replicas, "query_tokens")


def check(found: Findings, replicas: Fleet) -> None:
    """The twin does as the replicas did, and warmroute computes each family's beginning once."""
    assert (found.simulated_requests, found.skipped, found.sure.exact_trees) == (FAMILIES * TURNS, {}, 2)
    assert found.measured.hit_share == pytest.approx(hit_share(replicas))
    assert found.served.hit_share == pytest.approx(hit_share(replicas), abs=0.01)
    assert found.served.hit_share < 0.7
    assert found.warmroute.hit_share > found.served.hit_share + 0.1
    assert found.saved_prefill_s > 0
    assert found.sure.assumed == ()


def check_known(found: Findings, count: int) -> None:
    """Each request's replica is known, by events after its copy, or before it where the copy was late."""
    assert sum(found.sure.replica_known.values()) == count
    assert found.sure.replica_known.keys() <= {"stored", "held"}


@pytest.mark.parametrize("nginx", [False, pytest.param(True, marks=NO_NGINX)], ids=["proxy", "nginx"])
def test_copies_of_requests_tell_what_was_missed(replicas: Fleet, nginx: bool) -> None:
    with ExitStack() as stack:
        other = stack.enter_context(router(*replicas.as_options, "--policy", "round-robin"))
        watching = stack.enter_context(shadow(*replicas.as_options, "--listen", "127.0.0.1:0", "--interval", 0.2))
        front = stack.enter_context(mirroring(other.port, watching.port, nginx=nginx))
        count = asked(front, replicas)
        wait_until(lambda: watching.has_said(f"{count} requests; cached where they went"), "all are seen")
        started = children(watching.process.pid)
        found = watching.findings()
    check(found, replicas)
    check_known(found, count)
    assert found.at_once.requests == count
    assert found.at_once.served_hit / found.at_once.tokens == pytest.approx(hit_share(replicas), abs=0.01)
    wait_gone(*started)


def test_engines_of_others_are_followed_by_their_own_protocol(tmp_path: Path) -> None:
    """The replicas stand for vLLM: shadow reads their events, metrics and model list as it reads those of vLLM."""
    folder = tmp_path / "demo"
    command = [sys.executable, "-m", "fleet", "fetch", "demo", str(folder), "--tokenizer-only"]
    subprocess.run(command, check=True, capture_output=True)
    with fleet(2, "--model", folder, "--served-model-name", MODEL, *SPEED) as replicas, ExitStack() as stack:
        specs = [
            f"url={one.url},name=r{number},engine=vllm,events=tcp://127.0.0.1:{one.port + 1},"
            f"replay=tcp://127.0.0.1:{one.port + 2}"
            for number, one in enumerate(replicas.replicas)
        ]
        options = [word for spec in specs for word in ("--replica", spec)]
        other = stack.enter_context(router(*replicas.as_options, "--policy", "round-robin"))
        listen = ("--listen", "127.0.0.1:0", "--interval", 0.2)
        watching = stack.enter_context(shadow(*options, *listen, "--model-dir", f"{MODEL}={folder}"))
        count = asked(stack.enter_context(mirroring(other.port, watching.port)), replicas)
        wait_until(lambda: watching.has_said(f"{count} requests; cached where they went"), "all are seen")
        wait_until(lambda: watching.has_said("2 of 2 trees exact"), "both trees are exact")
        found = watching.findings()
        check(found, replicas)
    check_known(found, count)
    assert found.sure.exact_prompts == count


@pytest.fixture
def log(replicas: Fleet, tmp_path: Path) -> Path:
    """The log of a router that has served all requests."""
    path = tmp_path / "requests.jsonl"
    with router(*replicas.as_options, "--policy", "round-robin", "--request-log", path, "--log-prompts") as other:
        asked(other, replicas)
    return path


def test_a_request_log_says_where_requests_went(replicas: Fleet, log: Path) -> None:
    with shadow(*replicas.as_options, "--requests", log) as watching:
        watching.process.wait(30)
        found = watching.findings()
    assert found.sure.replica_known == {"told": FAMILIES * TURNS}
    assert found.measured.reported_hit_share == pytest.approx(hit_share(replicas), abs=0.05)
    assert found.served.hit_share == pytest.approx(hit_share(replicas), abs=0.01)
    assert found.warmroute.hit_share > found.served.hit_share + 0.1
