"""Two native replicas as users run them, one of which reads the other's blocks."""

import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from api.native import REQUEST_TYPE, KvSource, envelope
from api.native import Native as Additions
from tests.events.processes import wait_until
from tests.replica.models import VOCABULARY, saved
from tests.replica.natives import SMALL, Native, ask, completion, native, tokens

SECRET = "a secret of the fleet, not a real one"
OPTIONS = (*SMALL, "--kv-port", 0, "--host-kv-gb", 0.01, "--log-level", "info")
BLOCKS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def source(folder: Path) -> Iterator[Native]:
    with native(folder, *OPTIONS, WARMROUTE_KV_SECRET=SECRET) as running:
        yield running


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[Native]:
    with native(folder, *OPTIONS, WARMROUTE_KV_SECRET=SECRET) as running:
        yield running


def prompt(seed: int, blocks: int = BLOCKS) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCABULARY) for _ in range(16 * blocks + 5)]


def ask_with_source(served: Native, token_ids: Sequence[int], endpoint: str, **fields: Any) -> list[int]:
    """Send a request as a router does; return the tokens of its answer."""
    additions = Additions(kv_sources=[KvSource(endpoint, len(token_ids))])
    body = envelope(additions) + json.dumps(completion(list(token_ids), **fields)).encode()
    answer = served.ask("POST", "/v1/completions", body, {"Content-Type": REQUEST_TYPE})
    assert answer.status == 200, answer.body
    [choice] = answer.json["choices"]
    generated: list[int] = choice["token_ids"]
    return generated


def neighbours(served: Native, side: str) -> dict[str, float]:
    """Return the figures of one direction, and its failures by reason."""
    found = {}
    for family in text_string_to_metric_families(served.get("/metrics").body.decode()):
        for sample in family.samples:
            if sample.name.startswith("warmroute:neighbour_") and sample.labels["direction"] == side:
                found[sample.labels.get("reason", sample.name.split("_")[1])] = sample.value
    return found


def endpoint_of(served: Native) -> str:
    endpoint: str = served.load()["kv_read"]
    return endpoint


def more_blocks(served: Native, side: str, before: float) -> float:
    """Wait for the next report; return how many blocks more it has than before."""
    seen = 0.0

    def has_more() -> bool:
        nonlocal seen
        seen = neighbours(served, side)["blocks"] - before
        return seen > 0

    wait_until(has_more, f"blocks were {side}")
    return seen


def test_replicas_of_one_model_say_where_and_what_may_be_read(source: Native, reader: Native) -> None:
    one, other = source.load(), reader.load()
    assert one["kv_read"].startswith("tcp://127.0.0.1:") and one["kv_read"] != other["kv_read"]
    assert one["kv_layout"] == other["kv_layout"] != ""


def test_an_answer_over_pulled_blocks_is_the_one_over_computed_blocks(source: Native, reader: Native) -> None:
    expected = tokens(source, prompt(1))
    before = neighbours(reader, "pulled")["blocks"], neighbours(source, "read")["blocks"]
    assert ask_with_source(reader, prompt(1), endpoint_of(source)) == expected
    assert more_blocks(reader, "pulled", before[0]) == BLOCKS
    assert more_blocks(source, "read", before[1]) == BLOCKS
    source.check()
    reader.check()


def test_a_replica_begins_with_what_its_neighbour_has(source: Native, folder: Path) -> None:
    expected = [tokens(source, prompt(8) + [3 + end] * 20) for end in range(3)]
    endpoints = f"warm_from=tcp://127.0.0.1:1,{endpoint_of(source)}"
    with native(folder, *OPTIONS, "--set", endpoints, WARMROUTE_KV_SECRET=SECRET) as new:
        assert new.load()["pool"]["cached"] >= BLOCKS
        usage = ask(new, prompt(8) + [3] * 20)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 16 * BLOCKS
        assert [tokens(new, prompt(8) + [3 + end] * 20) for end in range(3)] == expected
        new.check()


@pytest.mark.chaos
def test_a_replica_of_another_fleet_computes_for_itself(source: Native, folder: Path) -> None:
    expected = tokens(source, prompt(4))
    with native(folder, *OPTIONS, WARMROUTE_KV_SECRET="a secret of another fleet") as stranger:
        assert ask_with_source(stranger, prompt(4), endpoint_of(source)) == expected
        wait_until(lambda: neighbours(stranger, "pulled").get("handshake") == 1, "the failure is counted")
        assert neighbours(stranger, "pulled")["blocks"] == 0


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_is_gone_costs_a_moment(reader: Native, folder: Path, number: signal.Signals) -> None:
    with native(folder, *OPTIONS, WARMROUTE_KV_SECRET=SECRET) as dying:
        expected, endpoint = tokens(dying, prompt(6 + number)), endpoint_of(dying)
        pid = dying.engine_pid
        os.kill(pid, number)
        try:
            assert ask_with_source(reader, prompt(6 + number), endpoint) == expected
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        reader.check()


def test_the_secret_is_on_no_command_line(source: Native) -> None:
    for pid in (source.process.pid, source.engine_pid):
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert SECRET not in "".join(source.err)
