"""Retained prefixes by way of the router: real replicas, Anthropic's own client, an operator."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from fleet.commands.router import prefixes
from replica.config import SimulatedConfig
from tests.chaos.routers import RouterProcess, router
from tests.events.processes import wait_until
from tests.late import anthropic
from tests.replica.serving import MODEL, Replica, replica

SIZE = 16
AN_HOUR = {"type": "ephemeral", "ttl": "1h"}
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    config: dict[str, Any] = {"num_blocks": 128, "block_size": SIZE, "max_model_len": 1024, "retained_share": 0.5}
    # Slow enough for a warm cache to be worth more than an idle replica.
    speed = SimulatedConfig(prefill_tokens_per_s=2e4, decode_tokens_per_s=2000, step_overhead_s=0.0)
    with replica(speed, **config) as first, replica(speed, **config) as second:
        yield [first, second]


@contextmanager
def routed(replicas: list[Replica]) -> Iterator[RouterProcess]:
    named = [f"url={one.url},name=r{number}" for number, one in enumerate(replicas)]
    with router("--replica", named[0], "--replica", named[1], "--admin-key", "admin") as running:
        yield running


@pytest.fixture
def served(replicas: list[Replica]) -> Iterator[RouterProcess]:
    for one in replicas:
        one.wait_idle()
        assert one.post("/reset_prefix_cache").status == 200
    with routed(replicas) as running:
        yield running


@pytest.fixture(scope="module")
def shared(replicas: list[Replica]) -> Iterator[RouterProcess]:
    """For requests that change nothing."""
    with routed(replicas) as running:
        yield running


def book(name: str, length: int = 320) -> str:
    return (f"{name} " * length)[:length]


def client_of(url: str, key: str = "none") -> "anthropic.Anthropic":
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def ask(served: RouterProcess, text: str, control: Any = None, salt: str | None = None) -> "anthropic.types.Usage":
    system: Any = [{"type": "text", "text": text} | ({} if control is None else {"cache_control": control})]
    with client_of(served.url) as client:
        return client.messages.create(
            model=MODEL,
            max_tokens=2,
            system=system,
            messages=[{"role": "user", "content": "?"}],
            extra_body={} if salt is None else {"cache_salt": salt},
        ).usage


def press(replicas: list[Replica]) -> None:
    """Use up each cache, without the router's knowledge of the prompts."""
    for one in replicas:
        for number in range(6):
            asked = {"model": MODEL, "prompt": book(f"{number} pressure", 600), "max_tokens": 1}
            assert one.post("/v1/completions", asked).status == 200
        one.wait_idle()


def retained(served: RouterProcess) -> list[Any]:
    found: list[Any] = served.ask("GET", "/retain", None, ADMIN).json["retained"]
    return found


def test_a_client_keeps_a_prefix_for_an_hour(served: RouterProcess, replicas: list[Replica]) -> None:
    first = ask(served, book("kept"), AN_HOUR)
    assert first.cache_creation is not None
    assert first.cache_creation.ephemeral_1h_input_tokens == first.cache_creation_input_tokens == 320
    ask(served, book("lost"))
    press(replicas)
    assert (ask(served, book("kept")).cache_read_input_tokens or 0) >= 320
    assert (ask(served, book("lost")).cache_read_input_tokens or 0) < SIZE
    [one] = retained(served)
    assert (one["tokens"], one["ttl_s"], one["by"], one["model"]) == (320, 3600, "client", MODEL)
    assert all(0 < at["left_s"] <= 3600 for at in one["replicas"])


def test_a_tenant_keeps_its_own_alone(served: RouterProcess, replicas: list[Replica]) -> None:
    ask(served, book("shared"), AN_HOUR, salt="a")
    press(replicas)
    assert (ask(served, book("shared"), salt="b").cache_read_input_tokens or 0) < SIZE
    assert (ask(served, book("shared"), salt="a").cache_read_input_tokens or 0) >= 320


def test_an_operator_retains_lists_and_ends(served: RouterProcess, replicas: list[Replica]) -> None:
    text = book("kept")
    asked = {"model": MODEL, "messages": [{"role": "system", "content": text}], "ttl_s": 60}
    nobody = served.post("/retain", asked, **ADMIN)
    assert (nobody.status, nobody.json["replicas"], nobody.json["id"]) == (200, [], "")
    ask(served, text)
    found: list[Any] = []

    def is_retained() -> bool:
        found[:] = [served.post("/retain", asked, **ADMIN).json]
        return bool(found[0]["replicas"])

    wait_until(is_retained, "the router has heard of the blocks")
    [at] = found[0]["replicas"]
    assert (at["cached_blocks"], at["retained_blocks"]) == (20, 20)
    press(replicas)
    assert (ask(served, text).cache_read_input_tokens or 0) >= 320
    [listed] = retained(served)
    assert (listed["id"], listed["by"]) == (found[0]["id"], "operator")
    ended = served.ask("DELETE", f"/retain/{listed['id']}", None, ADMIN)
    assert (ended.status, ended.json["replicas"][0]["retained_blocks"] or 0) == (200, 0)
    assert retained(served) == []
    press(replicas)
    assert (ask(served, text).cache_read_input_tokens or 0) < SIZE


def test_the_cache_of_an_api_key_is_named_by_the_key(replicas: list[Replica]) -> None:
    text = book("own")
    asked = {"model": MODEL, "messages": [{"role": "system", "content": text}], "ttl_s": 60}
    with router("--replica", f"url={replicas[0].url},name=r0", "--admin-key", "admin", "--api-key", "one") as keyed:
        with client_of(keyed.url, "one") as client:
            said: Any = [{"role": "user", "content": "?"}]
            client.messages.create(model=MODEL, max_tokens=2, system=text, messages=said)
        wait_until(
            lambda: keyed.post("/retain", asked | {"key": "key-1"}, **ADMIN).json["replicas"],
            "the router has heard of the blocks",
        )
        assert keyed.post("/retain", asked, **ADMIN).json["replicas"] == []


def test_prefixes_are_shown_with_the_time_that_is_left(served: RouterProcess) -> None:
    for question in ("one", "two"):
        with client_of(served.url) as client:
            system: Any = [{"type": "text", "text": book("kept"), "cache_control": AN_HOUR}]
            said: Any = [{"role": "user", "content": book(question, 64)}]
            client.messages.create(model=MODEL, max_tokens=2, system=system, messages=said)
    [shared] = served.ask("GET", "/prefixes", None, ADMIN).json["prefixes"]
    assert 3500 < shared["retained_s"] <= 3600
    shown = CliRunner().invoke(prefixes, ["--router", served.url, "--admin-key", "admin"]).output
    assert ", kept 60m" in shown


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({"prompt": "x"}, 400, "ttl_s"),
        ({"prompt": ["x", "y"], "ttl_s": 1}, 400, "prompt"),
        ({"prompt": "x", "ttl_s": 1e6}, 400, "ttl_s"),
        ({"prompt": "x", "ttl_s": 1, "replicas": 0}, 400, "replicas"),
        ({"prompt": "x", "ttl_s": 1, "model": "other"}, 404, "other"),
        ({"prompt": "x", "ttl_s": 1, "key": "nobody"}, 400, "nobody"),
    ],
)
def test_what_cannot_be_retained_is_refused(
    shared: RouterProcess, asked: dict[str, Any], status: int, said: str
) -> None:
    answer = shared.post("/retain", {"model": MODEL} | asked, **ADMIN)
    assert (answer.status, said in json.dumps(answer.error)) == (status, True)


def test_only_operators_may_retain(shared: RouterProcess) -> None:
    for method, path in (("POST", "/retain"), ("GET", "/retain"), ("DELETE", "/retain/0")):
        assert shared.ask(method, path, {}, {}).status in (401, 403)
    missing = shared.ask("DELETE", "/retain/0", None, ADMIN)
    assert (missing.status, missing.error["code"]) == (404, "retention_not_found")
