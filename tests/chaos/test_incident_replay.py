"""A real router's request log and a recording of its replicas, replayed: it decides again as it did."""

import asyncio
import json
import random
import signal
import sys
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest
from click.testing import CliRunner

from lab.commands.simulate import simulate
from lab.incident.replay import IncidentReplay, lines, replay
from lab.trace.formats import read_log, read_trace
from tests.chaos.routers import fleet, http_client, router
from tests.events.processes import Tool, tool, wait_until
from tests.replica.serving import MODEL

pytestmark = [pytest.mark.chaos, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

REPLICAS = 3
REQUESTS = 400
CLIENTS = 12
TRUNKS = 24
AGREEMENT = 0.99  # what may differ: a status or a batch between two decisions, of which no decision says where it was
RATES = (
    *("--num-blocks", 300, "--max-model-len", 2048, "--max-num-seqs", 8),  # so that blocks are evicted, and queues form
    *("--set=simulated_prefill_tokens_per_s=20_000", "--set=simulated_decode_tokens_per_s=400"),
    "--set=simulated_step_overhead=0",
)


class Incident(NamedTuple):
    recording: Path
    log: Path


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Incident:
    folder = tmp_path_factory.mktemp("incident")
    recording, log = folder / "incident.wre", folder / "requests.jsonl"
    with (
        fleet(REPLICAS, *RATES) as replicas,
        router(*replicas.as_options, "--request-log", log, "--log-level", "error") as served,
        tool("record", *replicas.urls, "-o", recording) as recorder,
    ):
        _recording(recorder, recording)
        asyncio.run(_ask(served.url))
        assert recorder.end(signal.SIGINT) == 0, recorder.err
    return Incident(recording, log)


def _recording(recorder: Tool, path: Path) -> None:
    """Until something of every replica has been written: its buffer is flushed once a second."""
    wait_until(lambda: recorder.process.poll() is None and path.exists() and path.stat().st_size > 2000, "it records")


async def _ask(url: str) -> None:
    chance = random.Random(7)
    trunks = ["".join(chance.choices("abcdefgh ", k=200 * chance.randint(1, 6))) for _ in range(TRUNKS)]
    prompts = [chance.choice(trunks) + f"{number} " * chance.randint(1, 60) for number in range(REQUESTS)]
    waiting = iter(prompts)

    async def client(http: httpx2.AsyncClient) -> None:
        for prompt in waiting:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "seed": 1, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

    async with http_client(url) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))


def shown(told: IncidentReplay) -> str:
    return "\n".join(lines(told))


def test_the_router_decides_again_as_it_did(incident: Incident) -> None:
    told = replay(incident.recording, incident.log)
    print(shown(told))
    assert told.requests == told.decisions == REQUESTS
    assert told.compared == REQUESTS - sum(told.uncovered.values()) >= REQUESTS - CLIENTS
    assert told.same >= AGREEMENT * told.compared, shown(told)
    assert not told.kinds["logic"], shown(told)
    assert not told.missing and not told.from_log and not told.damage


def test_another_policy_decides_otherwise_and_a_message_says_where(incident: Incident) -> None:
    told = replay(incident.recording, incident.log, policy="round-robin")
    assert set(told.kinds) == {"policy"} and len(told.differences) >= told.compared / 3, shown(told)
    assert told.replayed.cached_tokens < told.logged.cached_tokens
    first = told.differences[0]
    assert f"{first.request_id}: logged {first.logged}, replayed {first.replayed} (policy)" in shown(told)


def test_a_recording_that_was_cut_is_told_and_what_it_has_is_the_same(incident: Incident, tmp_path: Path) -> None:
    whole = incident.recording.read_bytes()
    (tmp_path / "cut.wre").write_bytes(whole[: len(whole) // 2])
    told = replay(tmp_path / "cut.wre", incident.log)
    after = told.uncovered["after the recording's end"]
    assert told.damage and 0 < after < REQUESTS and told.same >= AGREEMENT * told.compared, shown(told)


def test_without_prompts_on_either_side_it_is_the_same(incident: Incident, tmp_path: Path) -> None:
    with tool("record", incident.recording, "--redact", "-o", tmp_path / "redacted.wre") as copying:
        assert copying.end(None) == 0, copying.err
    told = replay(tmp_path / "redacted.wre", incident.log)
    assert told.compared and told.same >= AGREEMENT * told.compared and not told.other_matches, shown(told)


def test_the_command_says_by_its_status_whether_anything_differs(incident: Incident) -> None:
    files = ["--recording", str(incident.recording), "--requests", str(incident.log)]
    other = CliRunner().invoke(simulate, [*files, "--policy", "round-robin", "--json"])
    assert other.exit_code == 1, other.output
    assert json.loads(other.stdout)["kinds"].keys() == {"policy"}
    same = CliRunner().invoke(simulate, files)
    assert same.exit_code == (0 if replay(incident.recording, incident.log).is_same else 1), same.output
    assert "decisions as logged" in same.stdout


def test_the_log_is_a_trace(incident: Incident) -> None:
    lines_of_log = list(read_log(incident.log))
    assert sum(line.output_tokens or 0 for line in lines_of_log) == 8 * REQUESTS
    assert any(line.cached_tokens for line in lines_of_log) and all(line.body is None for line in lines_of_log)
    trace = read_trace(incident.log)
    assert trace.block_tokens == 16 and len(trace.requests) == REQUESTS
    distinct = {block for request in trace.requests for block in request.blocks}
    assert len(distinct) < sum(len(request.blocks) for request in trace.requests) / 2, "no request shared a prefix"
