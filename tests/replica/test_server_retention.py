"""Prefixes that Anthropic's own client marks with `cache_control`, in real replicas with a small cache."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.routers import RouterProcess
from tests.events.processes import wait_until
from tests.replica.serving import MODEL, Replica, replica

BLOCKS, SIZE = 128, 16
TENANT_BLOCKS = 32  # a half of the half that may be retained
AN_HOUR = {"type": "ephemeral", "ttl": "1h"}
FIVE_MINUTES = {"type": "ephemeral"}


@pytest.fixture(scope="module")
def started() -> Iterator[Replica]:
    with replica(num_blocks=BLOCKS, block_size=SIZE, max_model_len=1024, retained_share=0.5) as running:
        yield running


@pytest.fixture
def small(started: Replica) -> Replica:
    """A replica with an empty cache."""
    started.wait_idle()
    assert started.post("/reset_prefix_cache").status == 200
    return started


def book(name: str, length: int = 320) -> str:
    return (f"{name} " * length)[:length]


def ask(replica: Replica | RouterProcess, text: str, control: Any = None, salt: str | None = None) -> Any:
    from anthropic import Anthropic  # it takes a second, which each test process would need

    system: Any = [{"type": "text", "text": text} | ({} if control is None else {"cache_control": control})]
    with Anthropic(base_url=replica.url, api_key="none", max_retries=0) as client:
        return client.messages.create(
            model=MODEL,
            max_tokens=2,
            system=system,
            messages=[{"role": "user", "content": "?"}],
            extra_body={} if salt is None else {"cache_salt": salt},
        ).usage


def press(replica: Replica) -> None:
    """Ask so much that a cache without retention would keep nothing of what it had."""
    for number in range(2 * BLOCKS * SIZE // 600):
        ask(replica, book(f"pressure {number}", 600))
    replica.wait_idle()


def wait_retained(replica: Replica, blocks: int) -> None:
    wait_until(lambda: replica.load()["pool"]["retained"] == blocks, f"{blocks} blocks are retained")


def test_a_retained_prefix_outlives_pressure_that_evicts_others(small: Replica) -> None:
    ask(small, book("kept"), AN_HOUR)
    ask(small, book("lost"))
    press(small)
    assert ask(small, book("kept")).cache_read_input_tokens >= 320
    assert ask(small, book("lost")).cache_read_input_tokens < SIZE
    wait_retained(small, 20)
    assert b'warmroute:retained_blocks{model_name="demo"} 20.0' in small.get("/metrics").body


def test_retention_refuses_no_request_its_room(small: Replica) -> None:
    for number in range(4):
        ask(small, book(f"kept {number}", 500), AN_HOUR, salt=f"{number % 2}")
    wait_retained(small, 2 * TENANT_BLOCKS)
    for number in range(3):
        ask(small, book(f"large {number}", 900))
    answers = [small.post("/v1/completions", {"model": MODEL, "prompt": "x" * 900, "n": 8, "max_tokens": 60})]
    assert [answer.status for answer in answers] == [200]
    small.wait_idle()


def test_usage_says_what_is_read_and_what_is_written_for_how_long(small: Replica) -> None:
    text = book("book")
    plain = ask(small, text, salt="other")
    count = plain.input_tokens
    assert (plain.cache_creation_input_tokens, plain.cache_read_input_tokens) == (0, 0)
    first, second = (ask(small, text, AN_HOUR) for _ in range(2))
    assert first.cache_creation is not None and second.cache_creation is not None
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (0, 320)
    assert first.cache_creation.ephemeral_1h_input_tokens == 320
    assert first.cache_creation.ephemeral_5m_input_tokens == 0
    assert first.input_tokens == count - 320
    assert second.cache_creation_input_tokens == second.cache_creation.ephemeral_1h_input_tokens == 0
    assert second.cache_read_input_tokens == count - 1 == count - second.input_tokens
    another = ask(small, book("another"), FIVE_MINUTES)
    assert another.cache_creation is not None
    assert another.cache_creation.ephemeral_5m_input_tokens == another.cache_creation_input_tokens
    assert another.cache_creation_input_tokens + another.cache_read_input_tokens == 320


def test_a_tenant_keeps_no_more_than_its_share_and_harms_no_other(small: Replica) -> None:
    ask(small, book("theirs"), AN_HOUR, salt="them")
    for number in range(5):
        ask(small, book(f"mine {number}"), AN_HOUR, salt="me")
    wait_retained(small, 20 + TENANT_BLOCKS)
    press(small)
    assert ask(small, book("theirs"), salt="them").cache_read_input_tokens >= 320
    assert ask(small, book("mine 4"), salt="me").cache_read_input_tokens >= 320
