"""Retained prefixes by way of the router: real replicas, and Anthropic's own client."""

from typing import Any

from replica.config import SimulatedConfig
from tests.chaos.routers import router
from tests.replica.serving import MODEL, Replica, replica
from tests.replica.test_server_retention import SIZE, ask, book


def press(replicas: tuple[Replica, ...]) -> None:
    """Use up each cache, without the router's knowledge of the prompts."""
    for one in replicas:
        for number in range(6):
            asked = {"model": MODEL, "prompt": book(f"{number} pressure", 600), "max_tokens": 1}
            assert one.post("/v1/completions", asked).status == 200
        one.wait_idle()


def test_a_client_keeps_a_prefix_for_an_hour_and_a_tenant_its_own_alone() -> None:
    config: dict[str, Any] = {"num_blocks": 128, "block_size": SIZE, "max_model_len": 1024, "retained_share": 0.5}
    # Slow enough for a warm cache to be worth more than an idle replica.
    speed = SimulatedConfig(prefill_tokens_per_s=2e4, decode_tokens_per_s=2000, step_overhead_s=0.0)
    hour = {"type": "ephemeral", "ttl": "1h"}
    with (
        replica(speed, **config) as first,
        replica(speed, **config) as second,
        router("--replica", f"url={first.url},name=r0", "--replica", f"url={second.url},name=r1") as served,
    ):
        usage = ask(served, book("kept"), hour, salt="a")
        assert usage.cache_creation is not None
        assert usage.cache_creation.ephemeral_1h_input_tokens == usage.cache_creation_input_tokens == 320
        ask(served, book("lost"), salt="a")
        press((first, second))
        assert (ask(served, book("kept"), salt="b").cache_read_input_tokens or 0) < SIZE
        assert (ask(served, book("kept"), salt="a").cache_read_input_tokens or 0) >= 320
        assert (ask(served, book("lost"), salt="a").cache_read_input_tokens or 0) < SIZE
